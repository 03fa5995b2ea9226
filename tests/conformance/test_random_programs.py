"""Random programs: any operations in any order, in groups that overlap, some of them waited for much later."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from collective_checks import LAYOUTS, CollectiveChecks, allows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy_reference import Shape, reductions

from axonmpi import World
from axonmpi.backends.reduction import DTYPES

pytestmark = [
    pytest.mark.ranks(1, 2, 4),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"),
    *("ring", "barrier"),
)


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


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.integers(20, 2000).map(lambda count: (count,))
steps = st.builds(
    Step,
    operation=st.sampled_from(OPERATIONS),
    group=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    layout=st.sampled_from(LAYOUTS),
    number=st.integers(0, 11),
    asynchronous=st.booleans(),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
)


def make_groups(world: World) -> list:
    """All ranks, the same in another order, and two overlapping parts."""
    size = world.size
    half = math.ceil(size / 2)
    sets = [range(size), [*range(1, size), 0], range(half), range(half - 1, size)]
    return [world.new_group(ranks) for ranks in sets]


def run(checks: CollectiveChecks, step: Step) -> None:
    dtype, shape, number = step.dtype, step.shape, step.number
    layout = step.layout if allows(dtype, shape, step.layout) else "contiguous"
    root = number % checks.group.size
    dim = number % max(len(shape), 1)
    ops = reductions(dtype)
    op = ops[number % len(ops)]
    if step.operation == "all_reduce":
        checks.all_reduce(dtype, shape, op, layout)
    elif step.operation == "reduce":
        checks.reduce(dtype, shape, op, root, layout)
    elif step.operation == "reduce_scatter" and shape:
        checks.reduce_scatter(dtype, shape, op, dim, layout)
    elif step.operation == "broadcast":
        checks.broadcast(dtype, shape, root, layout)
    elif step.operation == "all_gather":
        checks.all_gather(dtype, shape, dim, layout, step.sizes if shape else None)
    elif step.operation == "gather":
        checks.gather(dtype, shape, root, layout, step.sizes if shape else None)
    elif step.operation == "scatter" and shape:
        checks.scatter(dtype, shape, root, layout)
    elif step.operation == "all_to_all":
        checks.all_to_all([(dtype, shape), (DTYPES[number], step.sizes)], layout)
    elif step.operation == "ring":
        checks.ring(dtype, shape, layout, number)
    else:
        checks.barrier()


@EXAMPLES
@given(program=st.lists(steps, max_size=30), limits=st.tuples(st.integers(1, 300), st.integers(1, 300)))
@example(program=[], limits=(1, 1))
def test_any_program(world, program: list[Step], limits: tuple[int, int]) -> None:
    groups = make_groups(world)
    all_checks = []
    for index, group in enumerate(groups):
        if group.contains(world.rank):
            if group.backend.name == "mpi":
                group.backend.piece_bytes, group.backend.max_message_bytes = limits
            ways = (False, True)
            all_checks.append([CollectiveChecks(group, asynchronous=way, seed=10 * index + way) for way in ways])
        else:
            all_checks.append([])
    for step in program:
        if all_checks[step.group]:
            run(all_checks[step.group][step.asynchronous], step)
    problems = []
    for checks in [checks for ways in all_checks for checks in ways]:
        checks.settle()
        problems += checks.problems
    for group in groups:
        group.close()
    assert not problems, "\n".join(problems[:10])
