"""Collectives for ranks on several nodes.

All agree on the call first, and small data travels with that (`meeting`). Large data goes between nodes by the MPI
library's own collectives, which are posted only then (`lane`):

    PlainConnection      every rank is alone on its node: the group is the lane
    NetworkConnection    the ranks of a node meet in shared memory, and ranks with the same place on their nodes
                         form a lane, which carries its slice of the data: only as many bytes as have to go
                         between nodes, however many ranks a node has

    node 0: ranks 0 1      slice 0: 0 + 1  ─ lane of ranks 0 and 2 ─  2 + 3
    node 1: ranks 2 3      slice 1: 0 + 1  ─ lane of ranks 1 and 3 ─  2 + 3
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ...utils.partition import split_range
from ..buffers import as_bytes, bytes_of, empty
from ..call import Call
from ..concat_view import FlatParts
from ..connection import Connection, target_of
from ..handshake import PAYLOAD_BYTES, Words
from ..reduction import reduce_rows_into
from ..tuning import AGREEMENT_BYTES, MAX_PLANS, WHOLE_BYTES
from .lane import Lane
from .meeting import Meeting
from .nodes import Blocks, Integers, split_array

__all__ = ["BetweenNodes", "PlainConnection"]


class BetweenNodes(Connection):
    """What collectives between nodes have in common: agreement, and all that is complete with it."""

    def __init__(self, rank: int, size: int, meeting: Meeting, **shared: Any) -> None:
        super().__init__(rank, size, **shared)
        self._meeting = meeting
        self._blocks: BoundedCache[int, Blocks] = BoundedCache(MAX_PLANS)
        self._own: BoundedCache[int, Tensor] = BoundedCache(MAX_PLANS)

    def agree(self, call: Call) -> None:
        """Return once all ranks have made this call; collective."""
        self._meeting.agree(call)

    def sizes(self, call: Call, own: int) -> list[int]:
        """Agree on a call and return a number of each rank; collective."""
        most, least, _ = self._meeting.agree(call, own)
        return [most] * self.size if most == least else self._meeting.numbers(own).tolist()

    def words_of_root(self, call: Call, words: Words | None) -> Words:
        """Agree on a call and return 14 integers that its root has; collective."""
        assert call.root is not None
        known = np.zeros(PAYLOAD_BYTES // 8, np.int64) if words is None else words
        self._meeting.copy(call, known.view(np.uint8), call.root)
        return known

    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective."""
        gets_result = call.root in (None, self.rank)
        if not call.numel:
            self._meeting.agree(call)
            return
        if not self._meeting.carries(call):
            self._reduce(call, tensor.view(-1), gets_result=gets_result)
            if gets_result:
                torch.autograd.graph.increment_version(tensor)
            return
        total = self._meeting.reduce(call, tensor)
        if gets_result:
            tensor.copy_(total)

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor of any strides and return the own slice along `dim`; collective."""
        start, stop = split_range(tensor.shape[dim], self.size, self.rank)
        if 0 < call.nbytes <= WHOLE_BYTES and self._meeting.carries(call):
            total = self._meeting.reduce(call, tensor)
            own = self._own.get(call.key)
            if own is None:
                own = self._own.add(call.key, total.narrow(dim, start, stop - start))
            return own.to(tensor.dtype, copy=True, memory_format=torch.contiguous_format)
        moved = (tensor.movedim(dim, 0) if dim else tensor).contiguous()
        result = empty((stop - start, *moved.shape[1:]), tensor.dtype)
        self._meeting.agree(call)
        if call.numel:
            blocks = self._blocks.get(call.key)
            if blocks is None:
                row = moved.nbytes // moved.shape[0]
                blocks = self._keep(call, row * split_array(moved.shape[0], self.size))
            self._reduce_scatter(call, moved.view(-1), blocks, result.view(-1))
        return result.movedim(0, dim).contiguous() if dim else result

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        if 0 < call.nbytes <= WHOLE_BYTES and self._meeting.carries(call):
            first = sum(sizes[: self.rank])
            total = self._meeting.reduce(call, parts.line().view(call.shape)).view(-1)
            output.copy_(total[first : first + sizes[self.rank]])
            return
        self._meeting.agree(call)
        if call.numel:
            itemsize = parts.dtype.itemsize
            blocks = self._blocks.get(call.key) or self._keep(call, itemsize * np.asarray(sizes, np.int64))
            self._reduce_scatter(call, parts.line(), blocks, output)

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        if flat.nbytes <= AGREEMENT_BYTES:
            self._meeting.copy(call, bytes_of(flat), call.root)
            return
        self._meeting.agree(call)
        self._broadcast(call, flat, call.root)

    def all_gather(self, call: Call, own: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the blocks of all ranks, one after the other along dim 0; collective. See `Connection`."""
        rows = own.shape[0]
        if own.nbytes and self._meeting.has_room(own.nbytes):
            gathered = self._meeting.gather(call, own)
            if gathered is not None:
                return gathered if output is None else target_of(output, len(gathered), own).copy_(gathered)
            is_same = False
        else:
            most, least, _ = self._meeting.agree(call, rows)
            is_same = most == least
        counts = None if is_same else self._meeting.numbers(rows)
        total = self.size * rows if counts is None else int(counts.sum())
        result = target_of(output, total, own)
        if result.numel():
            row = result.nbytes // total
            blocks = Blocks.equal(self.size, row * rows) if counts is None else Blocks(row * counts)
            self._all_gather(call, own, blocks, result)
        return result

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks into the memory of each node; None: the own part is there; collective."""
        self._meeting.agree(call)
        blocks = self._blocks.get(call.key) or self._keep(call, output.itemsize * np.asarray(sizes, np.int64))
        if tensor is not None:
            low, high = (edge // output.itemsize for edge in blocks.bounds(self.rank))
            output[low:high].copy_(tensor)
        if output.numel():
            self._fill(call, blocks, as_bytes(output))

    def _keep(self, call: Call, sizes: Integers) -> Blocks:
        return self._blocks.add(call.key, Blocks(sizes))

    # ---- large data, after all have agreed; collective -------------------------------------------------------

    @abstractmethod
    def _reduce(self, call: Call, flat: Tensor, *, gets_result: bool) -> None:
        """Agree, and reduce, in place where this rank gets the result."""

    @abstractmethod
    def _reduce_scatter(self, call: Call, flat: Tensor, blocks: Blocks, output: Tensor) -> None:
        """Reduce, this rank's block into `output`."""

    @abstractmethod
    def _broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        """Copy a root's data."""

    @abstractmethod
    def _all_gather(self, call: Call, own: Tensor, blocks: Blocks, result: Tensor) -> None:
        """Put all blocks into `result`."""

    @abstractmethod
    def _fill(self, call: Call, blocks: Blocks, output: Tensor) -> None:
        """Put all blocks into memory that the ranks of a node have in common, where the own one is already."""


class PlainConnection(BetweenNodes):
    """Moves data between ranks of which every one is alone on its node, or cannot share memory.

    Args:
        meeting: Where they agree.
        lane: All of them.
    """

    path = "plain"

    def __init__(self, meeting: Meeting, lane: Lane) -> None:
        super().__init__(lane.index, lane.size, meeting)
        self._lane = lane

    def _reduce(self, call: Call, flat: Tensor, *, gets_result: bool) -> None:
        self._meeting.agree(call)
        assert call.op is not None
        total = flat if call.root is None else flat.clone()
        self._lane.all_reduce(total, call.op, self.size)
        if gets_result and total is not flat:
            flat.copy_(total)

    def _reduce_scatter(self, call: Call, flat: Tensor, blocks: Blocks, output: Tensor) -> None:
        assert call.op is not None
        lane, dtype = self._lane, flat.dtype
        if lane.reduces(call.op, flat):
            lane.reduce_scatter(flat, blocks, output, call.op)
            return
        step = lane.step(self.size, dtype.itemsize)
        if blocks.are_equal and blocks.longest <= step:
            rows = lane.buffer("received", flat.numel(), dtype)
            lane.all_to_all(flat, rows)
            reduce_rows_into(rows.view(self.size, -1), call.op, output)
            return
        data = as_bytes(flat).numpy()
        first_byte, last_byte = blocks.bounds(self.rank)
        own = last_byte - first_byte
        for low in range(0, blocks.longest, step):
            width = min(step, blocks.longest - low)
            packed, taken = (lane.rows(name, self.size, width) for name in ("packed", "received"))
            for ranks, part in blocks.columns(data, low, low + width):
                packed[ranks, : part.shape[1]] = part
            lane.all_to_all(torch.from_numpy(packed), torch.from_numpy(taken))
            if low < own:
                first, last = low // dtype.itemsize, min(low + width, own) // dtype.itemsize
                rows = torch.from_numpy(taken).view(dtype)
                reduce_rows_into(rows[:, : last - first], call.op, output[first:last])

    def _broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        self._lane.broadcast(flat, root)

    def _all_gather(self, call: Call, own: Tensor | None, blocks: Blocks, result: Tensor) -> None:
        if blocks.are_equal:
            self._lane.all_gather(result, own)
        else:
            self._lane.all_gather_uneven(result, blocks.sizes, own)

    def _fill(self, call: Call, blocks: Blocks, output: Tensor) -> None:
        self._all_gather(call, None, blocks, output)

    def free(self) -> None:
        """Release scratch memory; local."""
        self._lane.clear()
