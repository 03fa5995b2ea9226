"""Which connection the ranks of a group get.

Ranks that share memory (MPI's `COMM_TYPE_SHARED`, not host names) communicate through it;
`AXONMPI_COLLECTIVES=plain` leaves everything to MPI.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from ..launch.settings import adds_in_order, pretended_node, wants_shared_memory
from .connection import Connection, Limits
from .network.agreement import Agreement
from .network.collectives import PlainConnection
from .network.lane import Lane
from .network.lanes import NetworkConnection
from .network.meeting import CELL_BYTES, Meeting, NodeMeeting
from .network.nodes import Integers, nodes_of
from .network.patience import Patience
from .shared.all_reduce import NodeMemory, replicated_bytes
from .shared.arena import Arena
from .shared.barrier import Fence, NodeBarrier
from .shared.collectives import NodeConnection
from .shared.handshake import NodeHandshake
from .shared.segment import PAGE, Segment
from .shared.staging import Staging, line_seconds
from .tuning import (
    BARRIER_SPINS,
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    PIECE_BYTES,
    SLOW_LINE_SECONDS,
    STAGING_BYTES,
)

STRONGLY_ORDERED = frozenset({"x86_64", "AMD64", "i386", "i686"})
"""Processors that keep a process's loads and stores in order for all others, but for a load that passes a store,
which no rank relies on (Intel 64 manual, volume 3, section 9.2; AMD64 manual, volume 2, section 7.2): there a
barrier needs no fence."""

__all__ = ["connect", "node_communicator", "path_of"]


def node_communicator(mpi: Any, comm: Any) -> Any:
    """Make a communicator of the ranks on this rank's node, in the order of `comm`; collective."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    pretended = pretended_node(mpi.COMM_WORLD.rank)
    most = np.array([pretended])
    comm.Allreduce(mpi.IN_PLACE, most, mpi.MAX)  # in lower case it would take a communicator of its own for good
    if not most[0]:
        return node
    part = node.Split(pretended, comm.rank)
    node.Free()
    return part


def connect(mpi: Any, comm: Any, limits: Limits, *, oversubscribed: bool, timeout: float | None) -> Connection:
    """Choose how the ranks of a communicator reach each other and set it up; collective.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        limits: Sizes of pieces and messages.
        oversubscribed: Whether ranks outnumber the cores anywhere.
        timeout: Seconds after which a rank that waits in shared memory gives up; None never does.
    """
    obstacle = ""
    means = _Means(mpi, comm, limits, oversubscribed=oversubscribed)
    if comm.size > 1 and wants_shared_memory():
        node = node_communicator(mpi, comm)
        connection = _through_shared_memory(means, node, timeout)
        if isinstance(connection, Connection):
            return connection
        obstacle = connection
        node.Free()
    agreement = means.agreement(np.arange(comm.size), comm.rank)
    connection = PlainConnection(Meeting(comm, agreement, means.patience, ordered=means.ordered), means.lane(comm))
    connection.obstacle = obstacle
    return connection


@dataclass
class _UsualLimits:
    piece_bytes: int = PIECE_BYTES
    max_message_bytes: int = MAX_MESSAGE_BYTES


def path_of(comm: Any) -> tuple[str, str]:
    """Connect the ranks of a communicator for a moment, to find out how they reach each other; collective.

    Returns:
        The `path` and the `obstacle` of their `Connection`.
    """
    from mpi4py import MPI

    connection = connect(MPI, comm, _UsualLimits(), oversubscribed=True, timeout=None)
    connection.free()
    return connection.path, connection.obstacle


class _Means:
    """What connections between nodes are made of.

    Attributes:
        ordered: Whether sums are taken in the order of the nodes.
    """

    def __init__(self, mpi: Any, comm: Any, limits: Limits, *, oversubscribed: bool) -> None:
        self.mpi, self.comm, self.limits, self.oversubscribed = mpi, comm, limits, oversubscribed
        self.patience, self.ordered = Patience(mpi, oversubscribed=oversubscribed), adds_in_order()

    def agreement(self, peers: Integers, index: int) -> Agreement:
        return Agreement(self.mpi, self.comm, peers, index, self.patience)

    def lane(self, comm: Any) -> Lane:
        return Lane(self.mpi, comm, self.limits, self.patience, ordered=self.ordered)


def _through_shared_memory(means: _Means, node: Any, timeout: float | None) -> Connection | str:
    """Connect ranks of which at least two share a node; else why that cannot be, empty if none do."""
    mpi, comm = means.mpi, means.comm
    nodes = nodes_of(mpi, comm, node)
    if nodes.most == 1:
        return ""
    is_one_node = node.size == comm.size
    control = Segment.create(node, PAGE if is_one_node else CELL_BYTES)
    buffers = Segment.create(node, 2 * _buffer_bytes(node.size)) if is_one_node else control
    problem = next((made for made in (control, buffers) if isinstance(made, str)), None)
    if isinstance(control, Segment) and isinstance(buffers, Segment):
        problem = control.populate(0, control.region_bytes) or buffers.populate(0, buffers.region_bytes)
    if comm.allreduce(problem is not None, mpi.LOR):
        return str(next(text for text in comm.allgather(problem) if text))
    assert isinstance(control, Segment)
    assert isinstance(buffers, Segment)
    fence = None if platform.machine() in STRONGLY_ORDERED else Fence(mpi, node)
    processes, names = zip(*node.allgather((os.getpid(), comm.rank)), strict=True)
    sync = fence.sync if fence else None
    # A probe for any source makes MPICH progress within the node and between nodes; one with a source does so only
    # towards that rank. This communicator carries no messages, so the probe never finds one.
    barrier = NodeBarrier(control, sync, list(processes), list(names), timeout, node.Iprobe)
    release: list[Callable[[], None]] = [node.Free] if fence is None else [fence.free, node.Free]
    arena = Arena(node)
    connection: Connection
    if is_one_node:
        barrier.spins = 0 if means.oversubscribed else BARRIER_SPINS
        handshake = NodeHandshake(comm, control, barrier)
        staging = _staging(comm, barrier, arena, buffers)
        connection = NodeConnection(NodeMemory(handshake, barrier, arena, staging, means.limits), release=release)
    else:
        lane_comm = comm.Split(nodes.place if nodes.place < nodes.lanes else mpi.UNDEFINED, nodes.own)
        lane = means.lane(lane_comm) if nodes.place < nodes.lanes else None
        if lane is not None:
            release.append(lane_comm.Free)
        agreement = means.agreement(nodes.leaders, nodes.own)
        meeting = NodeMeeting(comm, agreement, means.patience, nodes, barrier, control, ordered=means.ordered)
        connection = NetworkConnection(meeting, nodes, barrier, arena, lane, means.limits, release=release)
    connection.fence = sync
    return connection


def _staging(comm: Any, barrier: NodeBarrier, arena: Arena, buffers: Segment) -> Staging:
    """Make the staging of a node's ranks, of many buffers where their caches are far apart; collective."""
    taken = comm.allgather(line_seconds(buffers.regions, buffers.own, barrier))
    if mean(taken) < SLOW_LINE_SECONDS:
        return Staging(buffers.regions)
    size = buffers.region_bytes // 2
    count = max(4, STAGING_BYTES // comm.size // size)
    block = arena.allocate(count * size)
    if isinstance(block, str):  # there is no memory for that many
        return Staging(buffers.regions)
    regions = arena.segments[block.segment].regions
    return Staging([region[block.start : block.start + count * size] for region in regions], count)


def _buffer_bytes(ranks: int) -> int:
    return max(CHUNK_BYTES, replicated_bytes(ranks, symmetric=False))
