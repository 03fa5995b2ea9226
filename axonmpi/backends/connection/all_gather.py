"""All-gather: the blocks of all ranks are concatenated on every rank, or in memory that the ranks of a node share.

    small      up to a chunk on one node, up to 64 KiB in all between nodes: with the agreement
    in place   symmetric tensors on one node: each rank reads the memory of the others
    chunked    each rank copies a chunk of its block into the buffer of the lane that carries it; lane l gathers the
               blocks of its ranks from all nodes; all copy them out
    alone      ranks that are alone on their nodes: the lane carries the tensors themselves

Between n nodes (n−1)/n of the result goes into each, however many ranks a node has.

Source: MPI 4.1, section 6.7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..buffers import bytes_of, empty
from ..call import Call
from ..tuning import AGREEMENT_BYTES
from .chunks import run_chunks, stages_of
from .connection import Connection
from .lane import Flight, Lane, Steps
from .rounds import Gathered, Payload, Rounds
from .topology import Blocks, Bytes, items_of, rows_in


def all_gather(ranks: Connection, call: Call, tensor: Tensor, dim: int = 0, output: Tensor | None = None) -> Tensor:
    """Return the tensors of all ranks concatenated along a dimension; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Any strides; the ranks may differ in size along `dim` only.
        dim: The dimension.
        output: The memory of the result, contiguous, with `dim` 0; None: new memory.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
        ValueError: `output` has another size.
    """
    # With `dim` first in memory the blocks of the ranks follow each other.
    own = (tensor.movedim(dim, 0) if dim else tensor).contiguous()
    result = _all_gather(ranks, call, own, output)
    return result.movedim(0, dim).contiguous() if dim else result


def _all_gather(ranks: Connection, call: Call, own: Tensor, output: Tensor | None) -> Tensor:
    topology, rows, address = ranks.topology, own.shape[0], ranks.address_of_large(own)
    before, cargo = ranks.buffers_now(), None
    if ranks.rounds is not None and 0 < own.nbytes * topology.nodes * topology.widest <= AGREEMENT_BYTES:
        key = (call.key, rows)
        cargo = ranks.gathers.get(key) or ranks.gathers.add(key, _GatherCargo(ranks, ranks.rounds, own))
        cargo.put(own)
    elif ranks.rounds is None and not address and own.nbytes <= ranks.small_bytes:
        before[topology.local_rank][: own.nbytes] = bytes_of(own)
    most, least, is_same = ranks.agreement.agree(call, rows, address, cargo)
    if cargo is not None and most == least:
        gathered: Tensor = cargo.take()
        return gathered if output is None else _target(output, len(gathered), own).copy_(gathered)
    counts = None if most == least else np.asarray(ranks.agreement.numbers(rows))
    result = _target(output, topology.size * rows if counts is None else int(counts.sum()), own)
    if not result.numel():
        return result
    row = result.nbytes // result.shape[0]
    blocks = Blocks.equal(topology.size, row * rows) if counts is None else Blocks.of(row * counts)
    data = bytes_of(result)
    if ranks.rounds is None and is_same and (address or blocks.longest <= ranks.small_bytes):
        _read_blocks(ranks, call, own, blocks, data, before, address)
    elif ranks.is_apart:
        assert ranks.lane is not None
        sizes = None if counts is None else blocks.sizes
        is_there = _is_there(own, data, blocks.bounds(topology.rank)[0])
        ranks.lane.complete(ranks.lane.all_gather(result, sizes, None if is_there else own))
    else:
        _gather_chunks(ranks, call, own, blocks, data)
    return result


def _target(output: Tensor | None, rows: int, own: Tensor) -> Tensor:
    """Return the memory of blocks with so many rows in all: `output`, or a new tensor; local.

    Raises:
        ValueError: `output` has another number of rows.
    """
    if output is None:
        return empty((rows, *own.shape[1:]), own.dtype)
    if output.shape[0] != rows:
        raise ValueError(f"output: expected {rows} rows, as the ranks have in all, got {output.shape[0]}")
    return output


class _GatherCargo:
    """Blocks of one dtype and shape on their way between nodes; see `agreement.Cargo`."""

    def __init__(self, ranks: Connection, rounds: Rounds, own: Tensor) -> None:
        self._ranks, self._nbytes, self._dtype, self._shape = ranks, own.nbytes, own.dtype, own.shape[1:]
        self._gathered = Gathered(rounds, ranks.topology.widest * own.nbytes)
        self._line = self._gathered.rows.reshape(-1)
        # Ranks that are alone on their nodes use these views: the rows are in the order of the ranks.
        with torch.inference_mode(False):
            self._all = self._tensor(self._line)
            self._own = self._tensor(self._gathered.rows[ranks.topology.node])[: own.shape[0]]

    def _tensor(self, data: Bytes) -> Tensor:
        return torch.from_numpy(data).view(self._dtype).view(-1, *self._shape)

    def put(self, own: Tensor) -> None:
        """Copy this rank's block in; local, before the agreement."""
        if self._ranks.is_apart:
            self._own.copy_(own)
        else:
            self._ranks.buffers_now()[self._ranks.topology.local_rank][: self._nbytes] = bytes_of(own)

    def load(self) -> Payload:
        """Take the blocks of this node."""
        if not self._ranks.is_apart:
            cells = self._gathered.rows[self._ranks.topology.node].reshape(-1, self._nbytes)
            for cell, buffer in zip(cells, self._ranks.buffers_before(), strict=False):
                cell[...] = buffer[: self._nbytes]
        return self._gathered

    def unload(self) -> None:
        """Show the blocks to this node."""
        if not self._ranks.is_apart:
            self._ranks.buffers_now()[0][: self._line.size] = self._line

    def take(self) -> Tensor:
        """Return the blocks of all ranks, one after the other; local, after the agreement."""
        if self._ranks.is_apart:
            return self._all.clone()
        topology = self._ranks.topology
        cells = self._ranks.buffers_before()[0][: self._line.size].reshape(-1, self._nbytes)
        return self._tensor(cells[topology.cells(topology.widest)].reshape(-1))


def _read_blocks(
    ranks: Connection,
    call: Call,
    own: Tensor,
    blocks: Blocks,
    data: Bytes,
    buffers: Sequence[Bytes],
    address: int,
) -> None:
    """Read the blocks of a node in symmetric tensors, or in staging; collective, after the agreement."""
    rank = ranks.topology.rank
    if address:
        assert ranks.arena is not None
        buffers = ranks.arena.parts(address, blocks.longest)
    # The own block first: it may share memory with the block of another rank in the result.
    low, high = blocks.bounds(rank)
    if not _is_there(own, data, low):
        data[low:high] = bytes_of(own)
    for peer, buffer in enumerate(buffers):
        if peer != rank:
            low, high = blocks.bounds(peer)
            data[low:high] = buffer[: high - low]
    if address:
        ranks.barrier.wait(call)


def _is_there(own: Tensor, data: Bytes, low: int) -> bool:
    """Return True if the own block is in its place of the result already, as FSDP2 of torch puts it; local."""
    return own.data_ptr() == data.ctypes.data + low


def _gather_chunks(ranks: Connection, call: Call, own: Tensor, blocks: Blocks, data: Bytes) -> None:
    """Gather a chunk of each block at a time; collective, after the agreement."""
    topology, lane, buffers = ranks.topology, ranks.lane, ranks.staging.buffers
    totals, firsts = topology.rows_of.sum(axis=1).tolist(), topology.first_row.tolist()
    own_row = int(topology.row[topology.rank]) - firsts[topology.carrier]
    source, step = bytes_of(own), max(ranks.chunk_bytes // max(totals), 1)
    flights: dict[int, Flight] = {}

    def width_of(number: int) -> int:
        return int(min(step, blocks.longest - number * step))

    def copy_in(number: int, index: int, now: int) -> None:
        chunk, at = source[number * step : (number + 1) * step], own_row * width_of(number)
        buffers[index][topology.carrier][at : at + chunk.nbytes] = chunk

    def start(number: int, index: int, now: int) -> None:
        if lane is not None:
            memory = buffers[index][topology.local_rank][: totals[topology.local_rank] * width_of(number)]
            flights[number] = lane.start(_swap_rows(ranks, memory, width_of(number)))

    def end(number: int, index: int, now: int) -> None:
        if lane is not None:
            flights.pop(number).finish()

    def copy_out(number: int, index: int, now: int) -> None:
        low, width = number * step, width_of(number)
        for peer, (first, total) in enumerate(zip(firsts, totals, strict=True)):
            matrix = buffers[index][peer][: total * width].reshape(total, width)
            for rows, some, part in rows_in(topology, blocks, data, low, low + width, first, first + total):
                part[some] = items_of(matrix, part.itemsize)[rows]

    chunks = -(-blocks.longest // step)
    middle = [] if ranks.rounds is None else stages_of(chunks, start, end)
    ranks.run_chunks(call, chunks, [copy_in, *middle, copy_out], is_agreed=True)


def _swap_rows(ranks: Connection, rows: Bytes, width: int) -> Steps:
    """Fill the rows of this rank's lane from the other nodes; collective over the lane."""
    assert ranks.lane is not None
    counts = ranks.topology.rows_of[ranks.topology.local_rank]
    return ranks.lane.all_gather(torch.from_numpy(rows), None if (counts == counts[0]).all() else counts * width)


# ---- memory that the ranks of a node share ---------------------------------------------------------------------


def all_gather_into(
    ranks: Connection, call: Call, tensor: Tensor | None, output: Tensor, sizes: Sequence[int]
) -> None:
    """Put the slices of all ranks into memory that the ranks of each node share; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: This rank's slice; None: it is there already.
        output: All slices, end to end.
        sizes: [ranks] elements of each.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    blocks = ranks.plans.get(call.key) or ranks.plans.add(call.key, Blocks.of(output.itemsize * np.asarray(sizes)))
    all_are_there = ranks.agreement.agree(call, int(tensor is None))[1] == 1
    if tensor is not None:
        low, high = (edge // output.itemsize for edge in blocks.bounds(ranks.topology.rank))
        output[low:high].copy_(tensor)
    if ranks.rounds is None:
        if not all_are_there:
            ranks.barrier.wait(call)
    elif output.numel():
        _fill(ranks, call, blocks, output)


def _fill(ranks: Connection, call: Call, blocks: Blocks, output: Tensor) -> None:
    """Fill in the slices of the other nodes; collective, after the agreement."""
    lane = ranks.lane
    if ranks.is_apart:
        assert lane is not None
        lane.complete(lane.all_gather(output, None if blocks.are_equal else blocks.sizes))
        return
    ranks.barrier.wait(call)
    if lane is not None:
        _fill_by_lane(ranks, call, lane, blocks, bytes_of(output))
    ranks.barrier.wait(call)  # before any rank reads the rows of the other lanes


def _fill_by_lane(ranks: Connection, call: Call, lane: Lane, blocks: Blocks, data: Bytes) -> None:
    topology = ranks.topology
    counts, first = topology.rows_of[topology.local_rank], int(topology.first_row[topology.local_rank])
    here, total = int(counts[: topology.node].sum()), int(counts.sum())
    there = here + int(counts[topology.node])
    step = max(ranks.chunk_bytes // total, 1)
    flights: dict[int, Flight] = {}

    def matrix_of(number: int) -> tuple[int, int, Bytes]:
        low = number * step
        high = min(low + step, blocks.longest)
        memory = lane.buffer("gathered", total * (high - low), torch.uint8, number % 2)
        return low, high, memory.numpy().reshape(total, high - low)

    def start(number: int, index: int, now: int) -> None:
        low, high, matrix = matrix_of(number)
        for rows, some, part in rows_in(topology, blocks, data, low, high, first + here, first + there):
            items_of(matrix[here:there], part.itemsize)[rows] = part[some]
        flights[number] = lane.start(_swap_rows(ranks, matrix.reshape(-1), high - low))

    def end(number: int, index: int, now: int) -> None:
        low, high, matrix = matrix_of(number)
        flights.pop(number).finish()
        for begin, after in ((0, here), (there, total)):
            for rows, some, part in rows_in(topology, blocks, data, low, high, first + begin, first + after):
                part[some] = items_of(matrix[begin:after], part.itemsize)[rows]

    run_chunks(None, 1, call, -(-blocks.longest // step), [start, end])
