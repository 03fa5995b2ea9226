"""A pretended world: a few real ranks on one node, and stand-ins of communicators that claim many more nodes.

    MPI.COMM_WORLD  →  PretendedComm: 16,384 ranks on 513 nodes, of which 2 are there
       Split_type   →  the real communicator of the real ranks
       Split        →  PretendedComm of the ranks that a group or a lane would have

The ranks that are not there answer at once, as equals of the one that asks: the same call, the same values, and the
places that are claimed. So all of the real code runs, and what it costs beside MPI shows at any number of ranks.
What the stand-ins themselves take is in `Account`, to be subtracted. They cannot show MPI's own memory and time,
the network's, or whether messages and collectives would match, and results are meaningless.
"""

from __future__ import annotations

import functools
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from axonmpi.backends import MpiBackend
from axonmpi.backends.call import Call
from axonmpi.backends.connection import connection
from axonmpi.backends.connection.rounds import Rounds
from axonmpi.backends.ranks import Parts
from axonmpi.launch import exit as exits
from axonmpi.launch import start
from axonmpi.launch.start import start_mpi

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
"""Variables in which launchers tell the number of ranks."""


@dataclass
class Account:
    """What the stand-ins of this process have taken.

    Attributes:
        seconds: Time.
        nbytes: Memory that they have kept, where it is traced.
        unseen: Seconds of each call of theirs that are spent outside of what it measures.
    """

    seconds: float = 0.0
    nbytes: int = 0
    unseen: float = 0.0


account = Account()


def own(method: Callable[..., Any]) -> Callable[..., Any]:
    """Put what a stand-in's method takes to its account."""

    @functools.wraps(method)
    def accounted(*args: Any, **kwargs: Any) -> Any:
        before = tracemalloc.get_traced_memory()[0]
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            account.seconds += time.perf_counter() - began + account.unseen
            account.nbytes += tracemalloc.get_traced_memory()[0] - before

    return accounted


@own
def _nothing() -> None:
    """Do nothing, to see what accounting takes."""


def _unseen_seconds(calls: int = 1000) -> float:
    """Return how long a call takes that is not in its account."""
    seconds, began = account.seconds, time.perf_counter()
    for _ in range(calls):
        _nothing()
    return (time.perf_counter() - began - (account.seconds - seconds)) / calls


account.unseen = min(_unseen_seconds() for _ in range(5))


class PretendedComm:
    """A communicator that claims more ranks than there are.

    Args:
        mpi: The module `mpi4py.MPI`.
        real: The communicator of those that are there.
        node_of: [ranks of the world] the node of each.
        members: [ranks] the numbers in the world of the ranks of this one.
        rank: This rank's number among them.

    Attributes:
        head: What this rank's rounds send next, where it has one.
        parts: What the ranks are divided into, while they are.
    """

    head: Any = None
    parts: Parts | None = None

    def __init__(self, mpi: Any, real: Any, node_of: np.ndarray, members: np.ndarray, rank: int) -> None:
        self._mpi, self.real, self.size, self.rank = mpi, real, len(members), rank
        self._node_of, self._members = node_of, members
        self._receiving: Any = None

    def Get_size(self) -> int:
        return self.size

    def Get_rank(self) -> int:
        return self.rank

    # ---- making communicators --------------------------------------------------------------------------------

    @own
    def Dup(self) -> PretendedComm:
        return PretendedComm(self._mpi, self.real, self._node_of, self._members, self.rank)

    @own
    def Split_type(self, kind: int, key: int = 0) -> Any:
        return self.real.Split_type(kind, key)

    @own
    def Split(self, color: int, key: int) -> Any:
        real = self.real.Split(color, key)
        if color == self._mpi.UNDEFINED:
            return real
        # Without parts this makes a lane: of each node the rank that has this place there.
        chosen = np.flatnonzero(self._places()[1] == color) if self.parts is None else self.parts.array(color)
        return PretendedComm(self._mpi, real, self._node_of, self._members[chosen], key)

    def Free(self) -> None:
        """Release nothing: real communicators are shared with others, and are few."""

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest rank on each one's node, and each one's place there."""
        nodes, lowest, counts = np.unique(self._node_of[self._members], return_index=True, return_counts=True)
        of = np.searchsorted(nodes, self._node_of[self._members])
        order, place = np.argsort(of, kind="stable"), np.empty(self.size, np.int64)
        place[order] = np.arange(self.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return lowest[of], place

    # ---- collectives of set-up -------------------------------------------------------------------------------

    @own
    def Allgather(self, sent: Any, received: Any) -> None:
        """Answer what `Topology.shared` asks for; nothing in a lane."""
        if sent is not self._mpi.IN_PLACE:
            received[0][:, 0], received[0][:, 1] = self._places()

    @own
    def Exscan(self, sent: Any, received: Any, op: Any) -> None:
        """Leave 0: there are no nodes below the own one."""

    @own
    def Allreduce(self, sent: Any, received: Any, op: Any) -> None:
        """Count the nodes; elsewhere all others have what this rank has, as in a lane."""
        if sent is not self._mpi.IN_PLACE:
            received[0] = len(np.unique(self._node_of[self._members]))

    @own
    def allreduce(self, value: Any, op: Any) -> Any:
        return value

    @own
    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    @own
    def sendrecv(self, sent: Any, dest: int, sendtag: int, source: int, recvtag: int) -> Any:
        """Answer for the next nodes: they have the address of this one."""
        return sent

    # ---- the agreement's messages ----------------------------------------------------------------------------

    @own
    def Irecv(self, spec: Any, source: int, tag: int) -> Any:
        self._receiving = spec[0]
        spec[0][: len(self.head)] = self.head
        return self._mpi.REQUEST_NULL

    @own
    def Isend(self, spec: Any, target: int, tag: int) -> Any:
        if self._receiving is not None:
            self._receiving[: spec[1]] = spec[0][: spec[1]]
            self._receiving = None
        return self._mpi.REQUEST_NULL

    # ---- collectives of lanes, which have no result ----------------------------------------------------------

    @own
    def Bcast(self, data: Any, root: int = 0) -> None:
        self.real.Bcast(data)

    @own
    def _nothing(self, *arguments: Any) -> Any:
        return self._mpi.REQUEST_NULL

    Iallreduce = Ialltoall = Ialltoallv = Iallgather = Iallgatherv = Ibcast = _nothing
    Alltoall = Alltoallv = Allgatherv = _nothing


class _HeardRounds(Rounds):
    """Rounds whose next message their stand-in knows."""

    def __init__(self, mpi: Any, comm: Any, *others: Any) -> None:
        super().__init__(mpi, comm, *others)
        comm.head = self._out[0][:1024]  # with small sums


def _divide(self: MpiBackend, call: Call, parts: Parts) -> Any:
    """Tell the stand-in what its ranks are divided into."""
    self.mpi_comm.parts = parts  # type: ignore[attr-defined]
    try:
        return _divide_really(self, call, parts)
    finally:
        del self.mpi_comm.parts


_divide_really = MpiBackend._divide


@contextmanager
def pretended_world(sizes: list[int]) -> Iterator[None]:
    """Let worlds that are made within the context have nodes of so many ranks, the first of them the real one."""
    mpi = start_mpi()
    real = mpi.COMM_WORLD
    exits.set_end_communicator(real)  # real ranks wait for each other at the end
    node_of = np.repeat(np.arange(len(sizes)), sizes)
    world = PretendedComm(mpi, real, node_of, np.arange(len(node_of)), real.rank)
    claimed = {name: str(world.size) for name in _SIZES if name in os.environ}
    with (
        patch.object(mpi, "COMM_WORLD", world),
        patch.object(start, "_world", world),
        patch.object(connection, "Rounds", _HeardRounds),
        patch.object(MpiBackend, "_divide", _divide),
        patch.dict(os.environ, claimed),
    ):
        yield
