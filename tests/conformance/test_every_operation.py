"""Every operation on every dtype, reduction, shape, memory layout and kind of group, in any order, against numpy.

A program is a list of steps. Those of a table have every two settings together; others are drawn. Each kind of
group cuts data into pieces and messages of other sizes, down to a few bytes: every line that is there for counts
beyond 2^31 is taken.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from helpers.collective_checks import EDGE_BYTES, LAYOUTS, WITH_SYMMETRIC, CollectiveChecks, allows
from helpers.numpy_reference import DTYPES, reductions
from helpers.placements import new_groups_of
from helpers.settings import all_pairs

from axonmpi import ProcessGroup, World
from axonmpi.backends.connection.connection import ChunkSizes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
OPERATIONS = (*WITH_SYMMETRIC, "scan", "gather", "scatter", "all_to_all", "ring")
SIZES = (ChunkSizes(), ChunkSizes(7, 7), ChunkSizes(64, 1000), ChunkSizes(1000, 64), ChunkSizes(message=7))
"""Those of each kind of group."""
EDGE = -EDGE_BYTES
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 1, 3), (13, 37), (EDGE - 1,), (EDGE,), (EDGE + 1,))
"""Those around `EDGE` are one element fewer than two ranks send with the agreement by small chunks, as many, and
one more."""


Step = dict[str, Any]
"""One operation. Numbers that have to be below something (a root, a dimension) are taken modulo it."""


def run(step: Step, checks: CollectiveChecks) -> None:
    operation, dtype, layout, sizes = (step[name] for name in ("operation", "dtype", "layout", "sizes"))
    shape = step["shape"] or ((5,) if operation in ("scatter", "reduce_scatter") else ())
    if shape and shape[0] < 0:
        shape = (EDGE_BYTES // dtype.itemsize + shape[0] - EDGE,)
    layout = layout if allows(dtype, shape, layout) else "contiguous"
    ops = reductions(dtype)
    if operation == "all_to_all":
        checks.all_to_all([(dtype, shape), (DTYPES[step["number"]], sizes), (dtype, (1,) * 12)], layout)
        return
    checks.run(
        operation,
        dtype,
        shape,
        op=ops[step["number"] % len(ops)],
        root=step["number"] % checks.group.size,
        dim=step["number"] % max(len(shape), 1),
        layout=layout,
        sizes=sizes if shape else None,
        tag=step["number"],
    )


TABLE = all_pairs(
    operation=OPERATIONS,
    group=range(len(SIZES)),
    dtype=DTYPES,
    shape=SHAPES,
    layout=LAYOUTS,
    number=range(6),
    asynchronous=(False, True),
    sizes=((5, 0, 11), (2,), (0, 7, 1, 3)),
)


def drawn_step(drawn: Random) -> Step:
    dims = drawn.randrange(5)
    return {
        "operation": drawn.choice(OPERATIONS),
        "group": drawn.randrange(len(SIZES)),
        "dtype": drawn.choice(DTYPES),
        "shape": tuple(drawn.randrange(8) for _ in range(dims)) if dims else (drawn.randrange(20, 700),),
        "layout": drawn.choice(LAYOUTS),
        "number": drawn.randrange(12),
        "asynchronous": drawn.random() < 0.5,
        "sizes": tuple(drawn.randrange(10) for _ in range(drawn.randrange(1, 5))),
    }


def make_groups(world: World) -> list[ProcessGroup]:
    """All ranks, the same in two other orders, and two parts that overlap. Mock ranks have no limits."""
    size, half = world.size, (world.size + 1) // 2
    sets = [range(size), [*range(1, size), 0], range(half), range(half - 1, size), range(size)[::-1]]
    groups = []
    for ranks, sizes in zip(sets, SIZES, strict=True):
        with new_groups_of(world, sizes):
            groups.append(world.new_group(ranks))
    return groups


def check(world: World, program: Sequence[Step], name: str) -> None:
    groups = make_groups(world)
    all_checks = {
        (index, asynchronous): CollectiveChecks(
            group, asynchronous=asynchronous, seed=10 * index + asynchronous, label=f"in {group.ranks}"
        )
        for index, group in enumerate(groups)
        if group.contains(world.rank)
        for asynchronous in (False, True)
    }
    for step in program:
        if checks := all_checks.get((step["group"], step["asynchronous"])):
            run(step, checks)
    for checks in all_checks.values():
        checks.barrier()
        checks.settle()
    problems = [problem for checks in all_checks.values() for problem in checks.problems]
    for group in groups:
        group.close()
    assert not problems, "\n".join([name, *problems[:10]])


@pytest.mark.ranks(1, 2, 3)
def test_every_two_settings_together(world) -> None:
    check(world, TABLE, "the table")


@pytest.mark.ranks(2, 4)
def test_any_program(world, seed) -> None:
    for number in range(3):
        drawn = Random(f"{seed} {number}")
        check(world, [drawn_step(drawn) for _ in range(40)], f"program {number} of seed {seed}")


@pytest.mark.ranks(2, 3)
def test_every_reduction_of_every_dtype(group) -> None:
    checks = CollectiveChecks(group)
    for dtype in DTYPES:
        for op in reductions(dtype):
            checks.all_reduce(dtype, (7,), op)
            checks.reduce(dtype, (3, 40), op, group.size - 1)
            checks.reduce_scatter(dtype, (3, 40), op, 1)
    checks.finish()
