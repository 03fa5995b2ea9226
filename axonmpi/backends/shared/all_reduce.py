"""Reductions over the ranks of one node, onto one rank or all, by the strategy that suits size and memory.

    strategy     how                                                              barriers          copies
    replicated   each rank puts its data into staging and reduces all of it       1                 1 in
    in place     each reduces its slice over all ranks' memory, writes it to all  2                 none
    staged       chunks go through staging: copy in, reduce a slice, copy out     1 a chunk, and 2  1 in, 1 out

    tensor       up to 32 KiB of all ranks   up to `replicated_bytes`   larger
    symmetric    replicated                  in place                   in place
    ordinary     replicated                  replicated                 staged

The first barrier carries the fingerprint of the call, and whether all ranks have a symmetric tensor at the same
address: where they do not, the tensor is staged. What can be done before that barrier is done: data is copied in.

The stages of a staged reduction are one barrier apart, and different chunks are at different stages at a time:

    tick 0   copy in chunk 0                                                            compare the calls
    tick 1   copy in chunk 1    reduce own slice of chunk 0                             barrier
    tick 2   copy in chunk 2    reduce own slice of chunk 1    copy out chunk 0         barrier ...

A rank's own slice never leaves its tensor. Where ranks outnumber the cores, some wait for what Python does for
others: so the views that a reduction takes are made once, and found again by the tensor's address.

The file is long because it has all that a reduction on one node passes, from the choice to the last copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ..buffers import bytes_of
from ..call import Call
from ..connection import Limits
from ..reduction import Reduction, choose_reduction, is_plain_sum
from ..tuning import (
    CHUNK_BYTES,
    MAX_VIEWS,
    REPEATED_CHUNK_BYTES,
    REPLICATED_BYTES,
    REPLICATED_ORDINARY_BYTES,
    REPLICATED_PAIR_BYTES,
    SLICE_BYTES,
)
from .arena import Arena
from .barrier import NodeBarrier
from .chunk_pipeline import run_stages
from .handshake import NodeHandshake
from .staging import ALIGNMENT, Bytes, Staging, round_down, slices_of, views_of

__all__ = ["NodeMemory", "NodeReduction", "replicated_bytes"]

_PAGE = 4096


def replicated_bytes(ranks: int, *, symmetric: bool) -> int:
    """Return the size up to which every rank of so many reduces all of a tensor; local."""
    if symmetric:
        return max(REPLICATED_BYTES // ranks // _PAGE * _PAGE, _PAGE)
    if ranks == 2:
        return REPLICATED_PAIR_BYTES
    return max(REPLICATED_ORDINARY_BYTES // ranks**2 // _PAGE * _PAGE, replicated_bytes(ranks, symmetric=True))


def _scratch() -> Tensor:
    with torch.inference_mode(False):  # what is made in that mode could not be reused outside of it
        return torch.empty(SLICE_BYTES, dtype=torch.uint8, device="cpu")


@dataclass
class NodeMemory:
    """What the ranks of a group on one node share.

    Attributes:
        handshake: Compares calls.
        barrier: The barrier that it goes with.
        arena: Where symmetric tensors lie.
        staging: Where ordinary tensors go through.
        limits: How much is reduced at a time.
        views: Views of tensors that were reduced before, found by kind of call and address.
        total: [SLICE_BYTES] uint8 of this rank's own, for the sum of a piece.
    """

    handshake: NodeHandshake
    barrier: NodeBarrier
    arena: Arena
    staging: Staging
    limits: Limits
    views: BoundedCache[Any, Any] = field(default_factory=lambda: BoundedCache(MAX_VIEWS))
    total: Tensor = field(default_factory=_scratch)

    def chunk_bytes(self) -> int:
        """Return how much of a rank's tensor goes through staging at a time, a slice for each rank; local."""
        unit = ALIGNMENT * self.handshake.size
        return max(min(self.limits.piece_bytes, CHUNK_BYTES, self.staging.buffer_bytes) // unit, 1) * unit


class NodeReduction:
    """Reductions of one dtype, shape, operation and root.

    Args:
        memory: What the ranks share.
        call: The call.
    """

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        self._call = call
        self._handshake = memory.handshake
        ranks = memory.handshake.size
        self._replicated = self._in_place = None
        if call.nbytes > replicated_bytes(ranks, symmetric=True):
            self._in_place = _InPlace(memory, call)
        if call.nbytes <= min(replicated_bytes(ranks, symmetric=False), memory.staging.buffer_bytes):
            self._replicated = _Replicated(memory, call)
        self._staged = _Staged(memory, call)

    def run(self, tensor: Tensor) -> None:
        """Reduce contiguous data, in place on ranks that get the result; collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        slices = None if self._in_place is None else self._in_place.find(tensor)
        if slices is not None:
            assert self._in_place is not None
            if self._handshake.meet(self._call, slices.address):
                self._in_place.run(slices, tensor)
            else:
                self._staged.run(tensor)
        elif self._replicated is not None:
            index = self._replicated.put(tensor)
            if self._handshake.meet(self._call, 0):
                self._replicated.take(tensor, index)
            else:
                self._staged.run(tensor)
        else:
            self._staged.put_first(tensor)
            # If some ranks have a symmetric tensor, they have put nothing in: begin anew, with them.
            self._staged.run(tensor, first=1 if self._handshake.meet(self._call, 0) else 0)


class _Strategy:
    """One of the ways, for calls of one dtype, shape, operation and root."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._memory = memory
        self._call = call
        self._dtype = call.dtype
        self._op = call.op
        self._rank = memory.handshake.rank
        self._reduction = choose_reduction(call.dtype, call.op, memory.handshake.size)
        self._gets_result = call.root in (None, self._rank)


class _Replicated(_Strategy):
    """Each rank reduces all of the data."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        super().__init__(memory, call)
        staging, rank = memory.staging, self._rank
        self._barrier = memory.barrier
        self._count = staging.count
        self._own = [buffers[rank][: call.nbytes] for buffers in staging.buffers]
        self._parts = [
            [part.view(call.shape) for part in views_of(buffers, 0, call.nbytes, self._dtype)]
            for buffers in staging.buffers
        ]
        # The own part of a sum of two is in the tensor already.
        adds = memory.handshake.size == 2 and is_plain_sum(self._dtype, self._op)
        self._other = [parts[1 - rank] for parts in self._parts] if adds else None
        self._sources: BoundedCache[int, Bytes] = BoundedCache(256)

    def put(self, tensor: Tensor) -> int:
        """Copy the own data to where the others find it; returns the index of the buffer; local."""
        index = self._barrier.count % self._count
        pointer = tensor.data_ptr()
        source = self._sources.get(pointer)
        if source is None:
            source = self._sources.add(pointer, bytes_of(tensor))
        self._own[index][...] = source
        return index

    def take(self, tensor: Tensor, index: int) -> None:
        """Reduce what all ranks have put in; local, after they have met."""
        if not self._gets_result:
            return
        if self._other is None:
            self._reduction.run(self._parts[index], tensor)
        elif self._rank == 0:
            tensor.add_(self._other[index])
        else:  # the order of rank 0: a sum of two NaN has the bits of the first
            torch.add(self._other[index], tensor, out=tensor)


class _Slices:
    """This rank's slice of a symmetric tensor, over the memory of all ranks, in pieces that fit into a cache.

    Attributes:
        address: Where the tensor lies.
        pieces: The pieces.
    """

    __slots__ = ("address", "pieces")

    def __init__(self, address: int, pieces: list[_Piece]) -> None:
        self.address = address
        self.pieces = pieces


class _Piece:
    """A piece of a slice.

    Args:
        rows: [ranks, elements] the piece in the memory of each rank.
        total: [elements] memory for its sum.
    """

    __slots__ = ("_raw", "_sum", "_total", "parts")

    def __init__(self, rows: Tensor, total: Tensor) -> None:
        self.parts = list(rows.unbind(0))
        self._total = total[: rows.shape[1]]
        # Numpy has copied before torch has begun to; bytes, since it does not know all dtypes.
        self._raw = rows.view(torch.uint8).numpy()
        self._sum = self._total.view(torch.uint8).numpy()

    def reduce(self, reduction: Reduction, rank: int, root: int | None) -> None:
        """Reduce the piece onto one rank or all; local."""
        parts, raw = self.parts, self._raw
        if root is not None:
            reduction.run(parts, self._total)
            raw[root] = self._sum
        elif reduction.in_place:  # of two
            reduction.run(parts, parts[rank])
            raw[1 - rank] = raw[rank]
        else:
            reduction.run(parts, self._total)
            raw[...] = self._sum


class _InPlace(_Strategy):
    """Each rank reduces its slice of a symmetric tensor, in the memory of all ranks."""

    def find(self, tensor: Tensor) -> _Slices | None:
        """Return this rank's slices of a contiguous tensor, None if it is not symmetric; local."""
        key = (self._call.key, tensor.data_ptr())
        slices: _Slices | None = self._memory.views.get(key)
        if slices is None:
            address = self._memory.arena.address(tensor)
            if not address:
                return None
            slices = _Slices(address, self._cut(address))
            self._memory.views.add(key, slices, 1 + len(slices.pieces) * self._memory.handshake.size)
        return slices

    def run(self, slices: _Slices, tensor: Tensor) -> None:
        """Reduce the own slices; collective, after all ranks have met."""
        if self._gets_result:
            torch.autograd.graph.increment_version(tensor)  # before what may fail halfway
        for piece in slices.pieces:
            piece.reduce(self._reduction, self._rank, self._call.root)
        self._memory.barrier.wait(self._call)

    def _cut(self, address: int) -> list[_Piece]:
        memory, itemsize = self._memory, self._dtype.itemsize
        unit = max(ALIGNMENT, itemsize)
        low, high = slices_of(self._call.nbytes, memory.handshake.size, unit)[self._rank]
        if low == high:
            return []
        step = round_down(min(SLICE_BYTES, memory.limits.piece_bytes), ALIGNMENT)
        with torch.inference_mode(False):
            total = memory.total.view(self._dtype)
            rows = memory.arena.rows(address + low, high - low).view(self._dtype)
            return [_Piece(part, total) for part in rows.split(step // itemsize, dim=1)]


class _Staged(_Strategy):
    """Chunks of an ordinary tensor go through staging."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        super().__init__(memory, call)
        self._chunk_bytes = 0
        self._cuts: list[_Cut] = []

    def put_first(self, tensor: Tensor) -> None:
        """Copy in the first chunk; local, before all ranks have met."""
        self._chunks(tensor)[0].copy_in(self._memory.barrier.count % self._memory.staging.count)

    def run(self, tensor: Tensor, first: int = 0) -> None:
        """Reduce contiguous data; collective, after all ranks have met.

        Args:
            tensor: The data.
            first: 1 where all ranks have put in their first chunk.
        """
        chunks, rank, dtype, memory = self._chunks(tensor), self._rank, self._dtype, self._memory
        reduce_parts, gets_result = self._reduction.run, self._gets_result

        def copy_in(number: int, index: int, before: int) -> None:
            chunks[number].copy_in(index)

        def reduce(number: int, index: int, before: int) -> None:
            chunk = chunks[number]
            if not chunk.own.nbytes:
                return
            parts, target = [*chunk.cut.views[before].parts], chunk.cut.views[index]
            parts[rank] = torch.from_numpy(chunk.own).view(dtype)
            reduce_parts(parts, target.result)
            if gets_result:
                chunk.own[...] = target.result_bytes

        def copy_out(number: int, index: int, before: int) -> None:
            if gets_result:
                chunk = chunks[number]
                for target, source in zip(chunk.targets, chunk.cut.views[before].outputs, strict=True):
                    target[...] = source

        if gets_result:  # now, since what fails later leaves a part of it changed
            torch.autograd.graph.increment_version(tensor)
        stages = (copy_in, reduce, copy_out)
        run_stages(memory.barrier, memory.staging.count, self._call, len(chunks), stages, first)

    def _chunks(self, tensor: Tensor) -> list[_Chunk]:
        most = self._memory.chunk_bytes()
        if most != self._chunk_bytes:
            self._cuts = self._cut(most)
            self._chunk_bytes = most
        key = (self._call.key, tensor.data_ptr(), most)
        chunks: list[_Chunk] | None = self._memory.views.get(key)
        needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        if chunks is None or tensor.untyped_storage().nbytes() < needed:
            chunks = self._look_at(tensor)
            self._memory.views.add(key, chunks, len(chunks) * (self._memory.handshake.size + 2))
        return chunks

    def _cut(self, most: int) -> list[_Cut]:
        """Cut the data into chunks of about equal size, up to `most` bytes; all of a size are cut alike."""
        nbytes, ranks = self._call.nbytes, self._memory.handshake.size
        if nbytes > most:
            most = min(most, REPEATED_CHUNK_BYTES)
        unit = ranks * max(ALIGNMENT, self._dtype.itemsize)
        size = -(-nbytes // (-(-nbytes // most) * unit)) * unit
        sizes = [min(size, nbytes - start) for start in range(0, nbytes, size)]
        # The last one, perhaps shorter, is cut alike: a result goes where its rank has put nothing in.
        bounds = slices_of(size, ranks, unit // ranks)
        cuts = {
            most: _Cut(self._memory.staging, self._rank, _up_to(most, bounds), self._dtype) for most in {*sizes}
        }
        return [cuts[size] for size in sizes]

    def _look_at(self, tensor: Tensor) -> list[_Chunk]:
        data = bytes_of(tensor)
        chunks, start = [], 0
        for cut in self._cuts:
            chunks.append(_Chunk(cut, data[start : start + cut.nbytes]))
            start += cut.nbytes
        return chunks


def _up_to(most: int, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut ranges off at `most`."""
    return [(min(low, most), min(high, most)) for low, high in bounds]


class _Cut:
    """How chunks of one size lie in staging.

    Args:
        staging: The staging.
        rank: This rank, on its node.
        bounds: Each rank's slice of a chunk, in bytes.
        dtype: Of its elements.

    Attributes:
        nbytes: Size of a chunk.
        own: The own slice.
        others: The other ranks' slices.
        around: All but the own slice, in one piece or two.
        views: Views of each buffer.
    """

    def __init__(self, staging: Staging, rank: int, bounds: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.nbytes = bounds[-1][1]
        self.own = low, high = bounds[rank]
        self.others = bounds[:rank] + bounds[rank + 1 :]
        self.around = [(start, stop) for start, stop in ((0, low), (high, self.nbytes)) if start < stop]
        self.views = [_BufferViews(self, buffers, rank, dtype) for buffers in staging.buffers]


class _BufferViews:
    """Views of all ranks' buffers of one index, for chunks of one size.

    Attributes:
        inputs: Where this rank puts what is not its slice.
        parts: All ranks' parts of the own slice; the own one lies in the tensor.
        result: Where its reduction goes: where this rank puts nothing in.
        result_bytes: The same.
        outputs: Where the other slices' reductions lie.
    """

    __slots__ = ("inputs", "outputs", "parts", "result", "result_bytes")

    def __init__(self, cut: _Cut, buffers: list[Bytes], rank: int, dtype: torch.dtype) -> None:
        peers = [peer for peer in range(len(buffers)) if peer != rank]
        self.inputs = [buffers[rank][start:stop] for start, stop in cut.around]
        self.parts = views_of(buffers, *cut.own, dtype)
        self.result = self.parts[rank]
        self.result_bytes = buffers[rank][slice(*cut.own)]
        self.outputs = [buffers[peer][start:stop] for peer, (start, stop) in zip(peers, cut.others, strict=True)]


class _Chunk:
    """One chunk of a tensor.

    Args:
        cut: How it is cut.
        data: Its bytes.

    Attributes:
        cut: How it is cut.
        own: The own slice. Not as a tensor, which others would find in the garbage collector's lists.
        sources: What goes into staging.
        targets: Where the other slices' results go.
    """

    __slots__ = ("cut", "own", "sources", "targets")

    def __init__(self, cut: _Cut, data: Bytes) -> None:
        self.cut = cut
        self.own = data[slice(*cut.own)]
        self.sources = [data[start:stop] for start, stop in cut.around]
        self.targets = [data[start:stop] for start, stop in cut.others]

    def copy_in(self, index: int) -> None:
        """Copy all but the own slice into a buffer; local."""
        for target, source in zip(self.cut.views[index].inputs, self.sources, strict=True):
            target[...] = source
