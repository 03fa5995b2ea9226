"""Symmetric memory of real ranks: whose it is, how long it lives, and what is remembered about tensors on it."""

import ctypes
import gc
import itertools
import math
import os
import random
import time
from contextlib import suppress

import pytest
import torch
from helpers.placements import REAL, is_shared, limits, new_groups_of, shared_mappings
from torch import Tensor, nn

from axonmpi import FSDP, ProcessGroup, ReduceOp, World
from axonmpi.backends.connection import segment as shared_memory
from axonmpi.backends.connection.arena import FreeList
from axonmpi.backends.connection.connection import ChunkSizes
from axonmpi.backends.connection.segment import Segment

MIB = 1 << 20
PAGE = 4096


def group_of(world: World) -> ProcessGroup:
    group = world.new_group(range(world.size))
    assert group.backend.path == "node"
    return group


def allocated(group: ProcessGroup, nbytes: int, value: int) -> Tensor:
    tensor = group.symmetric_empty((nbytes,), torch.uint8).fill_(value)
    assert is_shared(tensor)
    return tensor


def mapped() -> int:
    """Bytes of address space that hold memory shared by the ranks of this job."""
    return sum(map(len, shared_mappings()))


def held() -> int:
    """Bytes of memory in all files that ranks share and this one keeps open."""
    blocks = {}  # by file: some have two descriptors
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it
            if "memfd:axonmpi" in os.readlink(f"/proc/self/fd/{name}"):
                file = os.stat(f"/proc/self/fd/{name}")
                blocks[file.st_ino] = file.st_blocks
    return 512 * sum(blocks.values())


def is_backed(tensor: Tensor) -> bool:
    """Whether all pages of a tensor's memory are there, so that writing to it asks for none."""
    pages = ctypes.create_string_buffer(-(-tensor.nbytes // PAGE))
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert libc.mincore(address, length, pages) == 0, os.strerror(ctypes.get_errno())
    return all(state & 1 for state in pages.raw)


# ---- whose memory it is ---------------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2)
def test_tensors_lie_apart_whatever_their_sizes(world) -> None:
    """A large one begins on a huge page; what does not fit gets further memory."""
    group = group_of(world)
    sizes = (1, PAGE, PAGE + 1, 3 * MIB, 100, 70 * MIB, 2 * PAGE)
    kept = [allocated(group, size, 10 * world.rank + number) for number, size in enumerate(sizes)]
    group.barrier()
    assert (kept[3].data_ptr() - kept[0].data_ptr()) % (2 * MIB) == 0
    for number, tensor in enumerate(kept):
        assert bool((tensor == 10 * world.rank + number).all())
        assert (tensor.dtype, tensor.data_ptr() % PAGE) == (torch.uint8, 0)
        group.all_reduce(tensor, ReduceOp.MAX)
        assert bool((tensor == 10 * (world.size - 1) + number).all())
    assert not is_shared(group.symmetric_empty((0, 4), torch.float32))


@REAL
@pytest.mark.ranks(2, 4)
def test_memory_is_used_again_when_every_rank_has_dropped_it(world) -> None:
    group = group_of(world)
    for holder in range(world.size):
        tensor = allocated(group, 5000, world.rank)
        place = tensor.data_ptr()
        view = tensor[104:204].view(torch.int32).view(5, 5).t()
        kept = view.untyped_storage() if world.rank == holder else None
        del tensor, view
        for _ in range(3):  # ranks compare notes when they allocate
            assert allocated(group, 5000, 255).data_ptr() != place
        if kept is not None:
            assert set(kept[:5000]) == {holder}
            del kept
        gc.collect()
        group.barrier()
        assert place in {allocated(group, 5000, 255).data_ptr() for _ in range(3)}
    places, before = set(), mapped()
    for number in range(60):
        tensor = allocated(group, (1 + number % 3) * 30_000, 1)
        group.all_reduce(tensor)  # no plan keeps it
        assert bool(tensor.eq(world.size).all())
        places.add(tensor.data_ptr())
        del tensor
    assert (len(places) < 10, mapped()) == (True, before)


@REAL
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:no memory could be shared:RuntimeWarning")
@pytest.mark.parametrize("common", [False, True], ids=["each", "common"])
def test_what_only_some_ranks_got_is_given_back(world, monkeypatch, common) -> None:
    """One rank finds no memory: the others do not keep theirs, and there is memory later."""
    group = group_of(world)
    kept = allocated(group, 3 * PAGE, 7)
    populate = Segment.populate

    def fail_on_the_last(segment, start, stop) -> str | None:
        return populate(segment, start, stop) or ("none left" if world.rank == world.size - 1 else None)

    group.barrier()
    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "populate", fail_on_the_last)
        if common:
            with pytest.raises(MemoryError, match="none left"):
                group.node_empty((8 * MIB,), torch.uint8)
        else:
            assert not is_shared(group.symmetric_empty((8 * MIB,), torch.uint8))
    group.barrier()
    assert held() - before <= 4 * MIB * world.size  # huge pages, perhaps, on either side of the block
    assert bool(kept.eq(7).all())
    allocated(group, 8 * MIB, 1)


@REAL
@pytest.mark.ranks(2)
def test_kernels_that_do_not_populate(world, monkeypatch) -> None:
    """Such a kernel refuses the advice as invalid, as this one does with a number that means nothing."""
    monkeypatch.setattr(shared_memory, "_POPULATE_WRITE", 10_000)
    group = group_of(world)
    tensor = allocated(group, 3 * MIB, 1)
    group.all_reduce(tensor)
    assert bool((tensor == world.size).all())


# ---- how long it lives ----------------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2, 4)
def test_memory_of_a_node_goes_back_with_its_last_tensor(world) -> None:
    """Without a further allocation, in which ranks compare notes; and no file stays open."""
    group = group_of(world)
    before, files = mapped(), held()
    tensor = group.node_empty((4 * MIB,), torch.uint8)
    part = tensor.view(torch.float32)[5:9]
    assert (mapped() - before >= 4 * MIB, held()) == (True, files)
    del tensor
    assert mapped() - before >= 4 * MIB
    del part
    assert mapped() == before


@REAL
@pytest.mark.ranks(2)
def test_tensors_outlive_their_group_and_nothing_else_does(world) -> None:
    """Without waiting for garbage to be collected."""
    gc.collect()
    gc.disable()
    try:
        before, kept = mapped(), []
        for _ in range(3):
            known = world.groups
            group = group_of(world)
            kept.append(allocated(group, 1 << 16, world.rank))
            for numel in (1, 1 << 16, MIB):  # each way that data takes
                group.all_reduce(torch.ones(numel))
            group.all_reduce(kept[-1])
            world.close_groups(known)
            del group
        assert mapped() > before  # tensors on it have kept theirs
        other = group_of(world)
        for tensor in kept:  # ordinary memory, for every other group
            assert bool((tensor == sum(range(world.size))).all())
            other.all_reduce(tensor.fill_(world.rank + 1))
            assert bool((tensor == sum(range(1, world.size + 1))).all())
        other.close()
        kept.clear()
        del tensor, other
        after = mapped()
    finally:
        gc.enable()
    assert after - before <= 3 * PAGE * world.size  # where the ranks met


@REAL
@pytest.mark.ranks(2, 4)
def test_models_made_and_dropped_take_the_memory_of_one(world) -> None:
    """Without waiting for garbage to be collected, in which they would take up ever more of it."""
    group, taken = group_of(world), []
    gc.collect()
    gc.disable()
    try:
        before = held()
        for number in range(30):
            model = FSDP(
                nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), group, mixed_precision=number % 3 == 0
            )
            if number % 2 == 0:
                model(torch.ones(2, 1024)).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            del model
            group.barrier()
            taken.append(held() - before)
            group.barrier()  # before anybody makes the next one
    finally:
        gc.enable()
    assert max(taken[10:]) <= max(taken[:10]) <= (64 + 16) * MIB, [each // MIB for each in taken]


@REAL
@pytest.mark.ranks(2, 4)
def test_memory_that_goes_back_to_the_system_is_nobody_s(world, monkeypatch, seed) -> None:
    """Tensors of any sizes and ages, among ranges that go back and are asked for anew; one rank is slow at it."""
    kept, give_back = 8 * PAGE * world.size, Segment.give_back

    def slow_on_the_first(segment, start, stop) -> None:
        if world.rank == 0:
            time.sleep(0.001)
        give_back(segment, start, stop)

    monkeypatch.setattr("axonmpi.backends.connection.arena.KEPT_FREE_BYTES", kept)
    monkeypatch.setattr(Segment, "give_back", slow_on_the_first)
    group, drawn, live = group_of(world), random.Random(seed), {}
    gc.collect()

    def make(number: int) -> dict[int, Tensor]:
        """Return a new tensor, or one that the ranks have in common: each writer's part of it, written."""
        nbytes = drawn.choice([1, 10, 100, 1000]) * drawn.randint(1, PAGE)
        if common := drawn.random() < 0.5:
            tensor = group.node_empty((nbytes,), torch.uint8)
        else:
            tensor = group.symmetric_empty((nbytes,), torch.uint8)
        assert is_backed(tensor)
        parts = dict(enumerate(tensor.tensor_split(world.size))) if common else {world.rank: tensor}
        parts[world.rank].fill_((number + world.rank) % 251)
        return parts

    def drop(number: int) -> None:
        for writer, part in live.pop(number).items():
            assert bool((part == (number + writer) % 251).all()), (number, writer)

    small = allocated(group, 1, 1)
    group.barrier()
    before = held()
    for number in range(150):
        live[number] = make(number)
        group.barrier()
        for old in drawn.sample(sorted(live), drawn.randint(0, min(2, len(live)))):
            drop(old)
    for number in sorted(live):
        drop(number)
    other = allocated(group, 1, 1)  # ranks compare notes when they allocate
    group.barrier()
    assert held() - before <= kept + PAGE * world.size  # and `other`
    assert is_backed(small)
    assert is_backed(other)


def test_free_ranges_never_overlap_and_join(seed) -> None:
    """In any order of taking and giving back, as found anew from what is in use."""
    drawn, size = random.Random(seed), 1 << 16
    for _ in range(40):
        free, taken = FreeList(size), {}
        for _ in range(40):
            count, alignment = drawn.randint(1, size // 4), drawn.choice([1, 2, 64, 4096, 8192])
            start = free.take(count, alignment)
            edges = [(0, 0), *sorted((low, low + each) for low, each in taken.items()), (size, size)]
            gaps = [(before[1], after[0]) for before, after in itertools.pairwise(edges)]
            aligned = [-(-low // alignment) * alignment for low, high in gaps]
            fitting = [begin for begin, (_, high) in zip(aligned, gaps, strict=True) if begin + count <= high]
            assert start == min(fitting, default=None)
            if start is not None:
                taken[start] = count
            if drawn.random() < 0.5 and taken:
                oldest = drawn.choice(sorted(taken))
                free.give_back(oldest, taken.pop(oldest))
        for start, count in taken.items():
            free.give_back(start, count)
        assert free.ranges == [(0, size)]
        assert (free.take(size, 1), free.take(1, 1), free.ranges) == (0, None, [])


# ---- what is remembered about tensors -------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2)
def test_the_same_memory_seen_in_other_ways(world) -> None:
    """As other shapes, dtypes and strides, on all ranks or on one of them; and other tensors in its place."""
    group = group_of(world)
    size, side = world.size, math.isqrt(limits(world.size).direct // 4) + 8
    flat = (whole := group.symmetric_empty((side, 2 * side), torch.float32)).view(-1)
    ways = (
        lambda: whole,
        lambda: flat,
        lambda: whole[:, :side],
        lambda: flat[: side * side].view(side, side).t(),
        lambda: flat[::2],
        lambda: whole[: side - 3],
        lambda: whole[3:],
        lambda: whole.view(torch.int32),
        lambda: flat[1 : 2 * side * side - 9],
    )
    for odd, make in itertools.product((range(size), [size - 1], [0]), ways):
        seen = make()
        own = torch.arange(seen.numel()).view_as(seen).remainder(97).to(seen.dtype)
        tensor = seen if world.rank in odd else flat[: seen.numel()].view(seen.dtype).view(seen.shape)
        for _ in range(2):
            group.all_reduce(tensor.copy_(own).add_(world.rank))
            assert torch.equal(tensor, own * size + sum(range(size)))
            group.barrier()  # before anybody fills it anew


@REAL
@pytest.mark.ranks(4)
def test_symmetric_tensors_of_overlapping_groups(world) -> None:
    groups = [world.new_group(ranks) for ranks in ([0, 1, 2], [3, 2, 1], [0, 3], range(4))]
    own = [group for group in groups if group.contains(world.rank)]
    tensors = [group.symmetric_empty((limits(2).direct // 4 + 1,), torch.float32) for group in own]
    for order in [tensors, tensors[::-1]] * 3:  # of another group: ordinary memory
        for group, tensor in zip(own, order, strict=True):
            group.all_reduce(tensor.fill_(world.rank))
            assert bool((tensor == sum(group.ranks)).all()), group
            group.barrier()


@REAL
@pytest.mark.ranks(2, 4)
def test_ordinary_tensors_again_and_again(world) -> None:
    """In chunks of several sizes, and more kinds and places than are remembered."""
    total, line = sum(range(world.size)), torch.arange(limits(world.size).medium // 2 + 5, dtype=torch.int32)
    for chunk in (1 << 20, 1 << 14, 3 << 15):
        with new_groups_of(world, ChunkSizes(chunk=chunk)):
            group = group_of(world)
        tensor = line + world.rank
        for root in range(world.size):
            group.all_reduce(tensor.copy_(line).add_(world.rank))
            assert torch.equal(tensor, line * world.size + total)
            group.reduce(tensor.copy_(line).mul_(world.rank), root)
            assert torch.equal(tensor, line * (total if world.rank == root else world.rank))
    for number in range(270):
        for reduce in (group.all_reduce, lambda tensor: group.reduce(tensor, 0)):
            reduce(tensor := torch.full((1000 + number,), world.rank))
            assert world.rank or bool((tensor == total).all())


@pytest.mark.ranks(2, 4)
def test_a_tensor_is_looked_at_anew(world) -> None:
    """Whichever plan serves: no memory is read that is not the tensor's, and autograd sees that it has changed."""
    group = world.new_group(range(world.size))
    for nbytes in (4, 4000, 1 << 19, 1 << 22):
        tensor = torch.ones(nbytes // 4)
        for _ in range(3):
            loss = (torch.ones_like(tensor, requires_grad=True) * tensor.fill_(1)).sum()
            group.all_reduce(tensor)
            assert tensor.eq(world.size).all()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        if nbytes > 4:
            tensor.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match="storage"):
                group.all_reduce(tensor)
            group.all_reduce(again := torch.ones(nbytes // 4))
            assert again.eq(world.size).all()
