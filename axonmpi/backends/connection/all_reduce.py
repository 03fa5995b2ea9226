"""All-reduce and reduce: every rank's tensor is combined element by element, onto all ranks or one root, in place.

    way          steps                                                     barriers          copies
    in place     each rank reduces its slice in all ranks' memory          2                 none
    chunked      chunks go through staging: copy in, reduce, copy out      1 a chunk, and 2  1 in, 1 out
    alone        a rank alone on its node: all of it goes by the lane      none              none

    tensor       on one node: up to 32 KiB of all ranks   up to `replicated_bytes`   larger
    symmetric                 small (see `small`)         in place                   in place
    ordinary                  small                       small                      chunked

A rank reads and writes 2·bytes in place, and 4·bytes in chunks. Between nodes up to 64 KiB are small, and larger
tensors are cut into a slice for each lane, which carries 2(n−1)/n of it for n nodes. The cut follows from the call
and the placement alone, since MPI's sums depend on it.

The agreement names the address of a symmetric tensor: if it is not the same on all ranks, the tensor is chunked.
On one node the first chunk is copied in before the agreement, whose barrier then serves both.

A chunk passes three stages on one node, four or five between nodes (see `chunks`):

    copy in   all but the own slice into this rank's buffer
    reduce    the own slice over the ranks of the node; between nodes its lane starts with the sum
    lane      one tick for each of its steps
    copy out  the results of the other slices, from the other ranks' buffers

Views that a reduction takes are made once, and found again by the tensor's address: ranks that outnumber the cores
wait for each other's Python.

The file is long because it has all that a reduction passes, from the choice of the way to the last copy.

Source: MPI 4.1, sections 6.9.1 and 6.9.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import bytes_of, flat_elements, write_back
from ..call import Call
from ..reduction import Reduction, choose_reduction, fold, wide_dtype
from ..tuning import ALONE_CHUNK_BYTES, PIECE_BYTES, REPEATED_CHUNK_BYTES, SLICE_BYTES, replicated_bytes
from .chunks import ALIGNMENT, Stage, Staging, round_down, run_chunks, slices_of, stages_of, views_of
from .connection import Connection
from .lane import Flight
from .small import ReductionBetweenNodes, ReductionOnNode
from .topology import Bytes


def reduce(ranks: Connection, call: Call, tensor: Tensor) -> None:
    """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Of the call's dtype and shape, any strides.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    plan = ranks.plans.get(call.key)
    if plan is None:
        plan = ranks.plans.add(call.key, _Plan(ranks, call))
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        plan.run(tensor)
        return
    flat = flat_elements(tensor).view(call.shape)
    plan.run(flat)
    if call.root in (None, ranks.topology.rank):
        write_back(flat, tensor)


class _Plan:
    """The ways of reductions of one dtype, shape, operation and root."""

    def __init__(self, ranks: Connection, call: Call) -> None:
        self._agree, self._call = ranks.agreement.agree, call
        self._gets_result = call.root in (None, ranks.topology.rank)
        is_small, is_one_node = ranks.carries(call.dtype, call.nbytes), ranks.rounds is None
        self._on_node = ReductionOnNode(ranks, call) if is_small and is_one_node else None
        self._between_nodes = ReductionBetweenNodes(ranks, call) if is_small and not is_one_node else None
        least = replicated_bytes(ranks.topology.size, symmetric=True) if is_one_node else 0
        may_be_in_place = is_one_node or (call.root is None and not is_small and not ranks.is_apart)
        self._in_place = _InPlace(ranks, call) if may_be_in_place and call.nbytes > least else None
        self._large = _Alone(ranks, call) if ranks.is_apart else _Chunked(ranks, call)

    def run(self, tensor: Tensor) -> None:
        """Reduce contiguous data onto the root or all ranks, in place there; collective."""
        agree, call, in_place, large = self._agree, self._call, self._in_place, self._large
        cut = None if in_place is None else in_place.find(tensor)
        if in_place is not None and cut is not None:
            if agree(call, 0, cut.address)[2]:
                in_place.run(cut, tensor)
            else:
                large.run(tensor)
        elif self._on_node is not None:
            if not self._on_node.run(tensor):
                large.run(tensor)
        elif self._between_nodes is not None:
            total = self._between_nodes.run(tensor)
            if self._gets_result:
                tensor.copy_(total)
        else:
            first = large.put_first(tensor)
            # If some ranks have a symmetric tensor, they have put nothing in: begin anew, with them.
            large.run(tensor, first if agree(call)[2] else 0)


class _Way:
    """One of the ways, for calls of one dtype, shape, operation and root."""

    def __init__(self, ranks: Connection, call: Call) -> None:
        self._ranks, self._call, self._dtype, self._op = ranks, call, call.dtype, call.op
        self._local, self._size = ranks.topology.local_rank, ranks.topology.size
        self._reduction = choose_reduction(call.dtype, call.op, self._size)
        self._gets_result = call.root in (None, ranks.topology.rank)
        self._unit, self._is_apart = max(ALIGNMENT, call.dtype.itemsize), ranks.is_apart
        self._sum_dtype = call.dtype if ranks.is_apart else wide_dtype(call.dtype)
        self._sliced = ranks.exchanges_slices(self._sum_dtype, call.op, call.nbytes)

    # ---- chunks -------------------------------------------------------------------------------------------

    def _chunk_sizes(self) -> tuple[int, list[int]]:
        """Return the size of a chunk, and the size of each: all are equal, but the last one may be smaller."""
        nbytes, most = self._call.nbytes, self._ranks.chunk_bytes
        if nbytes > most:
            most = min(most, REPEATED_CHUNK_BYTES)
        unit = self._ranks.topology.lanes * self._unit
        size = -(-nbytes // (-(-nbytes // most) * unit)) * unit
        return size, [min(size, nbytes - start) for start in range(0, nbytes, size)]

    def _bounds(self, size: int, most: int) -> list[tuple[int, int]]:
        """Return the slice of each rank of the node in a chunk of `most` bytes, cut as one of `size` is."""
        topology = self._ranks.topology
        slices = slices_of(size, topology.lanes, self._unit)
        slices += [(most, most)] * (len(topology.node_ranks) - len(slices))
        return [(min(low, most), min(high, most)) for low, high in slices]

    # ---- between nodes ------------------------------------------------------------------------------------

    def _lane_stages(
        self,
        parts: Callable[[int, int], list[Tensor]],
        write: Callable[[int, int, Tensor], None],
        chunks: int,
    ) -> list[Stage]:
        """Return the stages that sum chunks over all nodes by this rank's lane, if it has one; local.

        Args:
            parts: Takes a chunk's number and the index of its buffer; returns the slice of each rank of this node,
                [elements] each; none if it is empty.
            write: Takes a chunk's number, the index of this tick's buffer, and the sum of the slice over all nodes.
            chunks: Number of chunks.
        """
        lane, op = self._ranks.lane, self._op
        flights: dict[int, tuple[Flight, Tensor]] = {}

        def sum_here(given: list[Tensor], number: int) -> Tensor:
            """Return the sum over this node, of a rank alone the data itself."""
            assert lane is not None
            if self._is_apart and self._call.root is None:
                return given[0]
            total = lane.buffer("total", given[0].numel(), self._sum_dtype, number % 3)
            if self._is_apart:
                return total.copy_(given[0])
            fold(given, op, total)
            return total

        def start(number: int, index: int, now: int) -> None:
            if lane is not None and (given := parts(number, index)):
                total = sum_here(given, number)
                flights[number] = lane.start(lane.all_reduce(total, op, self._size, sliced=self._sliced)), total

        def go_on(number: int, index: int, now: int) -> None:
            if number in flights:
                flights[number][0].go_on()

        def end(number: int, index: int, now: int) -> None:
            if number in flights:
                flight, total = flights.pop(number)
                flight.finish()
                write(number, now, total)

        return stages_of(chunks, start, *([go_on] if self._sliced else []), end)


# ---- alone -----------------------------------------------------------------------------------------------------


class _Alone(_Way):
    """Each rank is alone on its node, so that its tensor is the node's sum."""

    def put_first(self, tensor: Tensor) -> int:
        """Return tick 0; local."""
        return 0

    def run(self, tensor: Tensor, first: int = 0) -> None:
        """Reduce contiguous data; collective, after the agreement."""
        if not tensor.numel():
            return
        if self._gets_result:
            torch.autograd.graph.increment_version(tensor)  # first: a failure leaves it half changed
        step = max(ALONE_CHUNK_BYTES // PIECE_BYTES * self._ranks.sizes.chunk // self._dtype.itemsize, 1)
        chunks = tensor.view(-1).split(step)

        def parts(number: int, index: int) -> list[Tensor]:
            return [chunks[number]]

        def write(number: int, now: int, total: Tensor) -> None:
            if self._gets_result and total is not chunks[number]:
                chunks[number].copy_(total)

        stages = self._lane_stages(parts, write, len(chunks))
        run_chunks(None, 1, self._call, len(chunks), stages)


# ---- in place --------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """This rank's slices of a symmetric tensor, over the memory of all ranks of the node.

    Attributes:
        address: Address of the tensor in shared memory.
        pieces: The slices, each of a size that fits into a cache.
    """

    address: int
    pieces: list[_Piece]


class _Piece:
    """One slice of a symmetric tensor.

    Args:
        rows: [ranks, elements] the slice in the memory of each rank of the node.
        scratch: At least [elements], for its sum.

    Attributes:
        parts: [ranks] the rows.
    """

    __slots__ = ("_raw", "_sum", "_total", "parts")

    def __init__(self, rows: Tensor, scratch: Tensor) -> None:
        self.parts = list(rows.unbind(0))
        self._total = scratch[: rows.shape[1]]
        # Numpy has copied before torch has begun to; bytes, since it does not know all dtypes.
        self._raw = rows.view(torch.uint8).numpy()
        self._sum = self._total.view(torch.uint8).numpy()

    def reduce(self, reduction: Reduction, rank: int, root: int | None) -> None:
        """Reduce the slice onto one rank of the node or all; local."""
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

    def write(self, total: Tensor) -> None:
        """Write a result to all ranks of the node, rounded to their dtype; local."""
        self._total.copy_(total)
        self._raw[...] = self._sum


class _InPlace(_Way):
    """Each rank reduces its slices of a symmetric tensor, in the memory of all ranks of the node."""

    def find(self, tensor: Tensor) -> _Cut | None:
        """Return this rank's slices of a contiguous tensor, None if it is not symmetric; local."""
        key = (self._call.key, tensor.data_ptr())
        cut: _Cut | None = self._ranks.views.get(key)
        if cut is None:
            assert self._ranks.arena is not None
            address = self._ranks.arena.address(tensor)
            if not address:
                return None
            cut = _Cut(address, self._pieces(address))
            self._ranks.views.add(key, cut, 1 + len(cut.pieces) * len(self._ranks.topology.node_ranks))
        return cut

    def run(self, cut: _Cut, tensor: Tensor) -> None:
        """Reduce the own slices; collective, after the agreement."""
        if self._gets_result:
            torch.autograd.graph.increment_version(tensor)  # first: a failure leaves it half changed
        pieces = cut.pieces
        if self._ranks.rounds is None:
            for piece in pieces:
                piece.reduce(self._reduction, self._local, self._call.root)
        else:
            stages = self._lane_stages(
                lambda number, _: pieces[number].parts,
                lambda number, _, total: pieces[number].write(total),
                len(pieces),
            )
            run_chunks(None, 1, self._call, len(pieces), stages)
        self._ranks.barrier.wait(self._call)

    def _pieces(self, address: int) -> list[_Piece]:
        ranks, dtype, nbytes = self._ranks, self._dtype, self._call.nbytes
        assert ranks.arena is not None
        if ranks.rounds is None:
            low, high = slices_of(nbytes, self._size, self._unit)[self._local]
            step = round_down(min(SLICE_BYTES, ranks.sizes.chunk), ALIGNMENT)
            own = [(at, min(at + step, high)) for at in range(low, high, step)]
        else:
            size, sizes = self._chunk_sizes()
            slices = [self._bounds(size, each)[self._local] for each in sizes if ranks.lane is not None]
            own = [(number * size + low, number * size + high) for number, (low, high) in enumerate(slices)]
        with torch.inference_mode(False):
            scratch = ranks.total.view(dtype)
            rows = [ranks.arena.rows(address + low, high - low).view(dtype) for low, high in own if low < high]
            return [_Piece(each, scratch) for each in rows]


# ---- chunked ---------------------------------------------------------------------------------------------------


class _Chunked(_Way):
    """Chunks of an ordinary tensor go through staging."""

    @cached_property
    def _layouts(self) -> list[_ChunkLayout]:
        """The layout of each chunk."""
        size, sizes = self._chunk_sizes()
        # The last chunk may be smaller and is cut alike: a result fills the gap in its rank's input.
        layouts = {
            each: _ChunkLayout(self._ranks.staging, self._local, self._bounds(size, each), self._dtype)
            for each in {*sizes}
        }
        return [layouts[each] for each in sizes]

    def put_first(self, tensor: Tensor) -> int:
        """Copy in the first chunk if the agreement's barrier can follow; return the tick to go on with; local."""
        if self._ranks.rounds is not None:
            return 0
        self._chunks(tensor)[0].copy_in(self._ranks.barrier.count % self._ranks.staging.count)
        return 1

    def run(self, tensor: Tensor, first: int = 0) -> None:
        """Reduce contiguous data; collective, after the agreement.

        Args:
            tensor: The data.
            first: 1 if all ranks have put in their first chunk.
        """
        chunks, ranks, gets_result = self._chunks(tensor), self._ranks, self._gets_result

        def copy_in(number: int, index: int, now: int) -> None:
            chunks[number].copy_in(index)

        def parts(number: int, index: int) -> list[Tensor]:
            chunk = chunks[number]
            if not chunk.own.nbytes:
                return []
            found = [*chunk.layout.views[index].parts]
            found[self._local] = torch.from_numpy(chunk.own).view(self._dtype)
            return found

        def reduce(number: int, index: int, now: int) -> None:
            if given := parts(number, index):
                self._reduction.run(given, chunks[number].layout.views[now].result)
                keep(number, now)

        def write(number: int, now: int, total: Tensor) -> None:
            chunks[number].layout.views[now].result.copy_(total)
            keep(number, now)

        def keep(number: int, now: int) -> None:
            if gets_result:
                chunks[number].own[...] = chunks[number].layout.views[now].result_bytes

        def copy_out(number: int, index: int, now: int) -> None:
            if gets_result:
                chunk = chunks[number]
                before = chunk.layout.views[(now - 1) % ranks.staging.count]
                for target, source in zip(chunk.targets, before.outputs, strict=True):
                    target[...] = source

        if gets_result:  # first, since a failure below leaves the tensor half changed
            torch.autograd.graph.increment_version(tensor)
        middle = [reduce] if ranks.rounds is None else self._lane_stages(parts, write, len(chunks))
        run_chunks(ranks.barrier, ranks.staging.count, self._call, len(chunks), [copy_in, *middle, copy_out], first)

    def _chunks(self, tensor: Tensor) -> list[_Chunk]:
        key = (self._call.key, tensor.data_ptr(), "chunks")
        chunks: list[_Chunk] | None = self._ranks.views.get(key)
        needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        if chunks is None or tensor.untyped_storage().nbytes() < needed:
            data = bytes_of(tensor)
            chunks, start = [], 0
            for layout in self._layouts:
                chunks.append(_Chunk(layout, data[start : start + layout.nbytes]))
                start += layout.nbytes
            self._ranks.views.add(key, chunks, len(chunks) * (len(self._ranks.topology.node_ranks) + 2))
        return chunks


class _ChunkLayout:
    """The layout of chunks of one size in staging.

    Args:
        staging: The buffers.
        rank: This rank, on its node.
        bounds: [ranks of the node] each one's slice of a chunk, in bytes.
        dtype: Of its elements.

    Attributes:
        nbytes: Size of a chunk.
        own: The own slice.
        others: [other ranks of the node] their slices.
        around: All but the own slice: one range or two.
        views: [buffers] views of each buffer.
    """

    def __init__(self, staging: Staging, rank: int, bounds: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.nbytes = max(high for _, high in bounds)
        self.own = low, high = bounds[rank]
        self.others = bounds[:rank] + bounds[rank + 1 :]
        self.around = [(start, stop) for start, stop in ((0, low), (high, self.nbytes)) if start < stop]
        self.views = [_BufferViews(self, buffers, rank, dtype) for buffers in staging.buffers]


class _BufferViews:
    """Views of all ranks' buffers of one index, for chunks of one size.

    Attributes:
        inputs: Memory for this rank's data around its slice.
        parts: [ranks of the node] their data of the own slice; this rank's lies in the tensor.
        result: Memory for the reduction of the own slice, not an input of this rank.
        result_bytes: The same memory as bytes.
        outputs: [other ranks of the node] the reductions of their slices.
    """

    __slots__ = ("inputs", "outputs", "parts", "result", "result_bytes")

    def __init__(self, layout: _ChunkLayout, buffers: list[Bytes], rank: int, dtype: torch.dtype) -> None:
        peers = [peer for peer in range(len(buffers)) if peer != rank]
        self.inputs = [buffers[rank][start:stop] for start, stop in layout.around]
        self.parts = views_of(buffers, *layout.own, dtype)
        self.result = self.parts[rank]
        self.result_bytes = buffers[rank][slice(*layout.own)]
        self.outputs = [buffers[peer][start:stop] for peer, (start, stop) in zip(peers, layout.others, strict=True)]


class _Chunk:
    """One chunk of a tensor.

    Args:
        layout: Its layout.
        data: Its bytes.

    Attributes:
        layout: Its layout.
        own: The own slice, as an array: the garbage collector lists tensors.
        sources: The data around it, which is copied into staging.
        targets: [other ranks of the node] memory for the results of their slices.
    """

    __slots__ = ("layout", "own", "sources", "targets")

    def __init__(self, layout: _ChunkLayout, data: Bytes) -> None:
        self.layout = layout
        self.own = data[slice(*layout.own)]
        self.sources = [data[start:stop] for start, stop in layout.around]
        self.targets = [data[start:stop] for start, stop in layout.others]

    def copy_in(self, index: int) -> None:
        """Copy all but the own slice into a buffer; local."""
        for target, source in zip(self.layout.views[index].inputs, self.sources, strict=True):
            target[...] = source
