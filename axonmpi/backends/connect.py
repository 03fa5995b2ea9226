"""Which way a group's data takes (layer 2).

Ranks that share memory (MPI's `COMM_TYPE_SHARED`, not host names) communicate through it; `AXONMPI_COLLECTIVES=plain`
leaves everything to MPI.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import environment
from .mpi_slots import SlotExchange
from .node_barrier import Fence, NodeBarrier
from .node_paths import NodePaths
from .node_plans import direct_bytes
from .node_slots import NodeSlots
from .plain_paths import Limits, Paths, PlainPaths
from .shared_memory import PAGE, Arena, Segment

if TYPE_CHECKING:
    from mpi4py import MPI

STRONGLY_ORDERED = frozenset({"x86_64", "AMD64", "i386", "i686"})
"""Processors that keep a process's loads and stores in order for all others, but for a load that passes a store, which
no rank relies on (Intel 64 manual, volume 3, section 9.2; AMD64 manual, volume 2, section 7.2): there a barrier needs
no fence."""

__all__ = ["Connection", "connect", "node_communicator"]


@dataclass(frozen=True)
class Connection:
    """How the ranks of a group reach each other.

    Attributes:
        name: `"node"` or `"plain"`.
        slots: Exchanges fingerprints and small data.
        paths: Moves large data.
    """

    name: str
    slots: SlotExchange
    paths: Paths


def node_communicator(mpi: Any, comm: MPI.Intracomm) -> MPI.Intracomm:
    """Make a communicator of the ranks on this rank's node, in the order of `comm`; collective."""
    node: MPI.Intracomm = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    pretended = environment.pretended_node(mpi.COMM_WORLD.rank)
    if not max(node.allgather(pretended)):
        return node
    part: MPI.Intracomm = node.Split(pretended, comm.rank)
    node.Free()
    return part


def connect(mpi: Any, comm: MPI.Intracomm, limits: Limits, *, crowded: bool, timeout: float | None) -> Connection:
    """Choose the way between the ranks of a communicator and set it up; collective.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        limits: Sizes of pieces and messages.
        crowded: Whether ranks outnumber the cores anywhere.
        timeout: Seconds after which a rank that waits in shared memory gives up; None never does.
    """
    if comm.size > 1 and environment.wants_shared_memory():
        node = node_communicator(mpi, comm)
        if node.size == comm.size:
            connection = _on_one_node(mpi, comm, node, limits, timeout)
            if connection is not None:
                return connection
        node.Free()
    slots = SlotExchange(mpi, comm, crowded=crowded)
    return Connection("plain", slots, PlainPaths(mpi, comm, slots, limits))


def _on_one_node(
    mpi: Any, comm: MPI.Intracomm, node: MPI.Intracomm, limits: Limits, timeout: float | None
) -> Connection | None:
    control, direct = Segment.create(node, PAGE), Segment.create(node, 2 * direct_bytes(node.size))
    if isinstance(control, str) or isinstance(direct, str):
        return None
    if any(node.allgather(control.populate(0, PAGE) or direct.populate(0, direct.region_bytes))):
        return None
    fence = None if platform.machine() in STRONGLY_ORDERED else Fence(mpi, node)
    processes, names = zip(*node.allgather((os.getpid(), comm.rank)), strict=True)
    barrier = NodeBarrier(control, fence.sync if fence else None, list(processes), list(names), timeout)
    slots = NodeSlots(mpi, comm, control, barrier)
    release = [node.Free] if fence is None else [fence.free, node.Free]
    paths = NodePaths(slots, barrier, Arena(node), direct, limits, release=release)
    return Connection("node", slots, paths)
