"""Every operation on every dtype, reduction, shape, memory layout and kind of group, in any order, against numpy.

A program is a list of steps. Those of a table have every two settings together; others are drawn. Each kind of
group cuts data into pieces and messages of other sizes, down to a few bytes: every line that is there for counts
beyond 2^31 is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from helpers.collective_checks import LAYOUTS, PAYLOAD_BYTES, CollectiveChecks, allows
from helpers.numpy_reference import DTYPES, Shape, reductions
from helpers.settings import all_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi import ProcessGroup, World

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
EXAMPLES = settings(max_examples=5, derandomize=True, database=None)
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"),
    "ring",
)
LIMITS = ((1 << 20, 1 << 30), (7, 7), (64, 1000), (1000, 64), (1 << 20, 7))
"""For each kind of group, bytes in a piece of a reduction, and in a message."""
PAYLOAD = -PAYLOAD_BYTES
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 1, 3), (13, 37), (PAYLOAD - 1,), (PAYLOAD,), (PAYLOAD + 1,))
"""Those around `PAYLOAD` are one element fewer than what fits into the first message, as many, and one more."""


@dataclass(frozen=True)
class Step:
    """One operation. Numbers that have to be below something (a root, a dimension) are taken modulo it."""

    operation: str
    group: int
    dtype: torch.dtype
    shape: Shape
    layout: str
    number: int
    asynchronous: bool
    sizes: tuple[int, ...]

    def run(self, checks: CollectiveChecks) -> None:
        shape = self.shape or ((5,) if self.operation in ("scatter", "reduce_scatter") else ())
        if shape and shape[0] < 0:
            shape = (PAYLOAD_BYTES // self.dtype.itemsize + shape[0] - PAYLOAD,)
        layout = self.layout if allows(self.dtype, shape, self.layout) else "contiguous"
        root = self.number % checks.group.size
        dim = self.number % max(len(shape), 1)
        ops = reductions(self.dtype)
        op = ops[self.number % len(ops)]
        sizes = self.sizes if shape else None
        if self.operation in ("all_reduce", "reduce", "reduce_scatter"):
            place = {"all_reduce": (), "reduce": (root,), "reduce_scatter": (dim,)}[self.operation]
            getattr(checks, self.operation)(self.dtype, shape, op, *place, layout)
        elif self.operation in ("broadcast", "scatter"):
            getattr(checks, self.operation)(self.dtype, shape, root, layout)
        elif self.operation in ("all_gather", "gather"):
            place = dim if self.operation == "all_gather" else root
            getattr(checks, self.operation)(self.dtype, shape, place, layout, sizes)
        elif self.operation == "all_to_all":
            checks.all_to_all(
                [(self.dtype, shape), (DTYPES[self.number], self.sizes), (self.dtype, (1,) * 12)], layout
            )
        else:
            checks.ring(self.dtype, shape, layout, self.number)


TABLE = [
    Step(**row)
    for row in all_pairs(
        operation=OPERATIONS,
        group=range(len(LIMITS)),
        dtype=DTYPES,
        shape=SHAPES,
        layout=LAYOUTS,
        number=range(6),
        asynchronous=(False, True),
        sizes=((5, 0, 11), (2,), (0, 7, 1, 3)),
    )
]
steps = st.builds(
    Step,
    operation=st.sampled_from(OPERATIONS),
    group=st.integers(0, len(LIMITS) - 1),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.integers(20, 700).map(lambda count: (count,)),
    layout=st.sampled_from(LAYOUTS),
    number=st.integers(0, 11),
    asynchronous=st.booleans(),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
)


def make_groups(world: World) -> list[ProcessGroup]:
    """All ranks, the same in two other orders, and two parts that overlap. Mock ranks have no limits."""
    size = world.size
    half = (size + 1) // 2
    sets = [range(size), [*range(1, size), 0], range(half), range(half - 1, size), range(size)[::-1]]
    groups = [world.new_group(ranks) for ranks in sets]
    for group, limits in zip(groups, LIMITS, strict=True):
        if group.contains(world.rank) and group.backend.name == "mpi":
            group.backend.piece_bytes, group.backend.max_message_bytes = limits
    return groups


def check(world: World, program: Sequence[Step]) -> None:
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
        if (step.group, step.asynchronous) in all_checks:
            step.run(all_checks[step.group, step.asynchronous])
    for checks in all_checks.values():
        checks.barrier()
        checks.settle()
    problems = [problem for checks in all_checks.values() for problem in checks.problems]
    for group in groups:
        group.close()
    assert not problems, "\n".join(problems[:10])


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_two_settings_together(world) -> None:
    check(world, TABLE)


@pytest.mark.ranks(2, 4)
@EXAMPLES
@given(program=st.lists(steps, max_size=30))
def test_any_program(world, program: list[Step]) -> None:
    check(world, program)


@pytest.mark.ranks(2, 3)
def test_every_reduction_of_every_dtype(group) -> None:
    checks = CollectiveChecks(group)
    for dtype in DTYPES:
        for op in reductions(dtype):
            checks.all_reduce(dtype, (7,), op)
            checks.reduce(dtype, (3, 40), op, group.size - 1)
            checks.reduce_scatter(dtype, (3, 40), op, 1)
    checks.finish()
