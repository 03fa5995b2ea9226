"""Reductions of ordinary tensors on one node, through scratch memory that the ranks share.

A tensor goes in chunks that stay in the cache. The three steps of a chunk are one barrier apart, and different
chunks are at different steps at the same time:

    turn 0   copy in chunk 0                                                            agree on the call
    turn 1   copy in chunk 1    reduce own slice of chunk 0                              barrier
    turn 2   copy in chunk 2    reduce own slice of chunk 1    copy out chunk 0          barrier ...

`chunk_pipeline` says which scratch memory a turn writes and the next one reads. A rank's own slice never leaves its
tensor. Where ranks outnumber the cores, some wait for what Python does for others: so all views
that a chunk takes are made once, and found again by the tensor's address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..buffers import pointer_of
from ..call import Call
from ..reduction import choose_reduction
from .barrier import NodeBarrier
from .handshake import NodeSlots
from .room import NodeRoom
from .staging import ALIGNMENT, Bytes, Scratch, slices_of, views_of

__all__ = ["ChunkPlan"]

MANY_CHUNKS_BYTES = 768 << 10
"""The most that goes at a time where it takes several times. Chunks of 512 KiB or 1 MiB took up to a fifth longer,
perhaps since buffers at distances of a power of two compete for places in a cache."""

_MAX_VIEWS = 4096


class ChunkPlan:
    """A reduction of ordinary tensors of one dtype and size.

    Args:
        slots: Carries the fingerprint.
        barrier: The barrier that it travels with.
        room: The scratch memory, and how much goes through it at a time.
        may_keep: Says whether so many views of a tensor may be kept.
        call: The call.
        has_result: Whether this rank gets the result.
    """

    def __init__(
        self,
        slots: NodeSlots,
        barrier: NodeBarrier,
        room: NodeRoom,
        may_keep: Callable[[int], bool],
        call: Call,
        *,
        has_result: bool = True,
    ) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._slots = slots
        self._barrier = barrier
        self._room = room
        self._may_keep = may_keep
        self._call = call
        self._reduction = choose_reduction(call.dtype, call.op, slots.size)
        self._dtype = call.dtype
        self._has_result = has_result
        self._chunk_bytes = 0
        self._cuts: list[_Cut] = []
        self._kinds: list[_Cut] = []
        self._seen: dict[int, list[_Chunk]] = {}

    def run(self, flat: Tensor, agreed: bool) -> None:
        """Reduce contiguous data, in place where this rank gets the result; collective.

        Args:
            flat: The data, of any shape.
            agreed: Whether the ranks have agreed on the call; if not, the first chunk is copied in before they do.
        """
        chunks, rank, reduce_parts, dtype = self._chunks(flat), self._slots.rank, self._reduction.run, self._dtype
        turns, has_result = self._room.turns(), self._has_result
        for cut in self._kinds:  # not while it is measured how long a chunk takes
            cut.prepare(turns.any_place)

        def copy_in(number: int, place: int, before: int) -> None:
            chunk = chunks[number]
            for target, source in zip(chunk.cut.at(place).inputs, chunk.sources, strict=True):
                target[...] = source

        def reduce(number: int, place: int, before: int) -> None:
            chunk = chunks[number]
            if not chunk.own.nbytes:
                return
            own = torch.from_numpy(chunk.own).view(dtype)
            parts, target = [*chunk.cut.at(before).parts], chunk.cut.at(place)
            parts[rank] = own
            reduce_parts(parts, target.result)
            if has_result:
                chunk.own[...] = target.result_bytes

        def copy_out(number: int, place: int, before: int) -> None:
            if not has_result:
                return
            chunk = chunks[number]
            for target, source in zip(chunk.targets, chunk.cut.at(before).outputs, strict=True):
                target[...] = source

        first = 0
        if not agreed:
            turns.put_first(copy_in)
            # If some ranks have a symmetric tensor, they have put nothing in yet: begin anew, with them.
            first = 1 if self._slots.meet(self._call, 0) else 0
        if has_result:  # now, since what fails later leaves a part of it changed
            torch.autograd.graph.increment_version(flat)
        turns.run(self._call, len(chunks), (copy_in, reduce, copy_out), first, self._cuts[0].nbytes)

    def forget(self) -> None:
        """Let go of all views of tensors; local."""
        self._seen.clear()

    def _chunks(self, flat: Tensor) -> list[_Chunk]:
        most = self._room.chunk_bytes()
        if most != self._chunk_bytes:
            self._seen.clear()
            self._cuts = self._cut(most)
            self._kinds = [*{*self._cuts}]
            self._chunk_bytes = most
        pointer = flat.data_ptr()
        chunks = self._seen.get(pointer)
        if chunks is None or flat.untyped_storage().nbytes() < flat.storage_offset() * flat.itemsize + flat.nbytes:
            chunks = self._look_at(flat)
            if self._may_keep(len(chunks) * (self._slots.size + 2)):
                self._seen[pointer] = chunks
        return chunks

    def _cut(self, most: int) -> list[_Cut]:
        """Cut the data into chunks of about equal size, up to `most` bytes; all of a size are cut alike."""
        nbytes, ranks = self._call.nbytes, self._slots.size
        if nbytes > most:
            most = min(most, MANY_CHUNKS_BYTES)
        unit = ranks * max(ALIGNMENT, self._dtype.itemsize)
        size = -(-nbytes // (-(-nbytes // most) * unit)) * unit
        sizes = [min(size, nbytes - start) for start in range(0, nbytes, size)]
        scratch, rank = self._room.scratch(), self._slots.rank
        # The last one, perhaps shorter, is cut alike: a result goes where its rank has put nothing in.
        bounds = slices_of(size, ranks, unit // ranks)
        cuts = {most: _Cut(scratch, rank, _up_to(most, bounds), self._dtype) for most in {*sizes}}
        return [cuts[size] for size in sizes]

    def _look_at(self, flat: Tensor) -> list[_Chunk]:
        """Make the views of a tensor, which keep nothing alive: whatever lies there next has as many bytes."""
        memory: Any = (ctypes.c_uint8 * self._call.nbytes).from_address(pointer_of(flat))
        data = np.frombuffer(memory, np.uint8)
        chunks, start = [], 0
        for cut in self._cuts:
            chunks.append(_Chunk(cut, data[start : start + cut.nbytes]))
            start += cut.nbytes
        return chunks


def _up_to(most: int, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut ranges off at `most`."""
    return [(min(low, most), min(high, most)) for low, high in bounds]


class _Cut:
    """How chunks of one size lie in scratch memory.

    Args:
        scratch: The scratch memory.
        rank: This rank, on its node.
        bounds: Each rank's slice of a chunk, in bytes.
        dtype: Of its elements.

    Attributes:
        nbytes: Size of a chunk.
        own: The own slice.
        others: The other ranks' slices.
        around: All but the own slice, in one piece or two.
    """

    def __init__(self, scratch: Scratch, rank: int, bounds: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.nbytes = bounds[-1][1]
        self.own = low, high = bounds[rank]
        self.others = bounds[:rank] + bounds[rank + 1 :]
        self.around = [(start, stop) for start, stop in ((0, low), (high, self.nbytes)) if start < stop]
        self._scratch, self._rank, self._dtype = scratch, rank, dtype
        self._key = (self.nbytes, bounds[0][1], dtype)

    def at(self, place: int) -> _Place:
        """Return its views of a place of scratch memory; local."""
        found: _Place | None = self._scratch.kept.get((place, self._key))
        return found or self.prepare(place)

    def prepare(self, place: int) -> _Place:
        """Make its views of a place and of those alike, unless there are some; local."""
        kept = self._scratch.kept
        if (place, self._key) not in kept:
            if len(kept) * (len(self.others) + 1) >= _MAX_VIEWS:
                kept.clear()
            for each in self._scratch.alike(place):
                kept[each, self._key] = _Place(self, each, self._scratch, self._rank, self._dtype)
        made: _Place = kept[place, self._key]
        return made


class _Place:
    """Views of one place of scratch memory, for chunks of one size.

    Attributes:
        inputs: Where this rank puts what is not its slice.
        parts: All ranks' parts of the own slice, the own one missing.
        result: Where its reduction goes.
        result_bytes: The same.
        outputs: Where the other slices' reductions lie.
    """

    __slots__ = ("inputs", "outputs", "parts", "result", "result_bytes")

    def __init__(self, cut: _Cut, place: int, scratch: Scratch, rank: int, dtype: torch.dtype) -> None:
        mine, outputs = scratch.inputs[place][rank], scratch.outputs[place]
        peers = [peer for peer in range(len(outputs)) if peer != rank]
        self.inputs = [mine[start:stop] for start, stop in cut.around]
        self.parts = views_of(scratch.inputs[place], *cut.own, dtype)
        self.result = views_of([outputs[rank]], *cut.own, dtype)[0]
        self.result_bytes = outputs[rank][slice(*cut.own)]
        self.outputs = [outputs[peer][start:stop] for peer, (start, stop) in zip(peers, cut.others, strict=True)]


class _Chunk:
    """One chunk of a tensor.

    Args:
        cut: How it is cut.
        data: Its bytes.

    Attributes:
        cut: How it is cut.
        own: The own slice. Not as a tensor, which others would find in the garbage collector's lists.
        sources: What goes into scratch memory.
        targets: Where the other slices' results go.
    """

    __slots__ = ("cut", "own", "sources", "targets")

    def __init__(self, cut: _Cut, data: Bytes) -> None:
        self.cut = cut
        self.own = data[slice(*cut.own)]
        self.sources = [data[start:stop] for start, stop in cut.around]
        self.targets = [data[start:stop] for start, stop in cut.others]
