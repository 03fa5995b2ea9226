"""Reductions of ordinary tensors on one node, through scratch memory that the ranks share (layer 2).

A tensor goes in chunks that stay in the cache. The three steps of a chunk are one barrier apart, and different
chunks are at different steps at the same time:

    turn 0   copy in chunk 0                                                            agree on the call
    turn 1   copy in chunk 1    reduce own slice of chunk 0                              barrier
    turn 2   copy in chunk 2    reduce own slice of chunk 1    copy out chunk 0          barrier ...

What one turn writes the next one reads, so there are two of each scratch buffer, used in turn. A rank's own slice
never leaves its tensor. Where ranks outnumber the cores, some wait for what Python does for others: so all views
that a chunk takes are made once, and found again by the tensor's address.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .call import Call
from .mpi_memory import pointer_of
from .node_scratch import ALIGNMENT, Bytes, Scratch, run_turns, slices_of
from .reduction import reduce_in_rank_order

if TYPE_CHECKING:
    from .node_barrier import NodeBarrier
    from .node_paths import NodePaths
    from .node_slots import NodeSlots

__all__ = ["ChunkPlan"]

MANY_CHUNKS_BYTES = 768 << 10
"""The most that goes at a time where it takes several times. Chunks of 512 KiB or 1 MiB took up to a fifth longer,
perhaps since buffers at distances of a power of two compete for places in a cache."""


class ChunkPlan:
    """A reduction of ordinary tensors of one dtype and size.

    Args:
        slots: Carries the fingerprint.
        barrier: The barrier that it travels with.
        paths: Knows the scratch memory, and how much goes through it at a time.
        call: The call.
        has_result: Whether this rank gets the result.
    """

    def __init__(
        self, slots: NodeSlots, barrier: NodeBarrier, paths: NodePaths, call: Call, *, has_result: bool = True
    ) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._slots = slots
        self._barrier = barrier
        self._paths = paths
        self._call = call
        self._op = call.op
        self._dtype = call.dtype
        self._has_result = has_result
        self._chunk_bytes = 0
        self._cuts: list[_Cut] = []
        self._seen: dict[int, list[_Chunk]] = {}

    def run(self, flat: Tensor, agreed: bool) -> None:
        """Reduce contiguous data, in place where this rank gets the result; collective.

        Args:
            flat: The data, of any shape.
            agreed: Whether the ranks have agreed on the call; if not, the first chunk is copied in before they do.
        """
        chunks, rank, op, dtype = self._chunks(flat), self._slots.rank, self._op, self._dtype
        has_result = self._has_result

        def copy_in(number: int, place: int) -> None:
            chunk = chunks[number]
            for target, source in zip(chunk.cut.inputs[place], chunk.sources, strict=True):
                target[...] = source

        def reduce(number: int, place: int) -> None:
            chunk = chunks[number]
            cut = chunk.cut
            if not chunk.own.nbytes:
                return
            own = torch.from_numpy(chunk.own).view(dtype)
            parts, result = [*cut.parts[place]], cut.results[place]
            parts[rank] = own
            reduce_in_rank_order(parts, op, result)
            if has_result:
                own.copy_(result)

        def copy_out(number: int, place: int) -> None:
            if not has_result:
                return
            chunk = chunks[number]
            for target, source in zip(chunk.targets, chunk.cut.outputs[place], strict=True):
                target[...] = source

        first = 0
        if not agreed:
            copy_in(0, self._slots.place)
            # If some ranks have a symmetric tensor, they have put nothing in yet: begin anew, with them.
            first = 1 if self._slots.meet(self._call, 0) else 0
        if has_result:  # now, since what fails later leaves a part of it changed
            torch.autograd.graph.increment_version(flat)
        run_turns(self._barrier, self._call, len(chunks), (copy_in, reduce, copy_out), first)

    def forget(self) -> None:
        """Let go of all views of tensors; local."""
        self._seen.clear()

    def _chunks(self, flat: Tensor) -> list[_Chunk]:
        most = self._paths.chunk_bytes()
        if most != self._chunk_bytes:
            self._seen.clear()
            self._cuts = self._cut(most)
            self._chunk_bytes = most
        pointer = flat.data_ptr()
        chunks = self._seen.get(pointer)
        if chunks is None or flat.untyped_storage().nbytes() < flat.storage_offset() * flat.itemsize + flat.nbytes:
            chunks = self._look_at(flat)
            if self._paths.may_keep(len(chunks) * (self._slots.size + 2)):
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
        scratch, rank = self._paths.scratch_memory(), self._slots.rank
        cuts = {size: _Cut(scratch, rank, slices_of(size, ranks, unit // ranks), self._dtype) for size in {*sizes}}
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
        inputs: Where this rank puts the latter, in a turn of either place.
        parts: All ranks' parts of the own slice, the own one still missing.
        results: Where its reduction goes.
        outputs: Where the other slices' reductions lie.
    """

    def __init__(self, scratch: Scratch, rank: int, bounds: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.nbytes = bounds[-1][1]
        self.own = low, high = bounds[rank]
        self.others = bounds[:rank] + bounds[rank + 1 :]
        self.around = [(start, stop) for start, stop in ((0, low), (high, self.nbytes)) if start < stop]
        peers = [peer for peer in range(len(bounds)) if peer != rank]
        self.inputs: list[list[Bytes]] = []
        self.parts: list[list[Tensor]] = []
        self.results: list[Tensor] = []
        self.outputs: list[list[Bytes]] = []
        for place in (0, 1):
            mine, outputs = scratch.inputs[place][rank], scratch.outputs[1 - place]
            self.inputs.append([mine[start:stop] for start, stop in self.around])
            self.parts.append(list(scratch.input_views(1 - place, low, high, dtype)))
            self.results.append(scratch.output_view(place, rank, low, high, dtype))
            self.outputs.append(
                [outputs[peer][start:stop] for peer, (start, stop) in zip(peers, self.others, strict=True)]
            )


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
