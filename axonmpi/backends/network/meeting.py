"""How the ranks of a group on several nodes agree on a call, and complete a small one with that.

    Meeting          every rank is alone on its node, and a peer of the agreement
    NodeMeeting      the ranks of a node meet in shared memory, and one of them is the peer

On a node each rank has a cell, its words and its data in it; between two barriers the leader takes what is in the
cells to the other nodes, and puts the result where all ranks of the node find it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.cache import BoundedCache
from ..buffers import bytes_of
from ..call import Call
from ..handshake import mismatch
from ..reduction import reduce_rows_into, reduce_wide_into, wide_dtype
from ..shared.barrier import NodeBarrier
from ..shared.segment import PAGE, Segment
from ..shared.staging import Bytes
from ..tuning import AGREEMENT_BYTES, MAX_PLANS
from .agreement import Agreement, Head, Payload
from .nodes import Integers, Nodes
from .patience import Patience
from .payloads import Copied, Gathered, Summed

__all__ = ["CELL_BYTES", "Meeting", "NodeMeeting"]

_MAX_GATHERS = 8
"""Kinds of small gathers that memory is kept for."""
_WORDS_AT = PAGE
_DATA_AT = PAGE + 64
_RESULT_AT = _DATA_AT + AGREEMENT_BYTES
CELL_BYTES = _RESULT_AT + AGREEMENT_BYTES
"""Shared memory for each rank of a node: the barrier's page, words, data, and the leader's result."""


class Meeting:
    """Where ranks that are alone on their nodes agree.

    Args:
        comm: The group's communicator.
        agreement: The exchange between them.
        patience: How a rank waits.
        ordered: Whether sums are taken in the order of the nodes.
    """

    def __init__(self, comm: Any, agreement: Agreement, patience: Patience, *, ordered: bool) -> None:
        self._comm, self._patience, self._ordered = comm, patience, ordered
        self.agreement = agreement
        self._cells = agreement.count
        self._sums: BoundedCache[int, Summed] = BoundedCache(MAX_PLANS)
        self._gathers: BoundedCache[tuple[int, int], tuple[Gathered, Tensor, Tensor]] = BoundedCache(_MAX_GATHERS)

    def carries(self, call: Call) -> bool:
        """Say whether a reduction goes along with the agreement; local."""
        if call.nbytes > AGREEMENT_BYTES:
            return False
        assert call.dtype is not None
        nbytes = call.numel * wide_dtype(call.dtype).itemsize
        return nbytes * (self.agreement.count if self._ordered else 1) <= AGREEMENT_BYTES

    def has_room(self, nbytes: int) -> bool:
        """Say whether `gather` takes blocks of so many bytes; local."""
        return nbytes * self._cells <= AGREEMENT_BYTES

    def agree(self, call: Call, value: int = 0, address: int = 0) -> tuple[int, int, bool]:
        """Agree on a call; collective.

        Args:
            call: The call.
            value: Any number.
            address: Where this rank's tensor lies in memory that its node shares, 0 if it does not.

        Returns:
            The largest value, the smallest, and whether the ranks of each node have all named one address.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        return self._run(call, (call.key, -call.key, value, -value, 0), None)

    def reduce(self, call: Call, tensor: Tensor) -> Tensor:
        """Reduce what `carries` allows, of any strides; collective.

        The result is valid until the next call; for the same call it always lies in the same memory.
        """
        summed = self._summed(call)
        summed.total.copy_(tensor)
        self._add_up(call, summed)
        return summed.total

    def gather(self, call: Call, own: Tensor) -> Tensor | None:
        """Return the blocks of all ranks end to end, None where their sizes along dim 0 differ; collective."""
        rows = own.shape[0]
        gathered, mine, everything = self._gathers.get((call.key, rows)) or self._prepare(call, own)
        mine.copy_(own)
        most, least, _ = self._run(call, (call.key, -call.key, rows, -rows, 0), gathered)
        return everything.clone() if most == least else None

    def _prepare(self, call: Call, own: Tensor) -> tuple[Gathered, Tensor, Tensor]:
        gathered = Gathered(self.agreement, own.nbytes)
        with torch.inference_mode(False):
            everything = torch.from_numpy(gathered.rows).view(own.dtype).view(-1, *own.shape[1:])
            mine = everything.narrow(0, self.agreement.index * own.shape[0], own.shape[0])
        return self._gathers.add((call.key, own.shape[0]), (gathered, mine, everything))

    def copy(self, call: Call, data: Bytes, root: int) -> None:
        """Copy a root's data to all, untouched where calls differ; collective."""
        here, is_root = self.agreement.outgoing[: data.nbytes], self.agreement.index == root
        if is_root:
            here[...] = data
        self._run(call, (call.key, -call.key, 0, 0, 0), Copied(self.agreement, data.nbytes, root))
        if not is_root:
            data[...] = here

    def numbers(self, own: int) -> Integers:
        """Return a number of each rank, [ranks]; collective, after they have agreed."""
        numbers = np.empty(self._comm.size, np.int64)
        self._patience.wait(self._comm.Iallgather(np.array([own], np.int64), numbers))
        return numbers

    def _summed(self, call: Call) -> Summed:
        found = self._sums.get(call.key)
        return found or self._sums.add(call.key, Summed(self.agreement, call))

    def _add_up(self, call: Call, summed: Summed) -> None:
        """Reduce the nodes' parts; an average is one of all ranks; collective over the peers."""
        head = (call.key, -call.key, 0, 0, 0)
        total = summed.total
        if self._ordered:
            gathered = Gathered(self.agreement, total.nbytes)
            gathered.rows[self.agreement.index] = self.agreement.outgoing[: total.nbytes]
            self._run(call, head, gathered)
            rows = torch.from_numpy(gathered.rows).view(total.dtype)
            reduce_rows_into(rows, summed.op, total.view(-1))
        else:
            self._run(call, head, summed)
        if call.op is ReduceOp.AVERAGE:
            total.div_(self._comm.size)

    def _run(self, call: Call, head: Head, payload: Payload | None) -> tuple[int, int, bool]:
        return self._checked(call, self.agreement.run(head, payload))

    def _checked(self, call: Call, head: tuple[int, ...]) -> tuple[int, int, bool]:
        if head[0] != -head[1]:
            raise mismatch(self._comm, call)
        return head[2], -head[3], not head[4]


class NodeMeeting(Meeting):
    """Where ranks agree of which several are on a node.

    Args:
        comm: The group's communicator.
        agreement: The exchange between the nodes; only the leaders' moves data.
        patience: How a rank waits.
        nodes: Where the ranks are.
        barrier: The barrier of this node's ranks.
        segment: Their cells.
        ordered: Whether sums are taken in the order of the nodes.

    Attributes:
        cells: [ranks of the node, bytes] shared memory, free between two meetings; only the second half of it
            may still be read when the next one begins.
    """

    def __init__(
        self,
        comm: Any,
        agreement: Agreement,
        patience: Patience,
        nodes: Nodes,
        barrier: NodeBarrier,
        segment: Segment,
        *,
        ordered: bool,
    ) -> None:
        super().__init__(comm, agreement, patience, ordered=ordered)
        self._nodes, self._barrier = nodes, barrier
        self._cells = nodes.count * nodes.most
        cells = np.frombuffer(segment.memory, np.uint8).reshape(-1, segment.region_bytes)
        self._words = cells[:, _WORDS_AT : _WORDS_AT + 24].view(np.int64)
        self._data = cells[:, _DATA_AT:_RESULT_AT]
        self._head = cells[0, _WORDS_AT + 24 : _WORDS_AT + 64].view(np.int64)
        self._result = cells[0, _RESULT_AT:CELL_BYTES]
        self._is_leader = nodes.place == 0
        self._places: BoundedCache[int, tuple[Tensor, list[Tensor], Tensor]] = BoundedCache(MAX_PLANS)
        self.cells = cells[:, _DATA_AT:CELL_BYTES]

    def agree(self, call: Call, value: int = 0, address: int = 0) -> tuple[int, int, bool]:
        """See `Meeting.agree`."""
        self._come(call, value, address)
        if self._is_leader:
            self._lead(None)
        return self._leave(call)

    def reduce(self, call: Call, tensor: Tensor) -> Tensor:
        """See `Meeting.reduce`."""
        summed = self._summed(call)
        own, parts, result = self._places.get(call.key) or self._places_of(call, tensor.dtype, summed)
        own.copy_(tensor)
        self._come(call, 0, 0)
        if self._is_leader:
            reduce_wide_into(parts, summed.op, summed.total.view(-1))
            self._add_up(call, summed)
            result.copy_(summed.total)
        self._leave(call)
        return result

    def _places_of(self, call: Call, dtype: torch.dtype, summed: Summed) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return where this rank's part of a reduction lies, those of all for the leader, and the result."""
        with torch.inference_mode(False):
            rows = torch.from_numpy(self._data[:, : call.nbytes]).view(dtype)
            result = torch.from_numpy(self._result[: summed.total.nbytes]).view(summed.total.dtype).view(call.shape)
            own, parts = rows[self._nodes.place].view(call.shape), list(rows) if self._is_leader else []
        return self._places.add(call.key, (own, parts, result))

    def gather(self, call: Call, own: Tensor) -> Tensor | None:
        """See `Meeting.gather`."""
        nodes, nbytes = self._nodes, own.nbytes
        self._data[nodes.place, :nbytes] = bytes_of(own)
        self._come(call, own.shape[0], 0)
        size = nodes.count * nodes.most * nbytes
        if self._is_leader:
            gathered = Gathered(self.agreement, nodes.most * nbytes)
            row = gathered.rows[nodes.own].reshape(nodes.most, nbytes)
            row[: len(nodes.here)] = self._data[:, :nbytes]
            self._lead(gathered)
            self._result[:size] = gathered.rows.reshape(-1)
        most, least, _ = self._leave(call)
        if most != least:
            return None
        rows = self._result[:size].reshape(-1, nbytes)[nodes.cell(nodes.most)]
        return torch.from_numpy(rows.reshape(-1)).view(own.dtype).view(-1, *own.shape[1:])

    def copy(self, call: Call, data: Bytes, root: int) -> None:
        """See `Meeting.copy`."""
        node, place = self._nodes.find(root)
        is_root = (self._nodes.own, self._nodes.place) == (node, place)
        if is_root:
            self._data[place, : data.nbytes] = data
        self._come(call, 0, 0)
        if self._is_leader:
            here = self.agreement.outgoing[: data.nbytes]
            if self._nodes.own == node:
                here[...] = self._data[place, : data.nbytes]
            self._lead(Copied(self.agreement, data.nbytes, node))
            self._result[: data.nbytes] = here
        self._leave(call)
        if not is_root:
            data[...] = self._result[: data.nbytes]

    def _run(self, call: Call, head: Head, payload: Payload | None) -> tuple[int, int, bool]:
        self._lead(payload)  # all ranks of the node look at what it brings when they leave
        return 0, 0, False

    def _come(self, call: Call, value: int, address: int) -> None:
        words = self._words[self._nodes.place]
        words[0], words[1], words[2] = call.key, value, address
        self._barrier.wait(call)

    def _lead(self, payload: Payload | None) -> None:
        words = self._words
        key, value, address = words.max(axis=0).tolist()
        least_key, least_value, least_address = words.min(axis=0).tolist()
        head = (key, -least_key, value, -least_value, int(address != least_address or not address))
        self._head[:] = self.agreement.run(head, payload)

    def _leave(self, call: Call) -> tuple[int, int, bool]:
        self._barrier.wait(call)
        return self._checked(call, tuple(self._head.tolist()))
