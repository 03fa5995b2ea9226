"""The world of all ranks of a job, and the default world of a process or thread.

    World                    all ranks of the job: this rank's number, its node, the default group
      └─ ProcessGroup        an ordered set of ranks with its own numbering, and every collective as a method
           └─ Backend        moves the data

A process has one default world, the first that `init_process_group` or `World.init` made. A thread can have its own
for a while (`World.activate`), so that mock ranks live side by side in one process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import (
    Backend,
    LocalBackend,
    MockBackend,
    MpiBackend,
    NcclBackend,
    all_gather_number,
    check_parts,
    check_ranks,
)
from ..errors import CommunicatorError
from ..launch import exit as exits
from ..launch import start as runtime
from ..launch.topology import Topology
from ..launch.user_variables import trace_folder, waiting_limit
from ..observe import watch
from ..record import own_record, record_of_thread
from ..tracing.trace import Trace, checked_steps
from ..types import Seconds
from ..utils.arguments import hint, integer, seconds
from .process_group import ProcessGroup

if TYPE_CHECKING:
    from mpi4py import MPI

BACKENDS = ("mpi", "nccl", "mpi+nccl", "mock")


class World:
    """All ranks of the job, from the view of one; made by `World.init` or `World.mock`.

    Attributes:
        default_group: The group of all ranks, which calls without a group use.
        rank: This rank's number in the world.
        size: Number of ranks in the world, also named `world_size`.
        is_main: True on rank 0.
        local_rank: This rank's number on its node.
        local_size: Number of ranks on this node.
        node_rank: This node's number; nodes are ordered by their lowest rank.
        num_nodes: Number of nodes.
        device: This rank's GPU in a world of GPUs, else the CPU.
        peers: The worlds of all mock ranks, in rank order; empty for real ranks.
    """

    def __init__(self, backend: Backend, topology: Topology) -> None:
        self.default_group = ProcessGroup(backend)
        self.rank = backend.rank
        self.size = self.world_size = backend.size
        self.is_main = self.rank == 0
        self.local_rank = topology.local_rank
        self.local_size = topology.local_size
        self.node_rank = topology.node_rank
        self.num_nodes = topology.num_nodes
        self.device = backend.place
        self.peers: tuple[World, ...] = ()
        self._topology = topology
        self._groups: list[ProcessGroup | World] = []

    @classmethod
    def init(
        cls,
        backend: str = "mpi",
        init_method: str | None = None,
        *,
        timeout: Seconds | None = None,
        num_threads: int | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> World:
        """Start a world of all ranks of the job, and make it the default if there is none yet; collective.

        Args:
            backend: `"mpi"`; `"nccl"`, also named `"mpi+nccl"`, sends tensors on GPUs by NCCL and tensors on the
                CPU by MPI, and makes this rank's GPU the current one; `"mock"` is a world of one rank without MPI.
            init_method: None, `"mpi://"` or `"env://"`: the launcher's variables are checked against MPI's world.
            timeout: Seconds after which a blocking collective raises `CollectiveTimeoutError`, and after which the
                job ends if a rank has not called this. None: collectives do not raise, and `AXONMPI_TIMEOUT` ends
                the job.
            num_threads: Threads of torch on this rank; None shares the node's cores among its ranks, unless
                OMP_NUM_THREADS or MKL_NUM_THREADS is set.
            comm: An mpi4py intracommunicator, whose ranks are the world and call this, while other ranks of the job
                go on with MPI or have a world of their own; it is duplicated, and stays the caller's. None: all
                ranks, or those of an earlier world of this process.

        Raises:
            LaunchError: The processes were not started as one MPI job.
            NcclError: With NCCL: a rank has no GPU or no NCCL, or the GPUs cannot be connected; on all ranks.
            ValueError: `backend` or `init_method` is unknown, `timeout` is not positive, or `comm` is given for a
                mock world.
            TypeError: `comm` is no intracommunicator.
            CommunicatorError: This process belongs to a world of other ranks than `comm`'s.
        """
        if backend not in BACKENDS:
            mpi = "; tensors on the CPU are sent by 'mpi', with the job started by mpirun or srun"
            todo = mpi if backend == "gloo" else ""
            raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}{todo}")
        timeout = seconds("timeout", timeout)
        runtime.check_arguments(init_method, num_threads)
        if backend == "mock":
            if comm is not None:
                raise ValueError("comm: expected None for a mock world, which has no MPI")
            world = cls.mock(1, timeout=timeout)
        else:
            started = runtime.start_world(init_method, num_threads, timeout, comm)
            alone = started.comm is None
            watch(waiting_limit(timeout))
            own = LocalBackend(timeout=timeout) if alone else MpiBackend(started.comm, timeout=timeout)
            gpus = None if backend == "mpi" else NcclBackend.for_world(own, started.topology)
            world = cls(gpus or own, started.topology)
            world._trace_from_environment()
        if current_world() is None:
            set_process_world(world)
        return world

    @classmethod
    def mock(cls, world_size: int = 1, *, timeout: Seconds | None = None) -> World:
        """Make a world of `world_size` mock ranks on one node and return rank 0's; local.

        Args:
            world_size: Number of ranks, each for a thread of its own; `peers` has the worlds of all.
            timeout: Seconds that a rank waits for the others; None means 60.

        Raises:
            ValueError: `world_size` is below 1.
        """
        backends = MockBackend.create_world(world_size, timeout=timeout)
        worlds = tuple(cls(backend, Topology.of([0] * world_size, backend.rank)) for backend in backends)
        for world in worlds:
            world.peers = worlds
        return worlds[0]

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, node={self.node_rank} of {self.num_nodes})"

    def barrier(self) -> None:
        """Wait for all ranks of the world; collective."""
        self.default_group.barrier()

    def trace(self, folder: str | Path, *, steps: int | range | None = None, profiler: bool = False) -> Trace:
        """Return a context that records where the time of all ranks goes; its begin and end are collective.

        Each rank keeps its operations and phases in `folder/rank-N.trace`, 160 bytes each, of which the latest
        409,600 stay; a job that is killed leaves these files. At the end rank 0 writes `folder/trace.json` for
        Perfetto (ui.perfetto.dev). `axonmpi trace FOLDER` prints a summary; see docs/trace.md.

        Args:
            folder: Folder on a file system of all nodes, the same on all ranks; an earlier trace in it is removed.
            steps: Steps to trace, counted from 0 by the trace's `step()`, a number or a range without gaps; None
                traces the whole block.
            profiler: True to add the events of torch's profiler.

        Raises:
            OSError: A rank cannot write to the folder, or does not see rank 0's file; on all ranks, at the begin.
            ValueError: `steps` is empty, or has gaps.
            TypeError: An argument has another type.
        """
        return Trace(self.default_group.backend, self._topology, Path(folder), checked_steps(steps), profiler)

    def _trace_from_environment(self) -> None:
        """Trace the job to its end if `AXONMPI_TRACE` is set; collective the first time."""
        folder = trace_folder()
        if folder is not None and own_record().trace is None:
            self.trace(folder).begin()
            exits.before_finalize(own_record().end_trace)

    def new_group(self, ranks: Iterable[int]) -> ProcessGroup:
        """Make a group of some of the world's ranks, numbered in the order given; collective over the world.

        Args:
            ranks: Different ranks of the world, the same on all ranks.

        Returns:
            The group. On ranks outside, `contains(own rank)` is False and its operations raise ValueError.

        Raises:
            ValueError: `ranks` is empty, or has a number twice or outside the world.
            CollectiveMismatchError: The ranks' lists differ.
        """
        chosen = check_ranks(ranks, self.size)
        backend = self.default_group.backend.split(chosen)
        group = ProcessGroup(backend, chosen, own_rank=self.rank)
        self._keep(group)
        return group

    def partition(self, parts: Iterable[Iterable[int]]) -> ProcessGroup:
        """Split the world into disjoint groups by one call; collective over the world.

        Args:
            parts: The ranks of each group, in its order; every rank of the world once; the same on all ranks.

        Returns:
            The group with this rank.

        Raises:
            ValueError: A rank is in no part or in several, or a part is empty.
            CollectiveMismatchError: The ranks' parts differ.
        """
        with self.activate():
            return partition_group(self.default_group, parts)

    def subworld(self, size: int) -> World | None:
        """Make a world of the first `size` ranks, return None on the other ranks; collective.

        Raises:
            ValueError: `size` is not from 1 to the world's.
        """
        if not 1 <= integer("size", size) <= self.size:
            raise ValueError(f"size: expected 1 to {self.size} ranks, got {size}")
        backend = self.default_group.backend.split(range(size))
        if backend is None:
            return None
        nodes = all_gather_number(backend, self.node_rank)
        world = World(backend, Topology.of(nodes, backend.rank))
        self._keep(world)
        return world

    def _keep(self, group: ProcessGroup | World, stacklevel: int = 3) -> None:
        """Keep a group until it is closed: without a reference its communicators would never be released."""
        self._groups = [*self.groups, group]
        if len(self._groups) == _MANY_GROUPS:
            warnings.warn(
                f"{_MANY_GROUPS} groups of this world are open, and an MPI library has room for some thousand; "
                "close() groups that are no longer used, or make each group once, before the loop",
                stacklevel=stacklevel,
            )

    @contextmanager
    def activate(self) -> Iterator[World]:
        """Make this world the calling thread's default within a `with` block; local."""
        before = getattr(_thread, "world", None)
        _thread.world = self
        backend = self.default_group.backend.control
        try:
            with record_of_thread(backend.record if isinstance(backend, MockBackend) else None):
                yield self
        finally:
            _thread.world = before

    def fail(self, error: BaseException) -> None:
        """Fail as a mock rank, which raises an error on the ranks that wait for this one; local.

        Raises:
            TypeError: This is not a mock world; a real rank ends the job by raising.
        """
        backend = self.default_group.backend.control
        if not isinstance(backend, MockBackend):
            raise TypeError("fail() is for mock ranks; a rank that raises under MPI ends the job")
        backend.fail(error)

    @property
    def is_open(self) -> bool:
        """Whether the world has not been closed."""
        return self.default_group.is_open

    @property
    def groups(self) -> tuple[ProcessGroup | World, ...]:
        """The open groups and worlds that this one has made, with this rank in them, oldest first."""
        return tuple(group for group in self._groups if group.is_open)

    def close_groups(self, keep: Collection[ProcessGroup | World] = ()) -> None:
        """Release groups of this world, the newest first; collective in effect.

        Args:
            keep: Groups to keep, such as the value of `groups` at an earlier time; the same on all ranks.
        """
        for group in reversed(self.groups):
            if group not in keep:
                group.close()
        self._groups = list(self.groups)

    def close(self) -> None:
        """Release all groups, the newest first, and be no default any more; collective in effect.

        May be called twice.
        """
        self.close_groups()
        self.default_group.close()
        if getattr(_thread, "world", None) is self:
            _thread.world = None
        if _process_world is self:
            set_process_world(None)


_MANY_GROUPS = 100
_thread = threading.local()
_process_world: World | None = None


def set_process_world(world: World | None) -> None:
    """Make `world` the default of all threads without one of their own; local."""
    global _process_world
    _process_world = world


def current_world() -> World | None:
    """Return the calling thread's world, else the process's, else None; local."""
    return getattr(_thread, "world", None) or _process_world


def get_world() -> World:
    """Return the calling thread's world, else the process's; local.

    Raises:
        CommunicatorError: There is none yet.
    """
    world: World | None = getattr(_thread, "world", None) or _process_world
    if world is None:
        if parent_process() is not None:
            raise CommunicatorError(
                "no process group in this process, which another one has started, such as a worker of a "
                "DataLoader: groups belong to the rank itself. Take what is needed there, such as "
                "axonmpi.get_rank(), and hand it to the child, in its dataset for instance"
            )
        raise CommunicatorError("no process group yet: call axonmpi.init_process_group() first")
    return world


def partition_group(group: ProcessGroup, parts: Iterable[Iterable[int]]) -> ProcessGroup:
    """Split a group as `World.partition` splits a world; collective over the group.

    The parts have numbers of `group`. The current world, if there is one, closes the new group with itself.
    """
    chosen = check_parts(parts, group.size)
    backend = group.backend.partition(chosen)
    own = chosen.find(group.rank)
    assert own is not None
    part = ProcessGroup(backend, group.members[chosen.array(own[0])])
    if (world := current_world()) is not None:
        world._keep(part, stacklevel=4)
    return part


def chosen_group(given: object, argument: str = "group", habit: str = "") -> ProcessGroup:
    """Return a group, the default group for None; local.

    Args:
        given: The caller's argument.
        argument: Its name, for the message.
        habit: Advice of the message if another argument stands in its place, as in torch's order of arguments.

    Raises:
        TypeError: `given` is no group.
    """
    if given is None:
        return get_world().default_group
    if isinstance(given, ProcessGroup):
        return given
    todo = hint(given) or (f"; {habit}" if habit else "")
    raise TypeError(f"{argument}: expected an axonmpi.ProcessGroup or None, got {type(given).__name__}{todo}")


def group_of_this_rank(given: object, argument: str = "process_group") -> ProcessGroup:
    """Return a group as `chosen_group` does, if this rank is in it; local.

    Raises:
        TypeError: `given` is no group.
        ValueError: This rank is outside.
    """
    group = chosen_group(given, argument)
    _ = group.backend  # raises on ranks outside
    return group
