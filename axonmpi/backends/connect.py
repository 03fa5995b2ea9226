"""Which way a group's data takes (layer 2).

Ranks that share memory (MPI's `COMM_TYPE_SHARED`, not host names) communicate through it; `AXONMPI_COLLECTIVES=plain`
leaves everything to MPI.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import environment
from .mpi_slots import SlotExchange
from .node_barrier import Fence, NodeBarrier
from .node_paths import NodePaths
from .node_slots import NodeSlots
from .plain_paths import Limits, Paths, PlainPaths
from .shared_memory import PAGE, Arena, Segment

if TYPE_CHECKING:
    from mpi4py import MPI

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
    control = Segment.create(node, PAGE)
    if isinstance(control, str):
        return None
    problem = control.populate(0, PAGE)
    if any(node.allgather(problem)):
        return None
    fence = Fence(mpi, node)
    processes, names = zip(*node.allgather((os.getpid(), comm.rank)), strict=True)
    barrier = NodeBarrier(control, fence.sync, list(processes), list(names), timeout)
    slots = NodeSlots(mpi, comm, control, barrier)
    return Connection("node", slots, NodePaths(slots, barrier, Arena(node), limits, release=[fence.free, node.Free]))
