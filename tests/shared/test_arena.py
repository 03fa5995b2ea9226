"""Shared memory of real ranks: who sees it, when it is free again, and what is in it at which address."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from placements import agree_on_bits

from axonmpi import ProcessGroup
from axonmpi.backends import shared_memory
from axonmpi.backends.shared_memory import PAGE, Arena, Block, Segment

pytestmark = pytest.mark.ranks(2, 4)


@pytest.fixture
def arena(world):
    """Return a function that makes an arena of all ranks; skips the test on mock ranks; collective."""

    def make(of) -> Arena:
        if of.default_group.backend.name == "mock":
            pytest.skip("about memory that processes share: needs an mpirun")
        return Arena(of.default_group.backend.mpi_comm)

    return make


def allocated(arena: Arena, nbytes: int) -> tuple[Block, torch.Tensor]:
    block = arena.allocate(nbytes)
    assert isinstance(block, Block), block
    return block, arena.tensor(block, nbytes)


def settle(arena: Arena) -> None:
    """Free what was dropped: ranks compare notes when they allocate; collective."""
    gc.collect()
    for _ in range(2):
        block = arena.allocate(1)
        assert isinstance(block, Block)
        arena.release([block.number])


# ---- segments -------------------------------------------------------------------------------------------------


def test_every_rank_sees_the_regions_of_all(world, pages) -> None:
    segment = pages(world.default_group)
    assert len(segment.regions) == world.size
    assert segment.own == world.rank
    segment.regions[segment.own][:] = world.rank + 1
    world.default_group.barrier()
    for rank, region in enumerate(segment.regions):
        assert region.shape == (PAGE,)
        assert np.all(region == rank + 1)
    world.default_group.barrier()
    segment.regions[(segment.own + 1) % world.size][PAGE // 2 :] = 100 + world.rank  # writes into the next one's
    world.default_group.barrier()
    assert np.all(segment.regions[segment.own][: PAGE // 2] == world.rank + 1)
    assert np.all(segment.regions[segment.own][PAGE // 2 :] == 100 + (world.rank - 1) % world.size)


def test_sizes_are_whole_pages(world, real_group) -> None:
    comm = real_group(world).backend.mpi_comm
    for nbytes in (1, PAGE, PAGE + 1):
        segment = Segment.create(comm, nbytes)
        assert isinstance(segment, Segment)
        assert segment.region_bytes == -(-nbytes // PAGE) * PAGE
        for start, stop in ((0, 0), (0, nbytes), (nbytes - 1, nbytes), (0, segment.region_bytes)):
            assert segment.populate(start, stop) is None


def test_where_in_the_own_region(world, pages) -> None:
    segment = pages(world.default_group)
    begin = segment.regions[segment.own].ctypes.data
    assert segment.offset_of(begin, PAGE) == 0
    assert segment.offset_of(begin + 8, PAGE - 8) == 8
    assert segment.offset_of(begin + PAGE - 1, 1) == PAGE - 1
    assert segment.offset_of(begin, PAGE + 1) is None
    assert segment.offset_of(begin + 1, PAGE) is None
    assert segment.offset_of(begin - 1, 2) is None
    assert segment.offset_of(segment.regions[(segment.own + 1) % world.size].ctypes.data, 1) is None


# ---- blocks ---------------------------------------------------------------------------------------------------


def test_blocks_are_the_same_on_all_ranks_and_apart(world, arena) -> None:
    arena = arena(world)
    sizes = (1, PAGE, PAGE + 1, 3 << 20, 100)
    kept = [allocated(arena, size) for size in sizes]
    places = [(block.number, block.segment, block.start, block.size) for block, _ in kept]
    assert world.default_group.all_gather_object(places) == [places] * world.size
    for number, (_, tensor) in enumerate(kept):
        assert tensor.dtype is torch.uint8
        tensor.fill_(10 * world.rank + number)
    world.default_group.barrier()
    for number, (block, tensor) in enumerate(kept):
        assert bool((tensor == 10 * world.rank + number).all())
        parts = arena.parts(arena.address(tensor), sizes[number])
        rows = arena.rows(arena.address(tensor), sizes[number])
        assert rows.shape == (world.size, sizes[number])
        for rank in range(world.size):
            assert np.all(parts[rank] == 10 * rank + number)
            assert bool((rows[rank] == 10 * rank + number).all())
        assert block.start % PAGE == 0
        assert block.size >= PAGE
    assert arena.bytes_in_use == sum(block.size for block, _ in kept)
    world.default_group.barrier()


def test_large_blocks_begin_on_huge_pages(world, arena) -> None:
    arena = arena(world)
    small, _ = allocated(arena, 10)
    large, _ = allocated(arena, 2 << 20)
    assert small.start == 0
    assert large.start == 2 << 20


def test_what_does_not_fit_gets_a_larger_segment(world, arena) -> None:
    arena = arena(world)
    first, _ = allocated(arena, PAGE)
    size = arena.segments[0].region_bytes
    block = arena.allocate(size)  # as large as the segment, which is not empty
    assert isinstance(block, Block)
    assert (first.segment, block.segment) == (0, 1)
    assert arena.segments[1].region_bytes >= size
    arena.release([block.number])
    assert arena.bytes_in_use == PAGE


def test_a_block_is_free_when_every_rank_has_dropped_it(world, arena) -> None:
    arena = arena(world)
    for holder in range(world.size):
        block, tensor = allocated(arena, 5000)
        assert block.start == 0
        tensor.fill_(world.rank)
        if world.rank != holder:
            del tensor
        settle(arena)
        assert arena.bytes_in_use == block.size
        other, overwritten = allocated(arena, 5000)
        assert other.start >= block.size
        overwritten.fill_(255)
        world.default_group.barrier()
        if world.rank == holder:
            assert bool((tensor == holder).all())
            del tensor
        del overwritten
        settle(arena)
        assert arena.bytes_in_use == 0


@pytest.mark.parametrize("common", [False, True])
def test_what_only_some_ranks_got_is_given_back(world, arena, monkeypatch, common) -> None:
    """One rank finds no memory: the others do not keep theirs."""
    own = arena(world)
    kept, tensor = allocated(own, 3 * PAGE)
    tensor.fill_(7)
    populate = Segment.populate

    def fail_on_the_last(segment, start, stop, region=None) -> str | None:
        return populate(segment, start, stop, region) or ("none left" if world.rank == world.size - 1 else None)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "populate", fail_on_the_last)
        assert own.allocate(8 << 20, common=common) == "none left"
    world.default_group.barrier()
    held = os.fstat(own.segments[kept.segment]._descriptor).st_blocks * 512
    assert 3 * PAGE <= held <= (4 << 20) * world.size  # pages of 2 MiB, perhaps, on either side of the block
    assert tensor.eq(7).all()
    world.default_group.barrier()


def test_a_view_keeps_the_block(world, arena) -> None:
    arena = arena(world)
    block, tensor = allocated(arena, 4 * PAGE)
    view = tensor[100:200].view(torch.int32).view(5, 5).t()
    view.fill_(world.rank)
    del tensor
    settle(arena)
    assert arena.bytes_in_use == block.size
    storage = view.untyped_storage()
    del view
    settle(arena)
    assert arena.bytes_in_use == block.size
    del storage
    settle(arena)
    assert arena.bytes_in_use == 0


def test_any_number_of_tensors_one_after_the_other_takes_no_more_memory(world, arena) -> None:
    arena = arena(world)
    starts = set()
    for number in range(300):
        block, tensor = allocated(arena, (1 + number % 3) * 100_000)
        tensor[-1] = 1
        starts.add(block.start)
        del tensor
    settle(arena)
    assert arena.bytes_in_use == 0
    assert len(arena.segments) == 1
    # Ranks let go at different times, so a few blocks are in use at once, never more and more.
    assert max(starts) <= 4 * 304 * 1024


def test_groups_give_back_what_they_allocated(world, real_group) -> None:
    group = real_group(world)
    arena = group.backend._paths._arena
    sizes = [(7,), (1000, 3), (1 << 19,), (1,)]
    settle(arena)
    before = arena.bytes_in_use
    for _ in range(20):
        for shape in sizes:
            group.all_reduce(group.symmetric_empty(shape, torch.float64).fill_(1.0))
    settle(arena)
    # The scratch memory and nothing else: a plan keeps no tensor.
    in_use = arena.bytes_in_use
    for _ in range(20):
        for shape in sizes:
            group.all_reduce(group.symmetric_empty(shape, torch.float64).fill_(1.0))
    settle(arena)
    assert arena.bytes_in_use == in_use == before


def test_tensors_outlive_their_group(world) -> None:
    group = world.new_group(range(world.size))
    tensors = [group.symmetric_empty((count,), torch.float32).fill_(world.rank) for count in (10, 1 << 18)]
    group.all_reduce(tensors[1])
    group.close()
    del group
    gc.collect()
    other = world.new_group(range(world.size))
    for _ in range(3):
        other.all_reduce(other.symmetric_empty((1 << 18,), torch.float32).fill_(7.0))
    assert bool((tensors[0] == world.rank).all())
    assert bool((tensors[1] == sum(range(world.size))).all())
    for tensor in tensors:  # ordinary memory, for every other group
        tensor.fill_(world.rank + 1)
        other.all_reduce(tensor)
        assert bool((tensor == sum(range(1, world.size + 1))).all())
        assert agree_on_bits(other, tensor)


# ---- addresses ------------------------------------------------------------------------------------------------


def test_addresses_are_places(world, arena) -> None:
    arena = arena(world)
    assert arena.address(torch.ones(3)) == 0  # there is no segment yet
    block, memory = allocated(arena, 8 * PAGE)
    tensor = memory.view(torch.float32).view(-1, 8)
    address = arena.address(tensor)
    assert address > 0
    assert len(set(world.default_group.all_gather_object(address))) == 1
    assert arena.address(memory) == arena.address(tensor.view(-1)) == arena.address(tensor.view(8, -1)) == address
    assert arena.address(tensor.view(torch.int64)) == address
    assert arena.address(tensor[3:9]) == address + 3 * 32
    assert arena.address(tensor[5]) == address + 5 * 32
    assert arena.address(tensor[5, 3]) == address + 5 * 32 + 12
    assert arena.address(tensor[2:3, :5]) == address + 2 * 32  # one row is contiguous
    assert arena.address(tensor.detach()) == address
    for kind in (tensor[:, :5], tensor.t(), tensor[::2], tensor.view(-1)[::2]):
        assert not kind.is_contiguous()
        assert arena.address(kind) == 0
    second, memory = allocated(arena, PAGE)
    assert arena.address(memory) == address + second.start - block.start


def test_foreign_tensors_have_no_address(world, arena) -> None:
    arena = arena(world)
    _, memory = allocated(arena, PAGE)
    other = Arena(world.default_group.backend.mpi_comm)
    _, elsewhere = allocated(other, PAGE)
    assert arena.address(elsewhere) == other.address(memory) == 0
    for tensor in (torch.ones(5), torch.empty(0), memory[:0], memory.clone(), torch.ones(3, requires_grad=True)):
        assert arena.address(tensor) == 0
    assert arena.address(memory) > 0
    assert other.address(elsewhere) > 0


def test_addresses_in_further_segments(world, arena) -> None:
    arena = arena(world)
    _, first = allocated(arena, PAGE)
    second, memory = allocated(arena, arena.segments[0].region_bytes)
    third, last = allocated(arena, PAGE * 2)
    assert (second.segment, third.segment) == (1, 0)
    places = [arena.address(tensor) for tensor in (first, memory, last)]
    assert len(set(places)) == 3
    assert world.default_group.all_gather_object(places) == [places] * world.size
    for number, (tensor, address) in enumerate(zip((first, memory, last), places, strict=True)):
        tensor[:16] = 16 * world.rank + number
        world.default_group.barrier()
        parts = arena.parts(address, 16)
        assert [int(part[3]) for part in parts] == [16 * rank + number for rank in range(world.size)]
    world.default_group.barrier()


def test_symmetric_tensors_lie_in_the_arena_of_their_group(world, real_group) -> None:
    group: ProcessGroup = real_group(world)
    address = group.backend._paths.address
    for shape in ((1,), (3, 5), (), (1 << 17,)):
        tensor = group.symmetric_empty(shape, torch.float64)
        assert tensor.shape == shape
        assert tensor.dtype is torch.float64
        assert tensor.is_contiguous()
        assert address(tensor) > 0
        assert len(set(group.all_gather_object(address(tensor)))) == 1
    assert address(group.symmetric_empty((0, 4), torch.float32)) == 0
    assert address(torch.ones(3)) == 0


def test_pages_can_be_had_on_kernels_that_do_not_populate(world, arena, monkeypatch) -> None:
    """Such a kernel refuses the advice as invalid, as this one does with a number that means nothing."""
    monkeypatch.setattr(shared_memory, "_POPULATE_WRITE", 10_000)
    arena(world)  # skips on mock ranks
    segment = Segment.create(world.default_group.backend.mpi_comm, 4 * PAGE)
    assert isinstance(segment, Segment)
    assert segment.populate(PAGE, 3 * PAGE) is None
    segment.regions[segment.own][PAGE : 3 * PAGE] = 1 + world.rank
    world.default_group.barrier()
    assert [int(region[2 * PAGE]) for region in segment.regions] == [1 + rank for rank in range(world.size)]


def mapped() -> int:
    """Bytes of address space that hold memory shared by the ranks of this job."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:axonmpi" in line:
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            total += high - low
    return total


def test_memory_of_closed_groups_does_not_wait_for_garbage_to_be_collected(world, arena) -> None:
    arena(world)  # or skips
    gc.collect()
    gc.disable()
    try:
        before, kept = mapped(), []
        for _ in range(3):
            known = world.groups
            group = world.new_group(range(world.size))
            kept.append(group.symmetric_empty((1 << 16,), torch.float32).fill_(world.rank))
            for numel in (1, 1 << 16, 1 << 20):  # each way that data takes
                group.all_reduce(torch.ones(numel))
            group.all_reduce(kept[-1])
            world.close_groups(known)
            del group
            during = mapped()
        assert during > before  # tensors on it have kept theirs
        assert all((tensor == sum(range(world.size))).all() for tensor in kept)
        kept.clear()
        after = mapped()
    finally:
        gc.enable()
    assert after - before <= 3 * PAGE * world.size  # where the ranks met
