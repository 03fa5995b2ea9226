"""The connection of a group's ranks: shared memory on each node, and lanes between nodes; either may be trivial.

    collective      agree ── small data travels along
                    │
                    └─ large data:   copy in │ sum on the node │ lane │ copy out          (│: chunks overlap)

On one node there is no lane; ranks that share no memory are alone on their nodes, and a lane has all of them. The
collectives are in `all_reduce` (and `small`), `reduce_scatter`, `scan`, `broadcast` and `all_gather`. Each takes a
`Connection`, and begins with the agreement on its call.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...launch.user_variables import adds_in_order, pretended_node, wants_shared_memory
from ...types import ReduceOp
from ...utils.cache import BoundedCache
from ...utils.memory import flat_zeros
from ...utils.waiting import RequestWaiter
from ..call import Call
from ..reduction import wide_dtype
from ..tuning import (
    AGREEMENT_BYTES,
    BARRIER_SPINS,
    CHUNK_BYTES,
    MAX_GATHERS,
    MAX_MESSAGE_BYTES,
    MAX_PLANS,
    MAX_VIEWS,
    NETWORK_BUFFERS,
    NETWORK_CHUNK_BYTES,
    PIECE_BYTES,
    SLOW_LINE_SECONDS,
    STAGING_BYTES,
    replicated_bytes,
)
from .agreement import Agreement
from .arena import Arena
from .barrier import Fence, NodeBarrier
from .chunks import ALIGNMENT, Stage, Staging, line_seconds, run_chunks
from .lane import Lane, is_sliced
from .rounds import Rounds
from .segment import PAGE, Segment
from .topology import Bytes, Topology

STRONGLY_ORDERED = frozenset({"x86_64", "AMD64", "i386", "i686"})
"""Processors that keep a process's loads and stores in order for all others, but for a load that passes a store,
which no rank relies on (Intel 64 manual, volume 3, section 9.2; AMD64 manual, volume 2, section 7.2): there a
barrier needs no fence."""


class ChunkSizes(NamedTuple):
    """Sizes of chunks and messages in bytes, the same on all ranks.

    Attributes:
        chunk: The most of a large tensor that is copied or reduced at a time.
        message: The most that goes into one MPI call.
    """

    chunk: int = PIECE_BYTES
    message: int = MAX_MESSAGE_BYTES


def _scratch() -> Tensor:
    with torch.inference_mode(False):  # memory made in that mode could not be reused outside of it
        return torch.empty(NETWORK_CHUNK_BYTES, dtype=torch.uint8, device="cpu")


@dataclass
class Connection:
    """The ranks of one group, and the paths of data between them.

    Attributes:
        topology: Their nodes and lanes.
        agreement: Compares calls.
        barrier: The barrier of this node's ranks.
        staging: Buffers through which they pass ordinary tensors.
        arena: Their symmetric tensors; None on ranks that share no memory.
        lane: The ranks with this rank's local rank on the other nodes; None on one node, and for a rank without.
        rounds: The exchange between nodes; None on one node.
        sizes: Sizes of chunks and messages.
        release: Called by `free`, in order.
        obstacle: Why memory cannot be shared, the same on all ranks; empty if it is, or need not be.
        ordered: Whether sums are taken in the order of the nodes.
        is_open_mpi: Whether the MPI library is Open MPI.
        plans: Preparations of collectives by the key of their calls.
        gathers: Memory of small all-gathers between nodes, by the key of their calls and the rows of a block.
        views: Views of tensors that were reduced before, by kind of call and address.
        total: [NETWORK_CHUNK_BYTES] uint8 of this rank's own, for the sum of a slice.
    """

    topology: Topology
    agreement: Agreement
    barrier: NodeBarrier
    staging: Staging
    arena: Arena | None
    lane: Lane | None
    rounds: Rounds | None
    sizes: ChunkSizes
    release: Sequence[Callable[[], None]] = ()
    obstacle: str = ""
    ordered: bool = False
    is_open_mpi: bool = False
    plans: BoundedCache[Any, Any] = field(default_factory=lambda: BoundedCache(MAX_PLANS))
    gathers: BoundedCache[Any, Any] = field(default_factory=lambda: BoundedCache(MAX_GATHERS))
    views: BoundedCache[Any, Any] = field(default_factory=lambda: BoundedCache(MAX_VIEWS))
    total: Tensor = field(default_factory=_scratch)

    @property
    def path(self) -> str:
        """How large data goes: `"node"`, `"nodes"`, or `"plain"` if no ranks share memory."""
        if self.topology.nodes == 1:
            return "node"
        return "nodes" if self.topology.widest > 1 else "plain"

    @property
    def is_apart(self) -> bool:
        """Whether every rank is alone on its node."""
        return self.topology.widest == 1

    @property
    def chunk_bytes(self) -> int:
        """The most of a rank's tensor that goes through staging at a time, a slice for each lane."""
        unit = ALIGNMENT * self.topology.lanes
        most = self.sizes.chunk
        most = min(most, CHUNK_BYTES) if self.rounds is None else NETWORK_CHUNK_BYTES // PIECE_BYTES * most
        return max(min(most, self.staging.buffer_bytes) // unit, 1) * unit

    @property
    def small_bytes(self) -> int:
        """The most that one rank sends to all others with the agreement."""
        return self.chunk_bytes if self.rounds is None else AGREEMENT_BYTES

    def carries(self, dtype: torch.dtype, nbytes: int) -> bool:
        """Return True if a reduction of so many bytes travels with the agreement; local."""
        if self.rounds is None:
            return nbytes <= min(replicated_bytes(self.topology.size, symmetric=False), self.staging.buffer_bytes)
        wide = nbytes // dtype.itemsize * wide_dtype(dtype).itemsize
        return wide * (self.topology.nodes if self.ordered else 1) <= AGREEMENT_BYTES

    def buffers_now(self) -> Sequence[Bytes]:
        """Return the buffers of this node that are written before the next barrier, [ranks of the node]; local."""
        return self.staging.buffers[self.barrier.count % self.staging.count]

    def buffers_before(self) -> Sequence[Bytes]:
        """Return the buffers of this node that were written before the last barrier; local."""
        return self.staging.buffers[(self.barrier.count - 1) % self.staging.count]

    # ---- agreement ----------------------------------------------------------------------------------------

    def numbers(self, call: Call, own: int) -> Sequence[int]:
        """Agree on a call and return a number of each rank; collective."""
        most, least, _ = self.agreement.agree(call, own)
        return [own] * self.topology.size if most == least else list(self.agreement.numbers(own))

    def exchanges_slices(self, dtype: torch.dtype, op: ReduceOp, nbytes: int) -> bool:
        """Return True if lanes sum so many bytes by an exchange of slices, not by MPI; the same on all; local."""
        nodes = self.topology.nodes
        return self.ordered or is_sliced(dtype, op, nbytes, nodes, is_open_mpi=self.is_open_mpi)

    def run_chunks(self, call: Call, chunks: int, stages: Sequence[Stage], *, is_agreed: bool) -> None:
        """Run chunks through stages; on one node the first barrier agrees on the call, if need be; collective.

        Args:
            call: The call.
            chunks: Number of chunks, the same on all ranks.
            stages: The stages; see `chunks`.
            is_agreed: Whether the ranks have agreed on the call.
        """
        first = 0
        if not is_agreed:
            if chunks:
                now = self.barrier.count % self.staging.count
                stages[0](0, now, now)
            # If some ranks have a symmetric tensor, they have put nothing in: begin anew, with them.
            first = 1 if self.agreement.agree(call)[2] and chunks else 0
        run_chunks(self.barrier, self.staging.count, call, chunks, stages, first)

    # ---- memory -------------------------------------------------------------------------------------------

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor in shared memory, 0 if it is an ordinary one; local."""
        return 0 if self.arena is None else self.arena.address(tensor)

    def address_of_large(self, tensor: Tensor) -> int:
        """Return the address of a symmetric tensor on one node that is worth the second barrier it needs; local."""
        if self.rounds is not None or tensor.nbytes <= replicated_bytes(self.topology.size, symmetric=True):
            return 0
        return self.address(tensor)

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that other ranks can reach, if that is possible; collective, agreed already."""
        return flat_zeros(nbytes, torch.uint8) if self.arena is None else self.arena.symmetric(nbytes)

    def node_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that the ranks of this node share; collective, agreed already.

        Raises:
            MemoryError: There is not enough, on any rank.
        """
        return flat_zeros(nbytes, torch.uint8) if self.arena is None else self.arena.common(nbytes)

    def is_common(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies in memory of `node_empty`; local."""
        return self.arena is None or self.arena.is_common(tensor)

    def free(self) -> None:
        """Release shared and scratch memory; tensors on it keep theirs; collective."""
        self.plans.clear()
        self.gathers.clear()
        self.views.clear()
        if self.lane is not None:
            self.lane.clear()
        if self.arena is not None:
            self.arena.close()
        for release in self.release:
            release()


# ---- making it -------------------------------------------------------------------------------------------------


def connect(mpi: Any, comm: Any, sizes: ChunkSizes, *, oversubscribed: bool, timeout: float | None) -> Connection:
    """Find out how the ranks of a communicator can reach each other, and connect them; collective.

    Ranks that share memory (MPI's `COMM_TYPE_SHARED`, not host names) communicate through it;
    `AXONMPI_COLLECTIVES=plain` leaves everything to MPI.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        sizes: Sizes of chunks and messages.
        oversubscribed: Whether ranks outnumber the cores anywhere.
        timeout: Seconds after which a rank that waits in shared memory gives up; None never does.
    """
    waiter = RequestWaiter(mpi.Request, oversubscribed=oversubscribed)
    obstacle = ""
    if comm.size > 1 and wants_shared_memory():
        node = node_communicator(mpi, comm)
        topology = Topology.shared(mpi, comm, node)
        if topology.widest > 1:
            obstacle, memory = _shared_memory(mpi, comm, node, topology)
            if not obstacle:
                return _connect_nodes(mpi, comm, node, topology, memory, sizes, waiter, oversubscribed, timeout)
        node.Free()
    return _connect_apart(mpi, comm, sizes, waiter, obstacle)


def path_of(comm: Any) -> tuple[str, str]:
    """Connect the ranks of a communicator for a moment, to find out how they reach each other; collective.

    Returns:
        The `path` and the `obstacle` of their `Connection`.
    """
    from mpi4py import MPI

    connection = connect(MPI, comm, ChunkSizes(), oversubscribed=True, timeout=None)
    connection.free()
    return connection.path, connection.obstacle


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


def _connect_apart(mpi: Any, comm: Any, sizes: ChunkSizes, waiter: RequestWaiter, obstacle: str) -> Connection:
    """Connect ranks that share no memory; collective."""
    topology = Topology.apart(comm.rank, comm.size)
    control, buffers = (
        Segment(mmap.mmap(-1, nbytes), nbytes, 0, 1) for nbytes in (PAGE, NETWORK_BUFFERS * NETWORK_CHUNK_BYTES)
    )
    barrier = NodeBarrier(control, None, [os.getpid()], [comm.rank], None, lambda: None)
    rounds = Rounds(mpi, comm, topology.leaders, topology.rank, waiter)
    return Connection(
        topology=topology,
        agreement=Agreement(comm, waiter, control, barrier, rounds),
        barrier=barrier,
        staging=Staging(buffers.regions, NETWORK_BUFFERS),
        arena=None,
        lane=Lane(mpi, comm, sizes.message, waiter),
        rounds=rounds,
        sizes=sizes,
        obstacle=obstacle,
        ordered=adds_in_order(),
        is_open_mpi=mpi.Get_library_version().startswith("Open MPI"),
    )


def _shared_memory(mpi: Any, comm: Any, node: Any, topology: Topology) -> tuple[str, list[Segment]]:
    """Make the page of each rank of a node and its first buffers; collective. Returns the obstacle, if any."""
    buffers = NETWORK_BUFFERS * NETWORK_CHUNK_BYTES
    if topology.nodes == 1:
        buffers = 2 * max(CHUNK_BYTES, replicated_bytes(comm.size, symmetric=False))
    made = [Segment.create(node, nbytes) for nbytes in (PAGE, buffers)]
    problem = next((text for text in made if isinstance(text, str)), None)
    memory = [segment for segment in made if isinstance(segment, Segment)]
    for segment in memory if problem is None else ():
        problem = problem or segment.populate(0, segment.region_bytes)
    if comm.allreduce(problem is not None, mpi.LOR):
        return str(next(text for text in comm.allgather(problem) if text)), []
    return "", memory


def _connect_nodes(
    mpi: Any,
    comm: Any,
    node: Any,
    topology: Topology,
    memory: list[Segment],
    sizes: ChunkSizes,
    waiter: RequestWaiter,
    oversubscribed: bool,
    timeout: float | None,
) -> Connection:
    """Connect ranks if any two share a node; collective."""
    control, buffers = memory
    fence = None if platform.machine() in STRONGLY_ORDERED else Fence(mpi, node)
    sync = fence.sync if fence else None
    release: list[Callable[[], None]] = [node.Free] if fence is None else [fence.free, node.Free]
    processes, names = zip(*node.allgather((os.getpid(), comm.rank)), strict=True)
    # A probe for any source makes MPICH progress within the node and between nodes; one with a source does so only
    # towards that rank. This communicator carries no messages, so the probe never finds one.
    barrier = NodeBarrier(control, sync, list(processes), list(names), timeout, node.Iprobe)
    arena = Arena(node)
    rounds = lane = None
    if topology.nodes == 1:
        barrier.spins = 0 if oversubscribed else BARRIER_SPINS
        staging = _staging(comm, barrier, arena, buffers)
    else:
        staging = Staging(buffers.regions, NETWORK_BUFFERS)
        rounds = Rounds(mpi, comm, topology.leaders, topology.node, waiter)
        lane_comm = comm.Split(topology.local_rank if topology.has_lane else mpi.UNDEFINED, topology.node)
        if topology.has_lane:
            lane = Lane(mpi, lane_comm, sizes.message, waiter)
            release.append(lane_comm.Free)
    return Connection(
        topology=topology,
        agreement=Agreement(comm, waiter, control, barrier, rounds),
        barrier=barrier,
        staging=staging,
        arena=arena,
        lane=lane,
        rounds=rounds,
        sizes=sizes,
        release=release,
        ordered=adds_in_order(),
        is_open_mpi=mpi.Get_library_version().startswith("Open MPI"),
    )


def _staging(comm: Any, barrier: NodeBarrier, arena: Arena, buffers: Segment) -> Staging:
    """Make the staging of a node's ranks, of many buffers if their caches are far apart; collective."""
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
