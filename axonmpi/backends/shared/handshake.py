"""The first message of every collective, through memory that the node's ranks share.

The same slots as in `backends.handshake`, written to shared memory instead of sent: a barrier brings the
fingerprints along. There are two places for each slot, used in turn, since a quick rank writes its next one while
a slow rank still reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..call import Call
from ..handshake import HEADER_BYTES, SLOT_BYTES, SlotExchange
from .barrier import NodeBarrier
from .segment import PAGE, Segment

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NodeSlots", "NodeVotes"]

_PLACES = (256, 512)
"""Where in each rank's page its slots lie: on cache lines that the barrier does not use."""
_VOTE = 768
"""Where its votes lie."""
_ADDRESS = HEADER_BYTES // 8
"""The word of a slot that says where a symmetric tensor lies: the first of the payload."""


class NodeSlots(SlotExchange):
    """The slots of one rank in a group that lies on one node.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator; the order of its ranks is that of the segment's regions.
        segment: Shared memory with a page for each rank.
        barrier: The barrier on that segment.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, segment: Segment, barrier: NodeBarrier) -> None:
        super().__init__(mpi, comm, crowded=False)
        self._barrier = barrier
        pages = np.frombuffer(segment.memory, dtype=np.uint8).reshape(len(segment.regions), -1)[:, :PAGE]
        self._theirs = [pages[:, place : place + SLOT_BYTES] for place in _PLACES]
        own = segment.regions[segment.own]
        self._mine = [own[place : place + SLOT_BYTES].data for place in _PLACES]
        self._copy = self._all.numpy()
        self._words = memoryview(segment.memory).cast("q")
        starts = range(0, len(self._words), segment.region_bytes // 8)
        self._heads = [[start + place // 8 for start in starts] for place in _PLACES]
        self._own_head = [heads[segment.own] for heads in self._heads]
        self._vote_words = [start + _VOTE // 8 for start in starts]
        self._own_vote = self._vote_words[segment.own]

    @property
    def place(self) -> int:
        """Which of the two places the next exchange uses, 0 or 1."""
        return self._barrier.count & 1

    @property
    def turn(self) -> int:
        """The number of the next exchange."""
        return self._barrier.count

    def meet(self, call: Call, address: int) -> bool:
        """Compare the call and the place of its tensor with the other ranks'; collective.

        Returns:
            Whether all ranks have named the same address.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        words, place, key = self._words, self._barrier.count & 1, call.key
        own = self._own_head[place]
        words[own] = key
        words[own + _ADDRESS] = address
        self._barrier.wait(call)
        same = True
        for head in self._heads[place]:
            if words[head] != key:
                raise self._mismatch(call)
            if words[head + _ADDRESS] != address:
                same = False
        return same

    def votes(self, which: int) -> NodeVotes:
        """Return the words of vote 0, 1 or 2; local."""
        return NodeVotes(self._words, [word + 2 * which for word in self._vote_words], self._own_vote + 2 * which)

    def _exchange(self, call: Call, out: list[Any]) -> None:
        place = self._barrier.count & 1
        self._mine[place][:] = out[0]
        self._barrier.wait(call)
        self._copy[...] = self._theirs[place]


class NodeVotes:
    """Two numbers of each rank, which the others see after the next barrier.

    Between the barrier after which a rank looks and the next vote lies another barrier: whoever votes anew has seen
    the others look.

    Args:
        words: The node's shared memory.
        places: Where in it each rank has its first number; the second one follows.
        own: Where this rank's lie.
    """

    def __init__(self, words: memoryview, places: list[int], own: int) -> None:
        self._words = words
        self._places = places
        self._own = own

    def vote(self, usual: int, other: int) -> None:
        """Show two numbers to the other ranks after the next barrier; local."""
        self._words[self._own], self._words[self._own + 1] = usual, other

    def votes(self) -> list[tuple[int, int]]:
        """Return what all ranks have shown before the last barrier; local."""
        return [(self._words[place], self._words[place + 1]) for place in self._places]
