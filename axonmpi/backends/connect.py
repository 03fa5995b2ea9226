"""Which way a group's data takes.

Ranks that share memory (MPI's `COMM_TYPE_SHARED`, not host names) communicate through it;
`AXONMPI_COLLECTIVES=plain` leaves everything to MPI.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..launch.settings import pretended_node, wants_shared_memory
from .handshake import SlotExchange
from .network.channels import Lane, Nodes
from .network.collectives import TwoLevelPaths
from .network.memory import SeveralNodes
from .plain import Limits, Paths, PlainPaths
from .shared.all_reduce import medium_bytes
from .shared.barrier import Fence, NodeBarrier
from .shared.collectives import NodePaths
from .shared.handshake import NodeSlots
from .shared.node_memory import NodeMemory, OneNode, OwnMemory
from .shared.room import NodeRoom
from .shared.segment import PAGE, Arena, Segment
from .shared.staging import ALIGNMENT

STRONGLY_ORDERED = frozenset({"x86_64", "AMD64", "i386", "i686"})
"""Processors that keep a process's loads and stores in order for all others, but for a load that passes a store,
which no rank relies on (Intel 64 manual, volume 3, section 9.2; AMD64 manual, volume 2, section 7.2): there a
barrier needs no fence."""
_SPINS = 20
"""Looks of a rank with a core of its own before it gives way: a microsecond or two, in which others mostly come."""
_SPARE_BYTES = 512 << 10
"""What the ranks of a node have together, at least, where there is no memory for anything larger."""

__all__ = ["Connection", "connect", "node_communicator", "path_of"]


@dataclass(frozen=True)
class Connection:
    """How the ranks of a group reach each other.

    Attributes:
        name: `"node"`, `"nodes"` or `"plain"`.
        slots: Exchanges fingerprints and small data.
        paths: Moves large data.
        memory: What ranks of a node have in common.
        obstacle: Why memory cannot be shared, the same on all ranks; empty where it is, or need not be.
        fence: A full memory barrier for memory in common, None where the processor needs none.
    """

    name: str
    slots: SlotExchange
    paths: Paths
    memory: NodeMemory
    obstacle: str = ""
    fence: Callable[[], None] | None = None


def node_communicator(mpi: Any, comm: Any) -> Any:
    """Make a communicator of the ranks on this rank's node, in the order of `comm`; collective."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    pretended = pretended_node(mpi.COMM_WORLD.rank)
    if not comm.allreduce(pretended, mpi.MAX):
        return node
    part = node.Split(pretended, comm.rank)
    node.Free()
    return part


def connect(mpi: Any, comm: Any, limits: Limits, *, crowded: bool, timeout: float | None) -> Connection:
    """Choose the way between the ranks of a communicator and set it up; collective.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        limits: Sizes of pieces and messages.
        crowded: Whether ranks outnumber the cores anywhere.
        timeout: Seconds after which a rank that waits in shared memory gives up; None never does.
    """
    obstacle = ""
    if comm.size > 1 and wants_shared_memory():
        node = node_communicator(mpi, comm)
        connection = _through_shared_memory(mpi, comm, node, limits, crowded, timeout)
        if isinstance(connection, Connection):
            return connection
        obstacle = connection
        node.Free()
    slots = SlotExchange(mpi, comm, crowded=crowded)
    paths = PlainPaths(mpi, comm, slots, limits)
    return Connection("plain", slots, paths, OwnMemory(slots, paths), obstacle)


@dataclass
class _SmallLimits:
    piece_bytes: int = 1 << 20
    max_message_bytes: int = 1 << 20


def path_of(comm: Any) -> tuple[str, str]:
    """Connect the ranks of a communicator for a moment, to find out how they reach each other; collective.

    Returns:
        The `name` and the `obstacle` of their `Connection`.
    """
    from mpi4py import MPI

    connection = connect(MPI, comm, _SmallLimits(), crowded=True, timeout=None)
    connection.paths.free()
    return connection.name, connection.obstacle


def _through_shared_memory(
    mpi: Any, comm: Any, node: Any, limits: Limits, crowded: bool, timeout: float | None
) -> Connection | str:
    """Connect ranks of which at least two share a node; else why that cannot be, empty if none do."""
    nodes = _nodes(comm, node)
    if max(map(len, nodes.of)) == 1:
        return ""
    # Where memory runs short later, it serves as the four scratch buffers: with a line for each part of a chunk.
    parts = max(node.size, *map(len, nodes.carried))
    control = Segment.create(node, PAGE)
    most = _SPARE_BYTES // node.size // PAGE * PAGE
    if node.size == comm.size:
        most = max(most, medium_bytes(node.size))
    direct = Segment.create(node, max(2 * most, 4 * ALIGNMENT * parts))
    problem = next((made for made in (control, direct) if isinstance(made, str)), None)
    if isinstance(control, Segment) and isinstance(direct, Segment):
        problem = control.populate(0, PAGE) or direct.populate(0, direct.region_bytes)
    problems = [text for text in comm.allgather(problem) if text]
    if problems:
        return str(problems[0])
    assert isinstance(control, Segment)
    assert isinstance(direct, Segment)
    fence = None if platform.machine() in STRONGLY_ORDERED else Fence(mpi, node)
    processes, names = zip(*node.allgather((os.getpid(), comm.rank)), strict=True)
    sync = fence.sync if fence else None
    barrier = NodeBarrier(control, sync, list(processes), list(names), timeout)
    release = [node.Free] if fence is None else [fence.free, node.Free]
    if node.size == comm.size:
        barrier.spins = 0 if crowded else _SPINS
        slots = NodeSlots(mpi, comm, control, barrier)
        arena = Arena(node)
        room = NodeRoom(slots, barrier, arena, direct, limits)
        paths = NodePaths(slots, barrier, arena, room, limits, release=release)
        return Connection("node", slots, paths, OneNode(slots, barrier, arena, paths), fence=sync)
    return replace(_between_nodes(mpi, comm, node, nodes, barrier, direct, limits, release), fence=sync)


def _between_nodes(
    mpi: Any,
    comm: Any,
    node: Any,
    nodes: Nodes,
    barrier: NodeBarrier,
    spare: Segment,
    limits: Limits,
    release: list[Callable[[], None]],
) -> Connection:
    has_lane = node.rank < nodes.lanes
    lane_comm = comm.Split(node.rank if has_lane else mpi.UNDEFINED, nodes.own)
    lane = Lane(mpi, lane_comm) if has_lane else None
    # Ranks that wait for a network had better sleep, even with a core to themselves.
    slots = SlotExchange(mpi, comm, crowded=True)
    plain = PlainPaths(mpi, comm, slots, limits)
    release = [*release, lane.free] if lane is not None else release
    arena = Arena(node)
    paths = TwoLevelPaths(slots, plain, nodes, barrier, arena, spare, lane, limits, release=release)
    return Connection("nodes", slots, paths, SeveralNodes(slots, barrier, arena, paths))


def _nodes(comm: Any, node: Any) -> Nodes:
    """Find out where the ranks of a group are; collective."""
    lowest = comm.allgather(node.bcast(comm.rank))
    members = {low: tuple(r for r, other in enumerate(lowest) if other == low) for low in sorted(set(lowest))}
    return Nodes(tuple(members.values()), list(members).index(lowest[comm.rank]), node.rank)
