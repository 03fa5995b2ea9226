"""The first message of every collective, through memory that the node's ranks share.

The messages of `backends.handshake`, written to shared memory instead of sent: a barrier carries the fingerprints.
There are two cells for each rank's message, used in turn, since a quick rank writes its next one while a slow rank
still reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..call import Call
from ..handshake import HEADER_BYTES, MESSAGE_BYTES, Handshake
from .barrier import NodeBarrier
from .segment import PAGE, Segment

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NodeHandshake"]

_CELLS = (256, 512)
"""Where in each rank's page its two cells lie: on cache lines that the barrier does not use."""
_ADDRESS = HEADER_BYTES // 8
"""The word of a message that names the address of a symmetric tensor: the first of the payload."""


class NodeHandshake(Handshake):
    """The messages of one rank in a group that lies on one node.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator; the order of its ranks is that of the segment's regions.
        segment: Shared memory with a page for each rank.
        barrier: The barrier on that segment.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, segment: Segment, barrier: NodeBarrier) -> None:
        super().__init__(mpi, comm, oversubscribed=False)
        self._barrier = barrier
        pages = np.frombuffer(segment.memory, dtype=np.uint8).reshape(len(segment.regions), -1)[:, :PAGE]
        self._theirs = [pages[:, cell : cell + MESSAGE_BYTES] for cell in _CELLS]
        own = segment.regions[segment.own]
        self._mine = [own[cell : cell + MESSAGE_BYTES].data for cell in _CELLS]
        self._copy = self._all.numpy()
        self._words = memoryview(segment.memory).cast("q")
        starts = range(0, len(self._words), segment.region_bytes // 8)
        self._heads = [[start + cell // 8 for start in starts] for cell in _CELLS]
        self._own_head = [heads[segment.own] for heads in self._heads]

    def meet(self, call: Call, address: int) -> bool:
        """Compare the call and the address of its tensor with those of the other ranks; collective.

        Returns:
            Whether all ranks have named the same address.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        words, cell, key = self._words, self._barrier.count & 1, call.key
        own = self._own_head[cell]
        words[own] = key
        words[own + _ADDRESS] = address
        self._barrier.wait(call)
        same = True
        for head in self._heads[cell]:
            if words[head] != key:
                raise self._mismatch(call)
            if words[head + _ADDRESS] != address:
                same = False
        return same

    def _exchange(self, call: Call, out: list[Any]) -> None:
        cell = self._barrier.count & 1
        self._mine[cell][:] = out[0]
        self._barrier.wait(call)
        self._copy[...] = self._theirs[cell]
