"""Hundreds of collectives of all kinds in groups that overlap: every result is right, and no memory is lost."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.placements import REAL, limits
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp, World

STEPS = 300
"""Of each run: what is remembered about calls after the first ones serves the others too."""
RUNS = 4
GROWTH_PER_STEP = 4096
DTYPES = (torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)
COMBINE = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
OPERATIONS = ("all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
SIZES = (0, 1, 3, 14, 28, 29, 100, 1000, 5000, 20_000)
POOL = 1 << 20


@dataclass
class Member:
    """A group that this rank is in, with memory for its tensors.

    Attributes:
        group: The group.
        symmetric: 8-byte words of shared memory, some more than the largest tensor has.
        under_way: Asynchronous operations and what has to come out.
    """

    group: ProcessGroup
    symmetric: Tensor
    under_way: list


class Program:
    """The same random steps on all ranks; small whole numbers, so that every result is exact."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.large = limits(world.size).medium // 4 + 100
        pools = [np.random.default_rng(rank).integers(-3, 4, POOL) for rank in range(world.size)]
        self.pools = [pool.astype(np.int8) for pool in pools]
        size = world.size
        sets = [range(size), range(size)[::-1], range(size - size // 2), range(size // 2, size), [0, size - 1]]
        groups = [world.new_group(ranks) for ranks in sets]
        for group in groups[::2]:  # data of a few pages is several chunks
            if group.contains(world.rank) and group.backend.name == "mpi":
                group.backend.piece_bytes = 1 << 14
        self.members = [
            Member(group, group.symmetric_empty((self.large + 64,), torch.int64), [])
            if group.contains(world.rank)
            else None
            for group in groups
        ]

    def run(self) -> None:
        """Make the same steps as any other run."""
        self.random = np.random.default_rng(7)  # in step on all ranks
        hurry = np.random.default_rng(self.world.rank)
        for number in range(STEPS):
            for _ in range(hurry.integers(0, 3)):
                os.sched_yield()
            self.step(number)
        for member in filter(None, self.members):
            self.settle(member)

    def step(self, number: int) -> None:
        """One collective in one group: started, and complete, now or at the next one of the group."""
        random = self.random
        which = int(random.integers(len(self.members)))
        operation, op = OPERATIONS[random.integers(len(OPERATIONS))], list(COMBINE)[random.integers(len(COMBINE))]
        dtype = DTYPES[random.integers(len(DTYPES))]
        count = self.large if random.random() < 0.02 else SIZES[random.integers(len(SIZES))]
        shift, root = int(random.integers(POOL - self.large)), int(random.integers(1 << 10))
        places, asynchronous = random.integers(0, 3, self.world.size), bool(random.random() < 0.2)
        member = self.members[which]
        if member is None:
            return
        self.settle(member)
        group = member.group
        parts = [self.pools[rank][shift : shift + count] for rank in group.ranks]
        own = self.place(
            member, torch.from_numpy(parts[group.rank]).to(dtype, copy=True), int(places[self.world.rank])
        )
        root %= group.size
        case = f"step {number}: {operation}, {dtype}, {count} elements, {op.name}, root {root}"
        self.communicate(member, case, operation, op, own, parts, root, asynchronous)

    def place(self, member: Member, source: Tensor, place: int) -> Tensor:
        """In ordinary memory, in the group's shared memory at the same place on all ranks, or somewhere in it."""
        if place == 0:
            return source
        start = 0 if place == 1 else 1 + member.group.rank
        words = member.symmetric[start:].view(source.dtype)[: source.numel()]
        return words.copy_(source)

    def communicate(self, member, case, operation, op, own, parts, root, asynchronous) -> None:
        group, dtype = member.group, own.dtype
        reduced = np.asarray(0)
        if "reduce" in operation:  # as wide as the dtype, since products of whole numbers stay exact in all of them
            reduced = np.stack([part.astype(np.int64) for part in parts])
            reduced = COMBINE[op].reduce(reduced, axis=0)
        if operation == "all_reduce":
            returned, expected = group.all_reduce(own, op, async_op=asynchronous), reduced
        elif operation == "reduce":
            returned = group.reduce(own, root, op, async_op=asynchronous)
            expected = reduced if group.rank == root else parts[group.rank]
        elif operation == "broadcast":
            returned, expected = group.broadcast(own, root, async_op=asynchronous), parts[root]
        elif operation == "all_gather":
            returned, expected = group.all_gather(own, async_op=asynchronous), np.concatenate(parts)
        elif operation == "reduce_scatter":
            returned = group.reduce_scatter(own, op, async_op=asynchronous)
            expected = np.array_split(reduced, group.size)[group.rank]
        else:
            returned, expected = group.barrier(async_op=asynchronous), parts[group.rank]
        if asynchronous:
            member.under_way.append((case, returned, own, expected, dtype))
        else:
            compare(case, own if returned is None else returned, expected, dtype)

    def settle(self, member: Member) -> None:
        while member.under_way:
            case, work, own, expected, dtype = member.under_way.pop()
            value = work.result()
            compare(case, own if value is None else value, expected, dtype)


def compare(case: str, got: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    wanted = torch.from_numpy(np.ascontiguousarray(expected)).to(dtype)
    assert got.dtype is dtype, case
    assert torch.equal(got, wanted), case


def resident() -> tuple[int, int]:
    """Bytes of memory that this process has for itself, and that it shares."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":") for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return int(sizes["RssAnon"].split()[0]) << 10, int(sizes["RssShmem"].split()[0]) << 10


@REAL
@pytest.mark.ranks(2, 4)
def test_hundreds_of_collectives(world, near_caches) -> None:
    program = Program(world)
    seen = []
    for _ in range(RUNS):
        program.run()
        seen.append(resident())
    # Views are kept up to a limit, and an allocator may keep more than before: neither goes on. What is lost is
    # lost in every run.
    grown = [[later - earlier for earlier, later in zip(*pair, strict=True)] for pair in pairwise(seen[1:])]
    assert min(private for private, _ in grown) < GROWTH_PER_STEP * STEPS, grown
    assert min(shared for _, shared in grown) <= 0, grown
