"""Groups on several pretended nodes: many operations begun at once, against torch in float64."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.placements import REAL, agree_on_bits
from torch import Tensor

from axonmpi import CollectiveMismatchError, ProcessGroup, ReduceOp, Work, World

pytestmark = [REAL, pytest.mark.ranks(4)]
SIZES = (40, 129, 5000, 70_001, 300_000)
COMBINE = {ReduceOp.SUM: torch.sum, ReduceOp.AVERAGE: torch.mean, ReduceOp.MAX: torch.amax}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
SMALL = (
    torch.tensor([3], dtype=torch.uint8),
    torch.tensor([-5]),
    torch.tensor([0.5, 2.0]),
    torch.linspace(-1, 1, 28),
    torch.zeros(0),
)
VIEWS = (
    lambda memory: memory[:1],
    lambda memory: memory[1, :1],
    lambda memory: memory[:200, 100:],
    lambda memory: memory[:, 7],
    lambda memory: memory.t(),
    lambda memory: memory,
)
"""Overlapping parts of a matrix, in several orders."""

Prepared = tuple[Callable[[], Work], Tensor | None, Tensor]
"""How to start an operation, the tensor that it changes or None for its result, and what has to be in that."""


@pytest.fixture(params=[1, 2, 3], ids=["one_a_node", "two_a_node", "three_a_node"])
def nodes(request, monkeypatch) -> Callable[[World], ProcessGroup]:
    """Makes a group of all ranks with so many on each node, as they believe: 1 + 1 + 1 + 1, 2 + 2, or 3 + 1."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(request.param))

    def make(world: World) -> ProcessGroup:
        group = world.new_group(range(world.size))
        assert group.backend.path == ("plain" if request.param == 1 else "nodes")
        return group

    return make


def values(number: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * number + rank)).to(dtype)


@contextmanager
def one_is_late(world: World, late: int) -> Iterator[None]:
    """Let one rank start its operations when the others have started all of theirs, which wait for it."""
    if world.rank == late:
        world.barrier()
    yield
    if world.rank != late:
        world.barrier()


def large(number: int, drawn: random.Random, group: ProcessGroup) -> Prepared:
    """A reduction in shared memory, or in ordinary memory of one rank only or of all of them."""
    size, op = drawn.choice(SIZES), drawn.choice(list(COMBINE))
    dtype = drawn.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
    where = drawn.choice(("shared", "shared", "shared", "ordinary", "ordinary_on_0"))
    tensor = group.symmetric_empty((size,), dtype)
    if where == "ordinary" or (where == "ordinary_on_0" and group.rank == 0):
        tensor = torch.empty(size, dtype=dtype)
    tensor.copy_(values(number, group.rank, size, dtype))
    parts = torch.stack([values(number, rank, size, dtype).double() for rank in range(group.size)])
    return partial(group.all_reduce, tensor, op, True), tensor, COMBINE[op](parts, 0).to(dtype)


def small(number: int, drawn: random.Random, group: ProcessGroup) -> Prepared:
    chosen = drawn.choice(SMALL)
    tensor = chosen + group.rank
    return partial(group.all_reduce, tensor, ReduceOp.MAX, True), tensor, chosen + group.size - 1


def gather(number: int, drawn: random.Random, group: ProcessGroup) -> Prepared:
    wanted = torch.tensor([[number, rank] for rank in range(group.size)])
    return partial(group.all_gather, wanted[group.rank : group.rank + 1], async_op=True), None, wanted


def test_many_at_once_in_the_order_of_the_calls(world, nodes, seed) -> None:
    """Among them some on the same memory, seen in other orders or in part; from the second round on it is known."""
    group = nodes(world)
    kinds = (*[large] * 3, *[small] * 3, gather, group.barrier, *VIEWS)
    for late in range(3):
        drawn = random.Random(f"{seed} {late}")
        with torch.inference_mode(late == 2):
            memory = group.symmetric_empty((300, 500), torch.float32) if late else torch.empty(300, 500)
            memory.fill_(1)
            there = torch.ones(300, 500)
            prepared = []
            for number, kind in enumerate(drawn.choices(kinds, k=30)):
                if kind in (large, small, gather):
                    prepared.append(kind(number, drawn, group))
                elif kind in VIEWS:
                    kind(there).mul_(group.size)
                    prepared.append(
                        (partial(group.all_reduce, kind(memory), ReduceOp.SUM, True), there[:0], there[:0])
                    )
                else:
                    prepared.append((partial(group.barrier, async_op=True), there[:0], there[:0]))
            with one_is_late(world, late):
                works = [start() for start, _, _ in prepared]
        group.all_reduce(one := torch.tensor([float(group.rank)]))  # waits for those under way
        assert one.item() == sum(range(group.size))
        for number, (work, (_, tensor, wanted)) in enumerate(zip(works, prepared, strict=True)):
            found = work.result()
            found = found if tensor is None else tensor
            assert_close(found, wanted, TOLERANCE.get(found.dtype, 1e-12), f"seed {seed}, round {late}, {number}")
            assert agree_on_bits(group, found), (seed, late, number)
        assert torch.equal(memory, there), (seed, late)


def test_a_mismatch_among_them_is_raised_in_its_turn(world, nodes) -> None:
    group = nodes(world)
    for other in ("smaller", "a flag", "a barrier"):
        tensors = [group.symmetric_empty((5000,), torch.float32).fill_(1) for _ in range(6)]
        starts = [partial(group.all_reduce, tensor, ReduceOp.SUM, True) for tensor in tensors]
        if group.rank == 1:
            starts[3] = {
                "smaller": partial(group.all_reduce, tensors[3][:4000], ReduceOp.SUM, True),
                "a flag": partial(group.all_reduce, torch.ones(1), ReduceOp.SUM, True),
                "a barrier": partial(group.barrier, async_op=True),
            }[other]
        with one_is_late(world, 1):
            works = [start() for start in starts]
        refused(CollectiveMismatchError, (works[3].wait, "5000"))
        for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            if number != 3:
                work.wait()
            assert torch.equal(tensor, torch.full((5000,), 1.0 if number == 3 else float(group.size))), (
                other,
                number,
            )


def test_memory_of_a_node_is_filled_first_of_all(world, nodes) -> None:
    """Also by ranks of a larger node that lead no slice, where nothing large has been sent before."""
    group = nodes(world)
    sizes = [5000 + 7 * rank for rank in range(group.size)]
    output = group.backend.node_empty((sum(sizes),), torch.float32)
    group.backend.all_gather_into(output, values(0, group.rank, sizes[group.rank], torch.float32), sizes)
    wanted = torch.cat([values(0, rank, size, torch.float32) for rank, size in enumerate(sizes)])
    assert torch.equal(output, wanted)
    group.barrier()
