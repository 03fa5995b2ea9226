"""Every operation on symmetric tensors, wherever in shared memory they lie on each rank, against numpy."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_reference import reductions
from placements import PLACEMENTS, SYMMETRIC, Places, places_in
from symmetric_checks import SymmetricChecks

from axonmpi import ReduceOp
from axonmpi.backends import node_paths
from axonmpi.backends.node_chunks import MANY_CHUNKS_BYTES
from axonmpi.backends.node_plans import direct_bytes, medium_bytes
from axonmpi.backends.node_scratch import CHUNK_BYTES, PIECE_BYTES
from axonmpi.backends.reduction import DTYPES

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
EVERYWHERE = pytest.mark.parametrize("kind", PLACEMENTS)
EXAMPLES = settings(max_examples=10, deadline=None, derandomize=True, database=None)
SMALL_PIECE_BYTES = 4096


def around(nbytes: int, itemsize: int) -> tuple[int, int, int]:
    """Numbers of elements: one fewer than fit into so many bytes, as many, one more."""
    fits = nbytes // itemsize
    return fits - 1, fits, fits + 1


# ---- every dtype, every reduction -----------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_every_dtype_and_reduction(world, kind) -> None:
    """Just beyond what every rank reduces by itself: the shortest all-reduce of each kind in shared memory."""
    most = direct_bytes(world.size)
    with places_in(
        world, kind, max(most, 40_000) + 16, piece_bytes=SMALL_PIECE_BYTES if kind == "view" else None
    ) as places:
        checks = SymmetricChecks(places.group, places)
        for number, dtype in enumerate(DTYPES):
            large = most // dtype.itemsize + 1
            for op in reductions(dtype):
                checks.all_reduce(dtype, (large,), op)
                for shape in ((), (1,), (28,), (29, 5)):
                    checks.all_reduce(dtype, shape, op)
                    checks.reduce(dtype, shape, op, number % world.size)
                checks.reduce(dtype, (300, 7), op, (number + 1) % world.size)
                checks.reduce_scatter(dtype, (97, 11), op, number % 2)
            checks.broadcast(dtype, (300, 7), number % world.size)
            checks.all_gather(dtype, (300, 7), 0)
        checks.finish()


@BOTH_WAYS
@EVERYWHERE
def test_every_operation_wherever_the_tensors_lie(world, kind, asynchronous) -> None:
    most = direct_bytes(world.size)
    with places_in(world, kind, max(most, 40_000) + 16, piece_bytes=SMALL_PIECE_BYTES) as places:
        checks = SymmetricChecks(places.group, places, asynchronous=asynchronous)
        turns = itertools.cycle(range(5))
        for dtype in (
            torch.int16,
            torch.bfloat16,
            torch.float32,
            torch.complex128,
            torch.bool,
            torch.float8_e4m3fn,
        ):
            large = most // dtype.itemsize + 1
            for shape in ((0,), (1,), (28,), (29,), (3, 0, 2), (5, 300), (8, 40, 3), (large,)):
                choices = reductions(dtype)
                checks.every_symmetric_operation(dtype, shape, choices[next(turns) % len(choices)])
        checks.finish()


@EVERYWHERE
def test_each_root_and_each_dimension(world, kind) -> None:
    with places_in(world, kind, 64_000, piece_bytes=SMALL_PIECE_BYTES) as places:
        checks = SymmetricChecks(places.group, places)
        for shape in ((2, 3), (40, 7), (5, 12, 31), (1, 1, 1000), (1000, 1, 1), (3, 2000)):
            for root in range(world.size):
                checks.reduce(torch.float32, shape, ReduceOp.MAX, root)
                checks.broadcast(torch.float32, shape, root)
            for dim in range(len(shape)):
                checks.reduce_scatter(torch.float32, shape, ReduceOp.AVERAGE, dim)
                checks.all_gather(torch.float32, shape, dim)
        checks.finish()


@pytest.mark.parametrize("kind", PLACEMENTS[1:])
def test_blocks_of_unequal_sizes(world, kind) -> None:
    with places_in(world, kind, 64_000, piece_bytes=SMALL_PIECE_BYTES) as places:
        checks = SymmetricChecks(places.group, places)
        # What fits into the first message (28 elements), what does not, nothing; in every combination.
        for sizes in itertools.product((0, 3, 28, 29, 1500), repeat=min(world.size, 3)):
            checks.all_gather(torch.float32, (1,), 0, sizes=sizes)
        for sizes in ((0, 100), (1, 400), (7, 8, 9, 10)):
            checks.all_gather(torch.float32, (1, 13), 0, sizes=sizes)
            checks.all_gather(torch.float32, (13, 1), 1, sizes=sizes)
        checks.finish()


# ---- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["view", "mixed"])
def test_sizes_around_every_limit(world, kind) -> None:
    """A page for a piece and for a chunk, so that few elements are several of them."""
    size = world.size
    slices = [count * SMALL_PIECE_BYTES * size for count in (1, 2, 3)]
    chunks = [SMALL_PIECE_BYTES // (64 * size) * (64 * size) * count for count in (1, 2, 5)]
    lines = [64, 64 * size, 64 * size * 3]
    limits = sorted({112, direct_bytes(size), 2 * direct_bytes(size), *slices, *chunks, *lines})
    with places_in(world, kind, max(limits) + 64, piece_bytes=SMALL_PIECE_BYTES) as places:
        checks = SymmetricChecks(places.group, places)
        for dtype in (torch.uint8, torch.bfloat16, torch.float64):
            for limit in limits:
                for count in around(limit, dtype.itemsize):
                    checks.every_symmetric_operation(dtype, (count,))
        checks.finish()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["view", "mixed"])
def test_pieces_and_chunks_as_large_as_they_are(world, kind) -> None:
    medium = medium_bytes(world.size)
    limits = sorted({PIECE_BYTES * world.size, medium, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * MANY_CHUNKS_BYTES})
    with places_in(world, kind, max(limits) + 64) as places:
        checks = SymmetricChecks(places.group, places)
        for limit in limits:
            for count in around(limit, 4):
                checks.all_reduce(torch.int32, (count,))
        checks.every_symmetric_operation(torch.int32, (2 * CHUNK_BYTES // 4 + 1,), ReduceOp.MIN)
        checks.every_symmetric_operation(torch.bfloat16, (3, CHUNK_BYTES // 4 + 1), ReduceOp.SUM)
        checks.finish()


@EXAMPLES
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.integers(0, 5000) | st.integers(130_000, 140_000),
            st.sampled_from(PLACEMENTS[1:5]),
            st.integers(0, 4),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    piece_bytes=st.integers(1, 20_000),
)
@pytest.mark.ranks(2, 4)
def test_any_cases_one_after_the_other(world, cases, piece_bytes) -> None:
    """Places, sizes and ways of waiting change from one operation to the next within one group."""
    group = world.new_group(range(world.size))
    if group.backend.name == "mpi":
        group.backend.piece_bytes = piece_bytes
    checks = {
        (kind, way): SymmetricChecks(group, Places(group, kind, 140_100), asynchronous=way)
        for kind, way in sorted({(kind, way) for _, _, kind, _, way in cases})
    }
    for dtype, nbytes, kind, which, way in cases:
        choices = reductions(dtype)
        shape = (nbytes // dtype.itemsize,) if which % 2 else (max(1, nbytes // dtype.itemsize // 7), 7)
        checks[kind, way].every_symmetric_operation(dtype, shape, choices[which % len(choices)])
    for each in checks.values():
        each.finish()
    group.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("remembered", [1, 40, 1000])
def test_ordinary_tensors_again_and_again(world, monkeypatch, remembered) -> None:
    """Whether or not their chunks are remembered, and when the size of chunks changes in between."""
    monkeypatch.setattr(node_paths, "_MAX_VIEWS", remembered)
    group = world.new_group(range(world.size))
    size, count = world.size, medium_bytes(world.size) // 2 + 5
    tensors = [torch.empty(count, dtype=torch.int32) for _ in range(3)]
    total = size * (size - 1) // 2
    line = torch.arange(count, dtype=torch.int32)
    for piece_bytes in (1 << 20, 1 << 14, 3 << 14, 1 << 20):
        if group.backend.name == "mpi":
            group.backend.piece_bytes = piece_bytes
        for repeat in range(3):
            for number, tensor in enumerate(tensors):
                tensor.copy_(line).add_(world.rank + number)
                group.all_reduce(tensor)
                assert torch.equal(tensor, line * size + total + number * size)
                root = (repeat + number) % size
                tensor.copy_(line).mul_(world.rank)
                group.reduce(tensor, root)
                assert torch.equal(tensor, line * (total if world.rank == root else world.rank))
            tensors[repeat] = torch.empty(count, dtype=torch.int32)  # perhaps where the last one was
    group.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("nbytes", [4000, 1 << 19, 1 << 22])
def test_a_tensor_whose_memory_was_given_back(world, nbytes) -> None:
    """Whichever plan serves tensors of that size, it reads no memory that is not the tensor's."""
    group = world.new_group(range(world.size))
    tensor = torch.ones(nbytes // 4)
    for _ in range(3):
        group.all_reduce(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        group.all_reduce(tensor)
    again = torch.ones(nbytes // 4)
    group.all_reduce(again)
    assert again.eq(world.size).all()
    group.close()


@pytest.mark.ranks(2, 4)
def test_autograd_sees_that_a_tensor_has_changed(world) -> None:
    for nbytes in (4, 4000, 1 << 19, 1 << 22):
        for _ in range(3):
            factor = torch.ones(nbytes // 4)
            loss = (torch.ones_like(factor, requires_grad=True) * factor).sum()
            world.default_group.all_reduce(factor)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


# ---- the same tensor again and again --------------------------------------------------------------------------


def test_the_same_tensor_many_times(world) -> None:
    """What is remembered about a tensor holds for that one, and for views of it with other shapes and dtypes."""
    group = world.new_group(range(world.size))
    size = world.size
    count = direct_bytes(size) // 4 + 100
    whole = group.symmetric_empty((count, 2), torch.float32)
    ways = (
        lambda: whole,
        lambda: whole.view(-1),
        lambda: whole.view(2, -1),
        lambda: whole[: count - 3],
        lambda: whole[3:],
        lambda: whole.view(torch.int32),
        lambda: whole.view(-1)[1 : 2 * count - 9],
    )
    for _ in range(3):
        for make in ways:
            tensor = make()
            whole.fill_(-1)
            tensor.fill_(group.rank + 1)
            group.all_reduce(tensor)
            assert bool((tensor == sum(range(1, size + 1))).all())
            ordinary = tensor.clone()
            group.all_reduce(ordinary)  # the same kind of call on memory of its own
            assert bool((ordinary == size * sum(range(1, size + 1))).all())
            group.barrier()  # before anybody fills it anew


def test_another_tensor_in_the_memory_of_an_old_one(world) -> None:
    group = world.new_group(range(world.size))
    count = direct_bytes(world.size) // 4 + 1
    for turn in range(10):
        tensor = group.symmetric_empty((count + turn % 3,), torch.float32).fill_(turn + group.rank)
        group.all_reduce(tensor, ReduceOp.MAX)
        assert bool((tensor == turn + world.size - 1).all())
        del tensor


@pytest.mark.ranks(4)
def test_symmetric_tensors_of_overlapping_groups(world) -> None:
    size = world.size
    groups = [world.new_group(ranks) for ranks in ([0, 1, 2], [3, 2, 1], [0, 3], range(size))]
    own = [group for group in groups if group.contains(world.rank)]
    count = direct_bytes(2) // 4 + 1
    tensors = [group.symmetric_empty((count,), torch.float32) for group in own]
    for _ in range(5):
        for group, tensor in zip(own, tensors, strict=True):
            tensor.fill_(world.rank)
            group.all_reduce(tensor)
            assert bool((tensor == sum(group.ranks)).all()), group
        for group, tensor in zip(own, reversed(tensors), strict=True):  # of another group: ordinary memory
            tensor.fill_(world.rank)
            group.all_reduce(tensor)
            assert bool((tensor == sum(group.ranks)).all()), group
            group.barrier()


def test_memory_seen_in_another_order(world) -> None:
    """A symmetric tensor, then the same memory with other strides, on all ranks or on one of them."""
    group = world.new_group(range(world.size))
    side = math.isqrt(direct_bytes(world.size) // 4) + 8
    for odd in (range(world.size), [world.size - 1], [0]):
        for turned in (lambda t: t.t(), lambda t: t.repeat_interleave(2, 0)[::2]):
            tensor = group.symmetric_empty((side, side), torch.float32)
            for _ in range(2):
                own = torch.arange(side * side, dtype=torch.float32).view(side, side) % 97 + world.rank
                expected = world.size * (own - world.rank) + sum(range(world.size))
                tensor.copy_(own)
                group.all_reduce(tensor)
                assert torch.equal(tensor, expected)
                seen = turned(tensor) if world.rank in odd else tensor
                seen.copy_(own)
                group.all_reduce(seen)
                assert torch.equal(seen, expected)
            buffer = group.symmetric_empty((2 * side * side,), torch.float32)
            for view in (buffer[: side * side], buffer[::2], buffer[: side * side]):
                view.copy_(own.view(-1))
                group.all_reduce(view)
                assert torch.equal(view, expected.view(-1))
