"""The first message of every collective, through memory that the node's ranks share.

Each rank shows 128 bytes to all others:

    | fingerprint of the call, 8 bytes | a size, 8 bytes | payload, up to 112 bytes |

A barrier carries the fingerprints: ranks that made different calls see it at once, whatever they called. Data that
fits into the payload needs nothing further. There are two cells for each rank's message, used in turn, since a
quick rank writes its next one while a slow rank still reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ..call import Call
from ..handshake import PAYLOAD_BYTES, mismatch
from ..tuning import MAX_PLANS
from .barrier import NodeBarrier
from .segment import PAGE, Segment

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NodeHandshake"]

HEADER_BYTES = 16
MESSAGE_BYTES = HEADER_BYTES + PAYLOAD_BYTES
_CELLS = (256, 512)
"""Where in each rank's page its two cells lie: on cache lines that the barrier does not use."""
_ADDRESS = HEADER_BYTES // 8
"""The word of a message that names the address of a symmetric tensor: the first of the payload."""


class NodeHandshake:
    """The messages of one rank in a group that lies on one node.

    Args:
        comm: The group's communicator; the order of its ranks is that of the segment's regions.
        segment: Shared memory with a page for each rank.
        barrier: The barrier on that segment.

    Attributes:
        own_words: The payload of the own message as 14 integers.
        words: [ranks, 14] the payloads that came with the last exchange, as integers.
    """

    def __init__(self, comm: MPI.Intracomm, segment: Segment, barrier: NodeBarrier) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside of it
            self._own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            self._all = torch.zeros(self.size, MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        self._header = self._own.numpy().view(np.int64)
        words = self._all.numpy().view(np.int64)
        self._keys, self._extras = words[:, 0], words[:, 1]
        self.own_words = self._own[HEADER_BYTES:].numpy().view(np.int64)
        self.words = words[:, HEADER_BYTES // 8 :]
        self._message = self._own.numpy().data
        self._views: BoundedCache[Any, tuple[Tensor, list[Tensor]]] = BoundedCache(MAX_PLANS)
        self._barrier = barrier
        pages = np.frombuffer(segment.memory, dtype=np.uint8).reshape(len(segment.regions), -1)[:, :PAGE]
        self._theirs = [pages[:, cell : cell + MESSAGE_BYTES] for cell in _CELLS]
        own = segment.regions[segment.own]
        self._mine = [own[cell : cell + MESSAGE_BYTES].data for cell in _CELLS]
        self._copy = self._all.numpy()
        self._shared = memoryview(segment.memory).cast("q")
        starts = range(0, len(self._shared), segment.region_bytes // 8)
        self._heads = [[start + cell // 8 for start in starts] for cell in _CELLS]
        self._own_head = [heads[segment.own] for heads in self._heads]

    @property
    def own_payload(self) -> Tensor:
        """The payload of the own message, 112 bytes."""
        return self._own[HEADER_BYTES:]

    @property
    def payloads(self) -> Tensor:
        """The payloads that came with the last exchange, [ranks, 112] bytes."""
        return self._all[:, HEADER_BYTES:]

    def meet(self, call: Call, address: int) -> bool:
        """Compare the call and the address of its tensor with those of the other ranks; collective.

        Returns:
            Whether all ranks have named the same address.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        words, cell, key = self._shared, self._barrier.count & 1, call.key
        own = self._own_head[cell]
        words[own] = key
        words[own + _ADDRESS] = address
        self._barrier.wait(call)
        same = True
        for head in self._heads[cell]:
            if words[head] != key:
                raise mismatch(self._comm, call)
            if words[head + _ADDRESS] != address:
                same = False
        return same

    def agree(self, call: Call, extra: int = 0) -> list[int]:
        """Exchange the messages; return every rank's `extra`. Collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        self._header[0] = call.key
        self._header[1] = extra
        self._exchange(call)
        extras: list[int] = self._extras.tolist()
        return extras

    def views(self, call: Call) -> tuple[Tensor, list[Tensor]]:
        """Return the own payload and those of all ranks as tensors of the call's dtype and shape; local."""
        key = (call.dtype, call.shape)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):
                views = _payload(self._own, call), [_payload(message, call) for message in self._all]
            self._views.add(key, views)
        return views

    def _exchange(self, call: Call) -> None:
        """Show the own message to all ranks and copy theirs; collective."""
        cell = self._barrier.count & 1
        self._mine[cell][:] = self._message
        self._barrier.wait(call)
        self._copy[...] = self._theirs[cell]
        if self._keys.tolist().count(call.key) != self.size:
            raise mismatch(self._comm, call)


def _payload(message: Tensor, call: Call) -> Tensor:
    assert call.dtype is not None
    return message[HEADER_BYTES : HEADER_BYTES + call.nbytes].view(call.dtype).view(call.shape)
