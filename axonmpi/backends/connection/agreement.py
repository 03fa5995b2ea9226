"""The agreement of all ranks before a collective moves data: the same call, the same address, a number of each.

On a node every rank writes its words into a cell of shared memory, and a barrier shows them to all. Between nodes
the rank with local rank 0 takes the node's words through `Rounds`, then a second barrier shows the outcome:

    ranks of a node    write cells │ barrier │                            │ barrier │ read the outcome
    local rank 0                             │ rounds: log2(nodes) steps  │

Small data travels along: each rank puts it into its staging buffer before the first barrier. On one node all ranks
read it there after that barrier; between nodes a `Cargo` goes with the rounds.

There are two cells a rank, used in turn, since a quick rank writes its next words while a slow one still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...errors import CollectiveMismatchError
from ...utils.waiting import RequestWaiter
from ..call import Call, mismatch_error
from ..call_site import text_with_site
from .barrier import NodeBarrier
from .rounds import HEADER, Payload, Rounds
from .segment import Segment
from .topology import Integers

_CELLS, _OUTCOME = (256, 512), 768
"""Offsets of the cells and of the outcome in a rank's page, on cache lines that the barrier does not use."""
_NUMBER, _ADDRESS = 1, 2
"""Words of a cell, behind the call's key."""
_TEXT_BYTES = 768


class Cargo(Protocol):
    """Small data of one call on its way between nodes; only local rank 0 of each node handles it."""

    def load(self) -> Payload:
        """Take the data of the ranks of this node, from the buffers that they wrote before the barrier."""

    def unload(self) -> None:
        """Put the result into a buffer of this rank, which the ranks of the node read after the next barrier."""


class Agreement:
    """The agreement of one group's ranks.

    Args:
        comm: The group's communicator.
        waiter: Waits for its messages.
        segment: Shared memory with a page for each rank of the node, in the order of their local ranks.
        barrier: The barrier on that segment.
        rounds: The exchange between nodes; None on one node.
    """

    def __init__(
        self, comm: Any, waiter: RequestWaiter, segment: Segment, barrier: NodeBarrier, rounds: Rounds | None
    ) -> None:
        self._comm, self._waiter, self._barrier, self._rounds = comm, waiter, barrier, rounds
        self._words = memoryview(segment.memory).cast("q")
        starts = range(0, len(self._words), segment.region_bytes // 8)
        self._heads = [[start + cell // 8 for start in starts] for cell in _CELLS]
        self._own = [heads[segment.own] for heads in self._heads]
        self._is_leader = segment.own == 0
        self._are_apart = rounds is not None and rounds.count == comm.Get_size()
        self._outcome = memoryview(segment.memory)[_OUTCOME : _OUTCOME + HEADER.size]

    def agree(
        self, call: Call, number: int = 0, address: int = 0, cargo: Cargo | None = None
    ) -> tuple[int, int, bool]:
        """Return once all ranks have made this call; collective.

        Args:
            call: The call.
            number: Any number of this rank's.
            address: The address of this rank's tensor in shared memory, 0 for an ordinary tensor.
            cargo: Small data to go along between nodes.

        Returns:
            The largest number, the smallest, and whether the ranks of each node have the same address.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        key = call.key
        if self._are_apart and self._rounds is not None:
            outcome = self._rounds.run((key, -key, number, -number, 0), None if cargo is None else cargo.load())
            if cargo is not None:
                cargo.unload()
            return self._checked(call, outcome, address)
        words, cell = self._words, self._barrier.count & 1
        own = self._own[cell]
        words[own], words[own + _NUMBER], words[own + _ADDRESS] = key, number, address
        self._barrier.wait(call)
        if self._rounds is not None:
            return self._between_nodes(self._rounds, call, address, cargo)
        most = least = number
        is_same = True
        for head in self._heads[cell]:
            if words[head] != key:
                raise self._mismatch(call)
            other = words[head + _NUMBER]
            if other != number:
                most, least = max(most, other), min(least, other)
            if words[head + _ADDRESS] != address:
                is_same = False
        return most, least, is_same

    def _between_nodes(
        self, rounds: Rounds, call: Call, address: int, cargo: Cargo | None
    ) -> tuple[int, int, bool]:
        if self._is_leader:
            heads = self._heads[(self._barrier.count - 1) & 1]
            keys, numbers, addresses = ([self._words[head + word] for head in heads] for word in range(3))
            is_ordinary = not address or addresses.count(address) < len(addresses)
            head = (max(keys), -min(keys), max(numbers), -min(numbers), int(is_ordinary))
            HEADER.pack_into(self._outcome, 0, *rounds.run(head, None if cargo is None else cargo.load()))
            if cargo is not None:
                cargo.unload()
        self._barrier.wait(call)
        return self._checked(call, HEADER.unpack_from(self._outcome), address)

    def _checked(self, call: Call, head: tuple[int, ...], address: int) -> tuple[int, int, bool]:
        key, minus_key, most, minus_least, is_ordinary = head
        if key != -minus_key:
            raise self._mismatch(call)
        return most, -minus_least, not is_ordinary or not address

    def numbers(self, own: int) -> Sequence[int] | Integers:
        """Return the numbers of all ranks in the agreement that has just been reached; collective."""
        if self._rounds is None:
            return [self._words[head + _NUMBER] for head in self._heads[(self._barrier.count - 1) & 1]]
        numbers = np.empty(self._comm.Get_size(), np.int64)
        self._waiter.wait(self._comm.Iallgather(np.array([own], np.int64), numbers))
        return numbers

    def _mismatch(self, call: Call) -> CollectiveMismatchError:
        """Exchange texts and return the error; collective: all ranks have seen that the calls differ."""
        text = text_with_site(call).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        texts = bytearray(_TEXT_BYTES * self._comm.Get_size())
        self._comm.Allgather(text, texts)
        rows = (texts[i : i + _TEXT_BYTES] for i in range(0, len(texts), _TEXT_BYTES))
        return mismatch_error([row.rstrip(b"\0").decode(errors="replace") for row in rows])
