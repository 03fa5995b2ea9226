"""Messages between nodes (layer 2).

Ranks with the same place on their nodes form a lane. What is under way lies in memory of the lane's own, so
that it can go on while the ranks already fill and empty the memory that they share.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .node_scratch import round_down

__all__ = ["COPIES", "RESULTS", "SUMS", "YIELDS", "Inbox", "Lane", "Nodes", "wait_gently"]

_NEVER_SENT, SUMS, RESULTS, COPIES = range(4)
YIELDS = 10
"""How often a rank gives way before it naps: beside a thread that computes, a nap is over sooner."""
_AHEAD = 8
_NAP_SECONDS = 1e-4


@dataclass(frozen=True)
class Nodes:
    """Where the ranks of a group are.

    Attributes:
        of: [nodes] the group's ranks on each node, in order; nodes are ordered by their lowest rank.
        own: This rank's node.
        place: This rank's place on its node.
    """

    of: tuple[tuple[int, ...], ...]
    own: int
    place: int

    @property
    def lanes(self) -> int:
        """How many lanes there are: as many as the smallest node has ranks."""
        return min(map(len, self.of))

    @property
    def carried(self) -> list[list[int]]:
        """[lanes] the ranks whose blocks a lane carries: those at places l, l + lanes, ... of each node."""
        return [[rank for node in self.of for rank in node[lane :: self.lanes]] for lane in range(self.lanes)]

    def find(self, rank: int) -> tuple[int, int]:
        """Return the node of a rank and its place there."""
        node = next(node for node, ranks in enumerate(self.of) if rank in ranks)
        return node, self.of[node].index(rank)


def wait_gently(request: Any) -> None:
    """Wait for an MPI request, asleep most of the time."""
    for _ in range(YIELDS):
        if request.Test():
            return
        os.sched_yield()
    while not request.Test():
        time.sleep(_NAP_SECONDS)


class Lane:
    """The ranks with the same place on all nodes, in the order of the nodes; messages between them.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Their communicator.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._free: dict[int, list[Tensor]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def buffer(self, nbytes: int) -> Tensor:
        """Take [nbytes] uint8 of memory for a message."""
        size = round_down(nbytes + 4095, 4096)
        free = self._free.setdefault(size, [])
        with torch.inference_mode(False):
            return (free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu"))[:nbytes]

    def give_back(self, memory: Tensor) -> None:
        """Return memory from `buffer` that nothing uses any more."""
        whole = round_down(memory.numel() + 4095, 4096)
        with torch.inference_mode(False):
            self._free.setdefault(whole, []).append(memory.as_strided((whole,), (1,), 0))

    def send(self, memory: Tensor, node: int, tag: int) -> None:
        """Begin to send; the memory is given back when it is through."""
        self._sent.append((self._comm.Isend(self._spec(memory), node, tag), memory))
        while self._sent and self._sent[0][0].Test():
            self._end_oldest()

    def receive(self, nbytes: int, node: int, tag: int) -> tuple[Any, Tensor]:
        """Begin to receive; returns the request and the memory."""
        memory = self.buffer(nbytes)
        return self._comm.Irecv(self._spec(memory), node, tag), memory

    def progress(self) -> None:
        """Let MPI move what is under way: it does so only when it is called."""
        self._comm.Iprobe(self._mpi.ANY_SOURCE, _NEVER_SENT)

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            wait_gently(self._sent[0][0])
            self._end_oldest()

    def _end_oldest(self) -> None:
        self.give_back(self._sent.popleft()[1])

    def _spec(self, memory: Tensor) -> list[Any]:
        return [self._mpi.buffer.fromaddress(memory.data_ptr(), memory.nbytes), memory.nbytes, self._mpi.BYTE]

    def free(self) -> None:
        """Release the communicator; collective over the lane."""
        self._comm.Free()


class Inbox:
    """Messages of one kind from one neighbour, a chunk each, received ahead of their use."""

    def __init__(self, lane: Lane, node: int, tag: int, sizes: Sequence[int]) -> None:
        self._lane, self._node, self._tag = lane, node, tag
        self._sizes = deque(sizes)
        self._posted: deque[tuple[Any, Tensor]] = deque()
        for _ in range(_AHEAD):
            self._post()

    def _post(self) -> None:
        if self._sizes:
            self._posted.append(self._lane.receive(self._sizes.popleft(), self._node, self._tag))

    def take(self) -> Tensor:
        """Wait for the next message; the memory is the lane's, to be given back."""
        request, memory = self._posted.popleft()
        wait_gently(request)
        self._post()
        return memory
