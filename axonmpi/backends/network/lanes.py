"""Large data of groups with several ranks on a node: through memory that they share, and one lane for each slice.

    reduction      copy in │ each lane: sum on the node, then between nodes │ copy out
    all-gather     copy in │ each lane: its rows from all nodes             │ copy out     (│: a barrier of a node)
    broadcast      copy in │ each lane: from the root's node                │ copy out

Data goes in chunks that staging has room for; a symmetric tensor is reduced where it lies. The chunks of a
reduction follow from the call and the placement alone, since MPI's sums depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ..buffers import as_bytes, bytes_of
from ..call import Call
from ..connection import Limits
from ..reduction import reduce_rows_into, reduce_wide_into, wide_dtype
from ..shared.arena import Arena
from ..shared.barrier import NodeBarrier
from ..shared.collectives import SharedConnection
from ..shared.staging import ALIGNMENT, Bytes, round_down, slices_of
from ..tuning import NETWORK_CHUNK_BYTES, PIECE_BYTES
from .collectives import BetweenNodes
from .lane import Lane
from .meeting import NodeMeeting
from .nodes import Blocks, Integers, Nodes

__all__ = ["NetworkConnection"]

Items = np.ndarray[Any, np.dtype[np.void]]
"""One item for each row of a matrix of bytes: picking items takes a fifth of picking rows."""


class NetworkConnection(BetweenNodes, SharedConnection):
    """Moves data between the ranks of a group that lies on several nodes.

    Args:
        meeting: Where all of them agree.
        nodes: Where they are.
        barrier: The barrier of the own node's ranks.
        arena: Memory that they share.
        lane: The ranks at the same place on other nodes; None on ranks without a lane.
        limits: How much goes between nodes at a time.
        release: Called by `free`, in order.
    """

    path = "nodes"

    def __init__(
        self,
        meeting: NodeMeeting,
        nodes: Nodes,
        barrier: NodeBarrier,
        arena: Arena,
        lane: Lane | None,
        limits: Limits,
        *,
        release: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(nodes.rank, nodes.size, meeting, barrier=barrier, arena=arena, release=release)
        self._cells = meeting.cells
        self._nodes, self._lane, self._limits = nodes, lane, limits
        self._staging: tuple[Bytes, Bytes] | None = None

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self._nodes.here

    def free(self) -> None:
        """Release the shared memory; see `SharedConnection`."""
        self._staging = None
        super().free()

    # ---- reductions ---------------------------------------------------------------------------------------

    def _reduce(self, call: Call, flat: Tensor, *, gets_result: bool) -> None:
        address = self._arena.address(flat) if call.root is None else 0
        symmetric = self._meeting.agree(call, 0, address)[2]
        wide = wide_dtype(flat.dtype)
        step = round_down(self._step(call, self._nodes.lanes, 1), ALIGNMENT)
        slices = slices_of(flat.nbytes, self._nodes.lanes, max(ALIGNMENT, flat.itemsize))
        chunks = [
            [(min(low + at, high), min(low + at + step, high)) for low, high in slices]
            for at in range(0, slices[0][1], step)
        ]
        if symmetric:
            rows = self._arena.rows(address, flat.nbytes).view(flat.dtype)
            for chunk in chunks if self._lane is not None else ():
                low, high = (edge // flat.itemsize for edge in chunk[self._nodes.place])
                if low < high:
                    rows[:, low:high] = self._add_up(call, rows[:, low:high], wide)
            self._barrier.wait(call)
            return
        inputs, outputs = self._memory(call)
        data, place = as_bytes(flat).numpy(), self._nodes.place
        for chunk in chunks:
            for lane, (low, high) in enumerate(chunk):
                inputs[place, lane * step : lane * step + high - low] = data[low:high]
            self._barrier.wait(call)
            low, high = chunk[place] if self._lane is not None else (0, 0)
            if low < high:
                parts = torch.from_numpy(inputs[:, place * step : place * step + high - low]).view(flat.dtype)
                result = torch.from_numpy(outputs[place, : high - low]).view(flat.dtype)
                result.copy_(self._add_up(call, parts, wide))
            self._barrier.wait(call)
            for lane, (low, high) in enumerate(chunk if gets_result else ()):
                data[low:high] = outputs[lane, : high - low]

    def _add_up(self, call: Call, parts: Tensor, wide: torch.dtype) -> Tensor:
        """Reduce [ranks of the node, numel] over all nodes; collective over the lane."""
        assert self._lane is not None
        assert call.op is not None
        total = self._lane.buffer("total", parts.shape[1], wide)
        reduce_wide_into(parts.unbind(0), ReduceOp.SUM if call.op is ReduceOp.AVERAGE else call.op, total)
        self._lane.all_reduce(total, call.op, self.size)
        return total

    def _reduce_scatter(self, call: Call, flat: Tensor, blocks: Blocks, output: Tensor) -> None:
        nodes, (inputs, outputs) = self._nodes, self._memory(call)
        data, dtype, wide = as_bytes(flat).numpy(), flat.dtype, wide_dtype(flat.dtype)
        scale = wide.itemsize // dtype.itemsize
        step = self._step(call, max(self.size, scale * int(nodes.rows_of.max())), dtype.itemsize)
        place, (start, stop) = nodes.place, blocks.bounds(self.rank)
        own = stop - start
        for low in range(0, blocks.longest, step):
            width = min(step, blocks.longest - low)
            mine = inputs[place, : self.size * width].reshape(self.size, width)
            for rows, some, part in self._rows_in(data, blocks, low, low + width, 0, self.size):
                _items(mine, part.itemsize)[rows] = part[some]
            self._barrier.wait(call)
            if self._lane is not None:
                self._scatter_chunk(call, inputs, outputs, width, dtype)
            self._barrier.wait(call)
            if low < own:
                count = (min(low + width, own) - low) // dtype.itemsize
                at = place // nodes.lanes * width * scale
                piece = outputs[place % nodes.lanes, at : at + count * wide.itemsize]
                output[low // dtype.itemsize :][:count].copy_(torch.from_numpy(piece).view(wide))

    def _scatter_chunk(self, call: Call, inputs: Bytes, outputs: Bytes, width: int, dtype: torch.dtype) -> None:
        """Reduce the rows that this rank's lane carries, and leave those of this node in its part of `outputs`."""
        assert self._lane is not None
        assert call.op is not None
        lane, nodes, wide = self._lane, self._nodes, wide_dtype(dtype)
        counts = nodes.rows_of[nodes.place]
        first, rows, own = int(nodes.first_row[nodes.place]), int(counts.sum()), int(counts[nodes.own])
        elements = width // dtype.itemsize
        parts = torch.from_numpy(inputs[:, first * width : (first + rows) * width]).view(dtype)
        total = lane.buffer("total", rows * elements, wide)
        op = ReduceOp.SUM if call.op is ReduceOp.AVERAGE else call.op
        reduce_wide_into(parts.unbind(0), op, total)
        received = lane.buffer("received", nodes.count * own * elements, wide)
        if rows == own * nodes.count and (counts == own).all():
            lane.all_to_all(total, received)
        else:
            nbytes = elements * wide.itemsize
            lane.all_to_all_uneven(total, counts * nbytes, received, own * nbytes)
        result = torch.from_numpy(outputs[nodes.place, : own * elements * wide.itemsize]).view(wide)
        reduce_rows_into(received.view(nodes.count, -1), call.op, result, self.size)

    # ---- copies -------------------------------------------------------------------------------------------

    def _broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        data, nodes = as_bytes(flat).numpy(), self._nodes
        node = nodes.find(root)[0]
        for buffers, low, high in self._turns(call, data.nbytes, self._step(call, 1, 1)):
            part = data[low:high]
            slices = slices_of(part.nbytes, nodes.lanes, ALIGNMENT)
            for lane, (first, last) in enumerate(slices if self.rank == root else ()):
                buffers[lane, : last - first] = part[first:last]
            self._barrier.wait(call)
            if self._lane is not None:
                first, last = slices[nodes.place]
                self._lane.broadcast(torch.from_numpy(buffers[nodes.place, : last - first]), node)
            self._barrier.wait(call)
            for lane, (first, last) in enumerate(slices if self.rank != root else ()):
                part[first:last] = buffers[lane, : last - first]

    def _all_gather(self, call: Call, own: Tensor, blocks: Blocks, result: Tensor) -> None:
        target, data, nodes = as_bytes(result).numpy(), bytes_of(own), self._nodes
        carrier, totals = nodes.place % nodes.lanes, nodes.rows_of.sum(axis=1)
        row = int(nodes.row[self.rank] - nodes.first_row[carrier])
        for buffers, low, high in self._turns(call, blocks.longest, self._step(call, int(totals.max()), 1)):
            width = high - low
            at = row * width
            mine = data[low:high]
            buffers[carrier, at : at + mine.nbytes] = mine
            self._barrier.wait(call)
            if self._lane is not None:
                self._swap_rows(buffers[nodes.place, : int(totals[nodes.place]) * width], width)
            self._barrier.wait(call)
            for lane, (first, total) in enumerate(zip(nodes.first_row.tolist(), totals.tolist(), strict=True)):
                matrix = buffers[lane, : total * width].reshape(total, width)
                for rows, some, part in self._rows_in(target, blocks, low, high, first, first + total):
                    part[some] = _items(matrix, part.itemsize)[rows]

    def _fill(self, call: Call, blocks: Blocks, output: Tensor) -> None:
        data, nodes = output.numpy(), self._nodes
        self._barrier.wait(call)  # all ranks of the node have put their own blocks there
        if self._lane is not None:
            counts, first = nodes.rows_of[nodes.place], int(nodes.first_row[nodes.place])
            here, total = int(counts[: nodes.own].sum()), int(counts.sum())
            there = here + int(counts[nodes.own])
            step = self._lane.step(total, 1)
            for low in range(0, blocks.longest, step):
                high = min(low + step, blocks.longest)
                matrix = self._lane.rows("gathered", total, high - low)
                for rows, some, part in self._rows_in(data, blocks, low, high, first + here, first + there):
                    _items(matrix[here:there], part.itemsize)[rows] = part[some]
                self._swap_rows(matrix.reshape(-1), high - low)
                for begin, after in ((0, here), (there, total)):
                    for rows, some, part in self._rows_in(data, blocks, low, high, first + begin, first + after):
                        part[some] = _items(matrix[begin:after], part.itemsize)[rows]
        self._barrier.wait(call)  # before any rank reads what the others have filled in

    def _swap_rows(self, rows: Bytes, width: int) -> None:
        """Fill in the rows of this rank's lane, of which those of this node are there; collective over the lane."""
        assert self._lane is not None
        counts = self._nodes.rows_of[self._nodes.place]
        if (counts == counts[0]).all():
            self._lane.all_gather(torch.from_numpy(rows))
        else:
            self._lane.all_gather_uneven(torch.from_numpy(rows), counts * width)

    def _rows_in(
        self, data: Bytes, blocks: Blocks, low: int, high: int, first: int, last: int
    ) -> Iterator[tuple[Integers | slice, Integers, Items]]:
        """Find bytes `low` to `high` of the blocks that are rows `first` to `last` of all lanes' rows.

        Gives some of these rows, counted from the first, and which of the items that come third they are.
        """
        for ranks, part in blocks.columns(data, low, high):
            items = _items(part, part.shape[1])
            if len(items) == self.size:
                yield slice(None), self._nodes.ranks[first:last], items
                continue
            rows = self._nodes.row[ranks]
            some = np.flatnonzero((rows >= first) & (rows < last))
            yield rows[some] - first, some, items

    # ---- common to them -----------------------------------------------------------------------------------

    def _turns(self, call: Call, nbytes: int, step: int) -> Iterator[tuple[Bytes, int, int]]:
        """Give [ranks of the node, bytes] of staging and a range of so many bytes; staging is used in turn.

        The second half comes last: what comes next may write to the first while slow ranks still read.
        """
        both, starts = self._memory(call), range(0, nbytes, step)
        for number, low in enumerate(starts):
            yield both[(len(starts) - number) % 2], low, min(low + step, nbytes)

    def _step(self, call: Call, rows: int, itemsize: int) -> int:
        """Return how many bytes of each of so many rows go at a time; collective the first time."""
        most = NETWORK_CHUNK_BYTES // PIECE_BYTES * self._limits.piece_bytes
        room: int = self._memory(call)[0].shape[1]
        return max(min(room, most) // rows // itemsize, 1) * itemsize

    def _memory(self, call: Call) -> tuple[Bytes, Bytes]:
        """Return staging for what ranks put in and for results, each [ranks of the node, bytes]; collective."""
        if self._staging is None:
            block = self._arena.allocate(2 * NETWORK_CHUNK_BYTES)
            memory = self._cells if isinstance(block, str) else self._arena.rows_of(block).numpy()
            # A node that is short of memory has smaller buffers, and chunks are the same on all nodes.
            half = self._meeting.agree(call, memory.shape[1] // 2)[1]
            self._staging = memory[:, :half], memory[:, half : 2 * half]
        return self._staging


def _items(matrix: Bytes, width: int) -> Items:
    """Return the first so many bytes of each row as one item, in the same memory."""
    return matrix[:, :width].view(f"V{width}")[:, 0]
