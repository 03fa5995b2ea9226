"""Reduce-scatter: every rank's data is combined element by element, and rank r gets slice r of the result.

    small      up to 16 KiB between nodes: all of it is reduced with the agreement, each rank takes its slice
    in place   a symmetric tensor on one node: each rank reduces its slice in all ranks' memory, without a copy
    chunked    a chunk of each slice at a time goes through staging

On one node a chunk is copied in, and each rank reduces its slice; a rank reads and writes 3·bytes. Between nodes
lane l sums the slices of the ranks that it carries, and exchanges them, (n−1)/n of the bytes for n nodes:

    copy in   all slices into the own buffer, ordered by lane and node
    start     the lane's slices are summed over the node, and start on their way to their nodes
    finish    the slices of this node from all nodes are summed in the order of the nodes
    copy out  the own slice, from the buffer of the lane that has carried it

Source: MPI 4.1, sections 6.10.1 and 6.10.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...utils.partition import split_range, split_sizes
from ..buffers import bytes_of, empty, flat_elements
from ..call import Call
from ..flat_parts import FlatParts
from ..reduction import finish, fold, fold_rows, reduce_in_rank_order, reduce_wide_into, wide_dtype
from ..tuning import SLICE_BYTES, WHOLE_BYTES
from .chunks import ALIGNMENT, bounds_of, round_down, stages_of
from .connection import Connection
from .lane import Flight
from .small import ReductionBetweenNodes
from .topology import Blocks, items_of, rows_in, split_array


def reduce_scatter(ranks: Connection, call: Call, tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's slice along `dim` of the reduced tensor, as a new tensor; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Any strides; cut along `dim` as `torch.tensor_split` does.
        dim: The dimension.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    start, stop = split_range(tensor.shape[dim], ranks.topology.size, ranks.topology.rank)
    if _is_small(ranks, call):
        own = _reduce_small(ranks, call, tensor, (dim, start, stop - start))
        return own.to(tensor.dtype, copy=True, memory_format=torch.contiguous_format)
    # Rows of `dim` are made neighbours in memory, so that a slice is one range of it.
    moved = tensor.movedim(dim, 0) if dim else tensor
    result = empty((stop - start, *moved.shape[1:]), tensor.dtype)
    row = moved.numel() // max(moved.shape[0], 1)
    if ranks.rounds is not None:
        blocks = ranks.plans.get(call.key)
        if blocks is None:
            counts = split_array(moved.shape[0], ranks.topology.size)
            blocks = ranks.plans.add(call.key, Blocks.of(tensor.itemsize * row * counts))
        _reduce_between_nodes(ranks, call, flat_elements(moved), blocks, result.view(-1))
        return result.movedim(0, dim).contiguous() if dim else result
    address = ranks.address(tensor)
    if address and ranks.agreement.agree(call, 0, address)[2]:
        _reduce_in_place(ranks, call, tensor, dim, address, result, start)
    else:
        sizes = [row * count for count in split_sizes(moved.shape[0], ranks.topology.size)]
        parts = FlatParts([moved.contiguous().detach()], tensor.dtype)
        _reduce_on_node(ranks, call, parts, result.view(-1), sizes, is_agreed=bool(address))
    return result.movedim(0, dim).contiguous() if dim else result


def reduce_scatter_into(
    ranks: Connection, call: Call, parts: FlatParts, output: Tensor, sizes: Sequence[int]
) -> None:
    """Reduce data that lies end to end, and put this rank's slice into `output`; collective.

    Args:
        ranks: The group.
        call: The call.
        parts: The data.
        output: [sizes[rank]] contiguous, of the data's dtype or of `wide_dtype`.
        sizes: [ranks] elements of each slice.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    if _is_small(ranks, call):
        start = sum(sizes[: ranks.topology.rank])
        total = _reduce_small(ranks, call, parts.line().view(call.shape)).view(-1)
        output.copy_(total[start : start + output.numel()])
    elif ranks.rounds is None:
        _reduce_on_node(ranks, call, parts, output, sizes, is_agreed=False)
    else:
        itemsize = parts.dtype.itemsize
        blocks = ranks.plans.get(call.key) or ranks.plans.add(call.key, Blocks.of(itemsize * np.asarray(sizes)))
        _reduce_between_nodes(ranks, call, parts.line(), blocks, output)


def _is_small(ranks: Connection, call: Call) -> bool:
    """Return True if all of the data is reduced with the agreement; local."""
    return ranks.rounds is not None and 0 < call.nbytes <= WHOLE_BYTES and ranks.carries(call.dtype, call.nbytes)


def _reduce_small(
    ranks: Connection, call: Call, tensor: Tensor, returned: tuple[int, int, int] | None = None
) -> Tensor:
    """Return the reduction of all data, or a slice, in `wide_dtype`, valid until the next collective; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Any strides.
        returned: The dim, start and length of the slice.
    """
    small: ReductionBetweenNodes | None = ranks.plans.get(call.key)
    if small is None:
        small = ranks.plans.add(call.key, ReductionBetweenNodes(ranks, call, returned))
    return small.run(tensor.contiguous())


def _reduce_in_place(
    ranks: Connection, call: Call, tensor: Tensor, dim: int, address: int, result: Tensor, start: int
) -> None:
    """Reduce the rows from `start` of a symmetric tensor in the memory of all ranks; collective, agreed already."""
    assert ranks.arena is not None
    if result.numel():
        if dim == 0:
            at = address + start * (result.nbytes // result.shape[0])
            parts = [torch.from_numpy(part).view(tensor.dtype) for part in ranks.arena.parts(at, result.nbytes)]
            result = result.view(-1)
        else:
            memory = map(torch.from_numpy, ranks.arena.parts(address, tensor.nbytes))
            views = [part.view(tensor.dtype).view(tensor.shape) for part in memory]
            parts = [view.narrow(dim, start, result.shape[0]).movedim(dim, 0) for view in views]
        step = max(1, SLICE_BYTES * result.shape[0] // result.nbytes)
        for at in range(0, result.shape[0], step):
            reduce_in_rank_order([part[at : at + step] for part in parts], call.op, result[at : at + step])
    ranks.barrier.wait(call)


def _reduce_between_nodes(ranks: Connection, call: Call, flat: Tensor, blocks: Blocks, output: Tensor) -> None:
    """Reduce contiguous data, one block a rank, over several nodes; collective."""
    ranks.agreement.agree(call)
    if not flat.numel():
        return
    lane = ranks.lane
    if lane is not None and ranks.is_apart and not ranks.ordered and lane.adds(call.op, flat):
        lane.complete(lane.reduce_scatter(flat, blocks, output, call.op))
    elif lane is not None and ranks.is_apart and blocks.are_equal and flat.nbytes <= ranks.chunk_bytes:
        lane.complete(lane.exchange_and_reduce(flat, call.op, lane.size, output))
    else:
        _LaneScatter(ranks, call, flat, blocks, output).run()


def _reduce_on_node(
    ranks: Connection, call: Call, parts: FlatParts, output: Tensor, sizes: Sequence[int], *, is_agreed: bool
) -> None:
    op, dtype, rank, staging = call.op, parts.dtype, ranks.topology.rank, ranks.staging
    step = round_down(ranks.chunk_bytes // ranks.topology.size, max(ALIGNMENT, dtype.itemsize))
    count = step // dtype.itemsize
    bounds = bounds_of(sizes)
    own = _apart(parts.view(*bounds[rank]), output)
    slices = [(peer, *bounds[peer]) for peer in range(len(sizes)) if peer != rank or own is None]

    def copy_in(number: int, index: int, now: int) -> None:
        target = staging.buffers[index][rank]
        for peer, low, high in slices:
            start, stop = low + number * count, min(low + (number + 1) * count, high)
            if start < stop:
                parts.read(start, stop, target[peer * step :])

    def reduce(number: int, index: int, now: int) -> None:
        target = output[number * count : (number + 1) * count]
        if target.numel():
            low = rank * step
            views = [*staging.views(index, low, low + target.numel() * dtype.itemsize, dtype)]
            if own is not None:
                views[rank] = own[number * count : (number + 1) * count]
            reduce_wide_into(views, op, target)

    ranks.run_chunks(call, -(-max(sizes) // count), [copy_in, reduce], is_agreed=is_agreed)


def _apart(tensor: Tensor | None, output: Tensor) -> Tensor | None:
    """Return a contiguous tensor unless it shares memory with a contiguous output; local."""
    if tensor is None:
        return None
    first, second = tensor.data_ptr(), output.data_ptr()
    return tensor if first + tensor.nbytes <= second or second + output.nbytes <= first else None


class _LaneScatter:
    """One reduce-scatter by the lanes, a chunk of each block at a time; collective, after the agreement.

    A buffer holds the chunks of all blocks, ordered by lane and node, then the results of the lane for this node.

    Args:
        ranks: The group.
        call: The call.
        flat: This rank's data, contiguous.
        blocks: The block of each rank.
        output: The own block of the result.
    """

    def __init__(self, ranks: Connection, call: Call, flat: Tensor, blocks: Blocks, output: Tensor) -> None:
        self._ranks, self._call, self._op, self._lane = ranks, call, call.op, ranks.lane
        self._topology, self._buffers = ranks.topology, ranks.staging.buffers
        self._data, self._blocks, self._output = bytes_of(flat), blocks, output
        self._dtype, self._wide = flat.dtype, wide_dtype(flat.dtype)
        self._sent = self._dtype if ranks.is_apart else self._wide
        size, most_rows = self._topology.size, int(self._topology.rows_of.max())
        row = size * self._dtype.itemsize + most_rows * self._wide.itemsize
        self._step = max((ranks.chunk_bytes - ALIGNMENT) // row, 1) * self._dtype.itemsize
        self._results_at = -(-size * self._step // ALIGNMENT) * ALIGNMENT
        self._flights: dict[int, tuple[Flight, Tensor]] = {}

    def run(self) -> None:
        """Reduce all chunks."""
        chunks = -(-self._blocks.longest // self._step)
        stages = [self._copy_in, *stages_of(chunks, self._start, self._end), self._copy_out]
        self._ranks.run_chunks(self._call, chunks, stages, is_agreed=True)

    def _width(self, number: int) -> int:
        return int(min(self._step, self._blocks.longest - number * self._step))

    def _copy_in(self, number: int, index: int, now: int) -> None:
        topology, low, width = self._topology, number * self._step, self._width(number)
        mine = self._buffers[index][topology.local_rank][: topology.size * width].reshape(topology.size, width)
        for rows, some, part in rows_in(topology, self._blocks, self._data, low, low + width, 0, topology.size):
            items_of(mine, part.itemsize)[rows] = part[some]

    def _start(self, number: int, index: int, now: int) -> None:
        lane, topology, width = self._lane, self._topology, self._width(number)
        if lane is None:
            return
        counts, first = topology.rows_of[topology.local_rank], int(topology.first_row[topology.local_rank])
        low, high, own = first * width, (first + int(counts.sum())) * width, int(counts[topology.node])
        parts = [torch.from_numpy(buffer[low:high]).view(self._dtype) for buffer in self._buffers[index]]
        total = parts[0]
        if not self._ranks.is_apart:
            total = lane.buffer("total", total.numel(), self._wide, number % 3)
            fold(parts, self._op, total)
        nbytes = width // self._dtype.itemsize * self._sent.itemsize
        received = lane.buffer("received", topology.nodes * own * nbytes, torch.uint8, number % 3).view(self._sent)
        if (counts == own).all():
            steps = lane.all_to_all(total, received)
        else:
            steps = lane.all_to_all_uneven(total, counts * nbytes, received, own * nbytes)
        self._flights[number] = lane.start(steps), received

    def _end(self, number: int, index: int, now: int) -> None:
        if number in self._flights:
            flight, received = self._flights.pop(number)
            flight.finish()
            rows = received.view(self._topology.nodes, -1)
            result = self._results(index, self._topology.local_rank, 0, rows.shape[1])
            fold_rows(rows, self._op, result)
            finish(result, self._op, self._topology.size, result)

    def _copy_out(self, number: int, index: int, now: int) -> None:
        topology, itemsize = self._topology, self._dtype.itemsize
        low, width = number * self._step // itemsize, self._width(number) // itemsize
        target = self._output[low : low + width]
        if target.numel():
            row = topology.local_rank // topology.lanes
            target.copy_(self._results(index, topology.carrier, row * width, target.numel()))

    def _results(self, index: int, lane: int, start: int, numel: int) -> Tensor:
        """Return elements of the results of a lane in a buffer; local."""
        at = self._results_at + start * self._wide.itemsize
        memory = self._buffers[index][lane][at : at + numel * self._wide.itemsize]
        return torch.from_numpy(memory).view(self._wide)
