"""Messages between nodes.

Ranks with the same place on their nodes form a lane. What is under way lies in memory of the lane's own, so
that it can go on while the ranks already fill and empty the memory that they share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...utils.waiting import network_backoff
from ..shared.staging import round_down

__all__ = [
    "COPIES",
    "FIRST_STREAM",
    "RESULTS",
    "STREAM_TAGS",
    "SUMS",
    "Inbox",
    "Lane",
    "Message",
    "Nodes",
    "wait_gently",
]

_NEVER_SENT, SUMS, RESULTS, COPIES = range(4)
FIRST_STREAM, STREAM_TAGS = 1 << 14, 2
_AHEAD = 8


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
    backoff = network_backoff()
    while not request.Test():
        backoff.rest()


class Message:
    """Memory of a lane's own for one message; used again for others of about the size.

    Args:
        mpi: The module `mpi4py.MPI`.
        size: Bytes of memory.

    Attributes:
        nbytes: Bytes of the message.
        spec: What MPI is given.
        request: What MPI has returned for it last.
    """

    __slots__ = ("_memory", "_mpi", "_views", "nbytes", "request", "size", "spec")

    def __init__(self, mpi: Any, size: int) -> None:
        self._mpi = mpi
        self.size = size
        with torch.inference_mode(False):
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._views: dict[torch.dtype, Tensor] = {}
        self.nbytes = -1
        self.spec: list[Any] = [mpi.buffer.fromaddress(self._memory.data_ptr(), size), 0, mpi.BYTE]
        self.request: Any = None

    def fit(self, nbytes: int) -> Message:
        """Make it one of `nbytes` bytes."""
        if nbytes != self.nbytes:
            self.nbytes = self.spec[1] = nbytes
            self._views.clear()
        return self

    def view(self, dtype: torch.dtype) -> Tensor:
        """Return it as a tensor of one dimension."""
        view = self._views.get(dtype)
        if view is None:
            with torch.inference_mode(False):
                view = self._views[dtype] = self._memory[: self.nbytes].view(dtype)
        return view

    def is_through(self) -> bool:
        """Say whether it has been sent, or has come; local."""
        return bool(self.request.Test())


class Lane:
    """The ranks with the same place on all nodes, in the order of the nodes; messages between them.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Their communicator.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._free: dict[int, list[Message]] = {}
        self._sent: deque[Message] = deque()

    @classmethod
    def of(cls, mpi: Any, comm: Any, nodes: Nodes) -> Lane | None:
        """Make the lane that this rank of a group belongs to, None if it has none; collective over the group."""
        has_lane = nodes.place < nodes.lanes
        lane_comm = comm.Split(nodes.place if has_lane else mpi.UNDEFINED, nodes.own)
        return cls(mpi, lane_comm) if has_lane else None

    def message(self, nbytes: int) -> Message:
        """Take memory for a message of `nbytes` bytes."""
        size = round_down(nbytes + 4095, 4096)
        free = self._free.get(size)
        return (free.pop() if free else Message(self._mpi, size)).fit(nbytes)

    def give_back(self, message: Message) -> None:
        """Return memory that nothing uses any more."""
        self._free.setdefault(message.size, []).append(message)

    def send(self, message: Message, node: int, tag: int) -> Message:
        """Begin to send; the memory is given back when it is through, and may only be read until then."""
        message.request = self._comm.Isend(message.spec, node, tag)
        self._sent.append(message)
        while self._sent and self._sent[0].is_through():
            self.give_back(self._sent.popleft())
        return message

    def receive(self, nbytes: int, node: int, tag: int) -> Message:
        """Begin to receive."""
        message = self.message(nbytes)
        message.request = self._comm.Irecv(message.spec, node, tag)
        return message

    def progress(self) -> None:
        """Let MPI move what is under way: it does so only when it is called."""
        self._comm.Iprobe(self._mpi.ANY_SOURCE, _NEVER_SENT)

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            wait_gently(self._sent[0].request)
            self.give_back(self._sent.popleft())

    def free(self) -> None:
        """Release the communicator; collective over the lane."""
        self._comm.Free()


class Inbox:
    """Messages of one kind from one neighbour, a chunk each, received ahead of their use."""

    def __init__(self, lane: Lane, node: int, tag: int, sizes: Sequence[int]) -> None:
        self._lane, self._node, self._tag = lane, node, tag
        self._sizes = deque(sizes)
        self._posted: deque[Message] = deque()
        for _ in range(_AHEAD):
            self._post()

    def _post(self) -> None:
        if self._sizes:
            self._posted.append(self._lane.receive(self._sizes.popleft(), self._node, self._tag))

    def is_ready(self) -> bool:
        """Say whether the next message has come; local."""
        return self._posted[0].is_through()

    def take(self) -> Message:
        """Wait for the next message; the memory is the lane's, to be given back."""
        message = self._posted.popleft()
        wait_gently(message.request)
        self._post()
        return message
