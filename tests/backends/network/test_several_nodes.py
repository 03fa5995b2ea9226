"""Groups on several pretended nodes: bits of sums, and many operations begun at once, against numpy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers.placements import REAL, agree_on_bits

import axonmpi as ax
from axonmpi import CollectiveMismatchError, ProcessGroup, ReduceOp, World

pytestmark = [REAL, pytest.mark.ranks(4)]
SIZES = (40, 129, 5000, 70_001, 300_000)
OPS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX)


@pytest.fixture(params=[1, 2, 3], ids=["one_a_node", "two_a_node", "three_a_node"])
def nodes(request, monkeypatch) -> Callable[[World], ProcessGroup]:
    """Makes a group of all ranks with so many on each node, as they believe: 1 + 1 + 1 + 1, 2 + 2, or 3 + 1."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(request.param))

    def make(world: World) -> ProcessGroup:
        group = world.new_group(range(world.size))
        assert group.backend.path == ("plain" if request.param == 1 else "nodes")
        return group

    return make


def values(number: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(size, generator=generator).to(dtype)


def expected(number: int, ranks: int, size: int, dtype: torch.dtype, op: ReduceOp) -> np.ndarray:
    parts = np.stack([values(number, rank, size, dtype).double().numpy() for rank in range(ranks)])
    if op is ReduceOp.MAX:
        return parts.max(0)
    return parts.sum(0) / (ranks if op is ReduceOp.AVERAGE else 1)


def check(number: int, tensor: torch.Tensor, group: ProcessGroup, op: ReduceOp) -> None:
    wanted = expected(number, group.size, tensor.numel(), tensor.dtype, op)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[tensor.dtype]
    np.testing.assert_allclose(tensor.double().numpy(), wanted, rtol=tolerance, atol=tolerance)
    assert agree_on_bits(group, tensor)


@contextmanager
def one_is_late(world: World, late: int) -> Iterator[None]:
    """Let one rank start its operations when the others have started all of theirs, which wait for it."""
    if world.rank == late:
        world.barrier()
    yield
    if world.rank != late:
        world.barrier()


def test_many_at_once(world, nodes) -> None:
    group = nodes(world)
    chosen = random.Random(0)
    for late in range(3):  # from the second time on in memory that is known
        cases = []
        with torch.inference_mode(late == 2):
            for number in range(10):
                size, op = chosen.choice(SIZES), chosen.choice(OPS)
                dtype = chosen.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
                # Some lie in ordinary memory, of one rank only or of all of them.
                where = chosen.choice(("shared", "shared", "shared", "ordinary", "ordinary_on_0"))
                tensor = group.symmetric_empty((size,), dtype)
                if where == "ordinary" or (where == "ordinary_on_0" and group.rank == 0):
                    tensor = torch.empty(size, dtype=dtype)
                cases.append((number, tensor.copy_(values(number, group.rank, size, dtype)), op))
            with one_is_late(world, late):
                works = [group.all_reduce(tensor, op, True) for _, tensor, op in cases]
        for _ in range(3):  # waits for those under way, also where it was made before
            small = torch.tensor([float(group.rank)])
            group.all_reduce(small)
            assert small.item() == sum(range(group.size))
        for work, (number, tensor, op) in chosen.sample([*zip(works, cases, strict=True)], len(works)):
            work.wait()
            check(number, tensor.clone(), group, op)


def in_node_order(number: int, group: ProcessGroup, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Add the values of each node's ranks in their order, and then the nodes' sums, in float32 and rounded once."""
    ranks_of_nodes = sorted(set(ax.all_gather_object(group.backend.node_ranks, group)))
    sums = []
    for ranks in ranks_of_nodes:
        parts = [values(number, rank, size, dtype).float().numpy() for rank in ranks]
        sums.append(functools.reduce(np.add, parts))
    return torch.from_numpy(functools.reduce(np.add, sums)).to(dtype)


@pytest.mark.parametrize("order", ["auto", "ordered"])
def test_bits_depend_neither_on_memory_nor_on_time(world, nodes, order, monkeypatch) -> None:
    monkeypatch.setenv("AXONMPI_SUMS", order)
    group = nodes(world)
    cases = [(size, dtype) for size in (7, 90_001) for dtype in (torch.float32, torch.bfloat16)]
    for number, (size, dtype) in enumerate([*cases, (1_300_000, torch.float32)]):
        own = values(number, group.rank, size, dtype)
        results = []
        for place in ("ordinary", "strided", "symmetric"):
            for asynchronous in (False, True, True):
                tensor = group.symmetric_empty((size,), dtype) if place == "symmetric" else own.clone()
                tensor = torch.empty(size, 2, dtype=dtype)[:, 1] if place == "strided" else tensor
                tensor.copy_(own)
                work = group.all_reduce(tensor, ReduceOp.SUM, asynchronous)
                if work is not None:
                    work.wait()
                results.append(tensor.contiguous())
        assert agree_on_bits(group, results[0])
        for result in results[1:]:
            assert torch.equal(results[0], result)
        if order == "ordered":
            assert torch.equal(results[0], in_node_order(number, group, size, dtype))


SMALL = (
    torch.tensor([3], dtype=torch.uint8),
    torch.tensor(True),
    torch.tensor([-5]),
    torch.tensor([0.5, 2.0]),
    torch.linspace(-1, 1, 28),
    torch.zeros(0),
)
PLACES = (
    slice(0, 1),
    slice(2, 3),
    (1, slice(0, 1)),
    (slice(0, 2), slice(100, 9000)),
    (slice(None), 7),
    slice(None),
)


def test_whatever_waits_behind_them(world, nodes) -> None:
    """Small and large, in memory of their own and in common, among other operations: in the order of the calls."""
    group = nodes(world)
    for late in range(2):
        chosen = random.Random(late)
        memory = group.symmetric_empty((3, 20_000), torch.float32).fill_(1)
        expected_there = torch.ones(3, 20_000)
        kinds = chosen.choices(("large", "small", "there", "gather", "barrier"), weights=(2, 3, 1, 1, 1), k=30)
        large = [group.symmetric_empty((chosen.choice(SIZES),), torch.float32) for kind in kinds if kind == "large"]
        begun = []
        with one_is_late(world, late):
            for number, kind in enumerate(kinds):
                tensor = wanted = torch.zeros(0)
                if kind == "large":
                    tensor = large.pop()
                    tensor.copy_(values(number, group.rank, tensor.numel(), torch.float32))
                    wanted = torch.from_numpy(
                        expected(number, group.size, tensor.numel(), torch.float32, ReduceOp.SUM)
                    )
                    work = group.all_reduce(tensor, ReduceOp.SUM, True)
                elif kind == "small":
                    wanted = chosen.choice(SMALL).clone()
                    tensor = wanted.clone()
                    if tensor.dtype is not torch.bool:
                        tensor += group.rank
                        wanted += group.size - 1
                    work = group.all_reduce(tensor, ReduceOp.MAX, True)
                elif kind == "there":
                    place = chosen.choice(PLACES)
                    expected_there[place] *= group.size
                    work = group.all_reduce(memory[place], ReduceOp.SUM, True)
                elif kind == "gather":
                    tensor, wanted = None, torch.tensor([[number, rank] for rank in range(group.size)])
                    work = group.all_gather(wanted[group.rank : group.rank + 1], async_op=True)
                else:
                    work = group.barrier(async_op=True)
                begun.append((work, tensor, wanted))
        for work, tensor, wanted in begun:
            work.wait()
            result = work.result() if tensor is None else tensor
            torch.testing.assert_close(result.double(), wanted.double(), rtol=1e-5, atol=1e-5)
        assert torch.equal(memory, expected_there)


@pytest.mark.parametrize("other", ["smaller", "a flag", "a barrier"])
def test_a_mismatch_among_them_is_raised_in_its_turn(world, nodes, other) -> None:
    group = nodes(world)
    tensors = [group.symmetric_empty((5000,), torch.float32).fill_(1) for _ in range(6)]
    works = []
    with one_is_late(world, 1):
        for number, tensor in enumerate(tensors):
            if number != 3 or group.rank != 1:
                works.append(group.all_reduce(tensor, ReduceOp.SUM, True))
            elif other == "a barrier":
                works.append(group.barrier(async_op=True))
            else:
                wrong = tensor[:4000] if other == "smaller" else torch.ones(1)
                works.append(group.all_reduce(wrong, ReduceOp.SUM, True))
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        if number == 3:
            with pytest.raises(CollectiveMismatchError, match="5000"):
                work.wait()
            assert torch.equal(tensor, torch.ones(5000))
        else:
            work.wait()
            assert torch.equal(tensor, torch.full((5000,), float(group.size)))


def test_operations_on_the_same_memory_follow_each_other(world, nodes) -> None:
    """In the order in which they were started, also where one sees the memory in another order, or part of it."""
    group = nodes(world)
    for kind in ("shared", "ordinary"):
        whole = group.symmetric_empty((300, 500), torch.float32) if kind == "shared" else torch.empty(300, 500)
        whole.fill_(1)
        views = (whole, whole, whole.t(), whole[100:], whole[:200], whole)
        with one_is_late(world, 0):
            works = [group.all_reduce(view, ReduceOp.SUM, True) for view in views]
        for work in works:
            work.wait()
        wanted = torch.full((300, 500), float(group.size) ** 4)
        wanted[100:] *= group.size
        wanted[:200] *= group.size
        assert torch.equal(whole, wanted)


def test_memory_of_a_node_is_filled_first_of_all(world, nodes) -> None:
    """Also by ranks of a larger node that lead no slice, where nothing large has been sent before."""
    group = nodes(world)
    sizes = [5000 + 7 * rank for rank in range(group.size)]
    output = group.backend.node_empty((sum(sizes),), torch.float32)
    group.backend.all_gather_into(output, values(0, group.rank, sizes[group.rank], torch.float32), sizes)
    wanted = torch.cat([values(0, rank, size, torch.float32) for rank, size in enumerate(sizes)])
    assert torch.equal(output, wanted)
    group.barrier()


def test_staging_is_not_written_while_others_read_it(world, nodes, monkeypatch) -> None:
    """Where a node has no memory for staging, what small operations use stands in for it."""
    monkeypatch.setattr("axonmpi.backends.shared.arena.Arena.allocate", lambda *_, **__: "no memory")
    group = nodes(world)
    for number in range(60):
        large = values(number, 0, 37_500, torch.float32) if group.rank == 0 else torch.empty(37_500)
        group.broadcast(large, 0)
        gathered = group.all_gather(torch.full((500,), float(group.rank)))
        assert torch.equal(large, values(number, 0, 37_500, torch.float32))
        assert gathered.view(group.size, 500)[:, 0].tolist() == list(range(group.size))
