"""Groups of ranks and the world they come from (layer 3).

    World                    all ranks of the job: this rank's number, its node, the default group
      └─ ProcessGroup        an ordered set of ranks with its own numbering, and every collective as a method
           └─ Backend        moves the data

A process has one world, made by `init_process_group`; a thread can have another one for a while
(`World.activate`), which is how mock ranks live side by side in one process.

The file is long because a group has every collective as a method.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import objects
from .backends.base import Backend
from .backends.checks import check_parts, check_ranks, check_timeout
from .backends.mock import MockBackend
from .errors import CommunicatorError
from .topology import Topology
from .types import ReduceOp, Work

__all__ = ["ProcessGroup", "World", "current_world", "default_group", "forget_world", "set_process_world"]

BACKENDS = ("mpi", "mock")


class _Outside:
    """Stands for the backend on ranks outside a group: whatever is asked of it is an error."""

    rank = -1

    def __init__(self, ranks: tuple[int, ...], own: int) -> None:
        self._message = (
            f"rank {own} is not in this group of ranks {list(ranks)}; "
            "check group.contains(rank) before calling its operations"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(self._message)


class ProcessGroup:
    """An ordered set of ranks that communicate; the ranks inside are numbered from 0.

    Args:
        backend: The communicator. On ranks outside the group, None.
        ranks: The members' numbers in the world, in order; by default 0 to the backend's size.
        own_rank: This rank's number in the world, needed on ranks outside.

    Attributes:
        operations: The backend; on ranks outside, something whose every attribute is an error.
    """

    def __init__(
        self, backend: Backend | None, ranks: Sequence[int] | None = None, *, own_rank: int | None = None
    ) -> None:
        if backend is not None and not isinstance(backend, Backend):
            raise TypeError(f"backend: expected an axonmpi.Backend, got {type(backend).__name__}")
        if backend is None and (ranks is None or own_rank is None):
            raise ValueError("a group without a backend needs its ranks and the own rank")
        if ranks is None:
            assert backend is not None
            ranks = range(backend.size)
        self._ranks = tuple(ranks)
        self._members = frozenset(self._ranks)
        self._private: dict[tuple[int, ...], Backend | None] = {}
        self.operations: Any = backend if backend is not None else _Outside(self._ranks, own_rank or 0)

    @classmethod
    def mock(cls) -> ProcessGroup:
        """Make a group of one rank that needs no MPI; local."""
        return cls(MockBackend.create_world(1)[0])

    @property
    def rank(self) -> int:
        """This rank's number in the group; -1 outside it."""
        rank: int = self.operations.rank
        return rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' numbers in the world, in the group's order."""
        return self._ranks

    @property
    def backend(self) -> Backend:
        """The communicator; ValueError on ranks outside the group."""
        if isinstance(self.operations, _Outside):
            _ = self.operations.backend
        backend: Backend = self.operations
        return backend

    def contains(self, global_rank: int) -> bool:
        """Say whether the world's rank `global_rank` is a member; local."""
        return global_rank in self._members

    def __repr__(self) -> str:
        return f"ProcessGroup(ranks={list(self._ranks)}, rank={self.rank})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        """Return the group itself, so that a copied module communicates with the same ranks; local."""
        return self

    # Each method below is the backend's of the same name, which documents it.

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce over all ranks, in place; collective. See `Backend.all_reduce`."""
        work: Work | None = self.operations.all_reduce(tensor, op, async_op=async_op)
        return work

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce onto rank `dst`, in place there; collective. See `Backend.reduce`."""
        work: Work | None = self.operations.reduce(tensor, dst, op, async_op=async_op)
        return work

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work | None:
        """Copy rank `src`'s tensor to all ranks, in place; collective. See `Backend.broadcast`."""
        work: Work | None = self.operations.broadcast(tensor, src, async_op=async_op)
        return work

    def all_gather(self, tensor: Tensor, dim: int = 0, async_op: bool = False) -> Any:
        """Return all ranks' tensors concatenated along `dim`; collective. See `Backend.all_gather`."""
        return self.operations.all_gather(tensor, dim, async_op=async_op)

    def reduce_scatter(
        self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, dim: int = 0, async_op: bool = False
    ) -> Any:
        """Return this rank's slice of the reduced tensor; collective. See `Backend.reduce_scatter`."""
        return self.operations.reduce_scatter(tensor, op, dim, async_op=async_op)

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        """Return the list of all ranks' tensors on rank `dst`; collective. See `Backend.gather`."""
        return self.operations.gather(tensor, dst, async_op=async_op)

    def scatter(self, tensor: Tensor | None, src: int = 0, async_op: bool = False) -> Any:
        """Return this rank's part of rank `src`'s tensor; collective. See `Backend.scatter`."""
        return self.operations.scatter(tensor, src, async_op=async_op)

    def all_to_all(self, tensors: Sequence[Tensor], async_op: bool = False) -> Any:
        """Send one tensor to each rank, return those received; collective. See `Backend.all_to_all`."""
        return self.operations.all_to_all(tensors, async_op=async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait for all ranks; collective. See `Backend.barrier`."""
        work: Work | None = self.operations.barrier(async_op=async_op)
        return work

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that all ranks of the node can read and write; collective. See `Backend`."""
        tensor: Tensor = self.operations.symmetric_empty(shape, dtype)
        return tensor

    def node_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that the ranks of each node have in common; collective. See `Backend.node_empty`."""
        tensor: Tensor = self.operations.node_empty(shape, dtype)
        return tensor

    def all_gather_into(
        self, output: Tensor, tensor: Tensor | None, sizes: Sequence[int], async_op: bool = False
    ) -> Work | None:
        """Put the parts of all ranks into memory that each node has in common; collective. See `Backend`."""
        work: Work | None = self.operations.all_gather_into(output, tensor, sizes, async_op=async_op)
        return work

    def reduce_scatter_into(
        self,
        output: Tensor,
        tensors: Sequence[Tensor | int],
        sizes: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        *,
        dtype: torch.dtype | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce tensors that lie end to end and put this rank's part into `output`; collective. See `Backend`."""
        work: Work | None = self.operations.reduce_scatter_into(
            output, tensors, sizes, op, dtype=dtype, async_op=async_op
        )
        return work

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to rank `dst`. See `Backend.send`."""
        self.operations.send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive from rank `src`, in place. See `Backend.recv`."""
        self.operations.recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Begin to send to rank `dst`. See `Backend.isend`."""
        work: Work = self.operations.isend(tensor, dst, tag)
        return work

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Begin to receive from rank `src`. See `Backend.irecv`."""
        work: Work = self.operations.irecv(tensor, src, tag)
        return work

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable object on all ranks; collective."""
        return objects.broadcast_object(self.operations, obj, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order; collective."""
        return objects.all_gather_object(self.operations, obj)

    def private(self, ranks: Sequence[int] | None = None) -> Backend | None:
        """Return a communicator for messages that must not meet the user's; collective the first time.

        Args:
            ranks: Some ranks of this group, the same on all; None means all.

        Returns:
            The communicator, the same one whenever it is asked for; None on ranks outside.
        """
        chosen = tuple(range(self.size)) if ranks is None else check_ranks(ranks, self.size)
        if chosen not in self._private:
            self._private[chosen] = self.backend.split(chosen)
        return self._private[chosen]

    def close(self) -> None:
        """Release the group's communicators; collective in effect, may be called twice; nothing outside."""
        while self._private:
            _, private = self._private.popitem()
            if private is not None:
                private.close()
        if not isinstance(self.operations, _Outside):
            self.operations.close()


class World:
    """All ranks of the job, as this rank sees them.

    Made by `World.init` or `World.mock`.

    Attributes:
        default_group: The group of all ranks, used where no group is named.
        peers: The worlds of all mock ranks, in rank order; empty for real ranks.
    """

    def __init__(self, backend: Backend, topology: Topology) -> None:
        self.default_group = ProcessGroup(backend)
        self.peers: tuple[World, ...] = ()
        self._topology = topology
        self._groups: list[ProcessGroup | World] = []

    @classmethod
    def init(
        cls,
        backend: str = "mpi",
        init_method: str | None = None,
        *,
        timeout: float | None = None,
        num_threads: int | None = None,
    ) -> World:
        """Start a world of all ranks of the job; collective.

        Args:
            backend: `"mpi"`, or `"mock"` for a world of one rank without MPI.
            init_method: None, `"mpi://"` or `"env://"`: the launcher's variables are checked against MPI's world.
            timeout: Seconds after which a blocking collective raises `CollectiveTimeoutError`; None never does.
            num_threads: Threads torch uses on this rank; None shares the node's cores among its ranks, unless
                OMP_NUM_THREADS or MKL_NUM_THREADS is set.

        Raises:
            LaunchError: The processes were not started as one MPI job.
            ValueError: `backend` or `init_method` is unknown, or `timeout` is not positive.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        check_timeout(timeout)
        if backend == "mock":
            return cls.mock(1, timeout=timeout)
        from .backends import runtime
        from .backends.mpi import MpiBackend

        started = runtime.start_world(init_method, num_threads=num_threads)
        if started.comm is None:
            return cls(MockBackend.create_world(1, timeout=timeout)[0], Topology.of([0], 0))
        topology = Topology(started.local_rank, started.local_size, started.node_rank, started.num_nodes)
        return cls(MpiBackend(started.comm, timeout=timeout), topology)

    @classmethod
    def mock(cls, world_size: int = 1, *, timeout: float | None = None) -> World:
        """Make a world of `world_size` mock ranks on one node and return rank 0's view of it; local.

        Args:
            world_size: Number of ranks; each is used by a thread of its own, see `peers`.
            timeout: Seconds that a rank waits for the others; None means 60.

        Raises:
            ValueError: `world_size` is below 1.
        """
        backends = MockBackend.create_world(world_size, timeout=timeout)
        worlds = tuple(cls(backend, Topology.of([0] * world_size, backend.rank)) for backend in backends)
        for world in worlds:
            world.peers = worlds
        return worlds[0]

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.default_group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.default_group.size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self._topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._topology.local_size

    @property
    def node_rank(self) -> int:
        """This node's number; nodes are ordered by their lowest rank."""
        return self._topology.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._topology.num_nodes

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, node={self.node_rank} of {self.num_nodes})"

    def new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        """Make a group of some of the world's ranks, numbered in the order given; collective over the world.

        Args:
            ranks: Different ranks of the world, the same on all ranks.

        Returns:
            The group. On ranks outside, `contains(own rank)` is False and its operations raise ValueError.

        Raises:
            ValueError: `ranks` is empty, has doubles or numbers that are not in the world.
            CollectiveMismatchError: The ranks' lists differ.
        """
        chosen = check_ranks(ranks, self.size)
        backend = self.default_group.backend.split(chosen)
        group = ProcessGroup(backend, chosen, own_rank=self.rank)
        self._groups.append(group)
        return group

    def partition(self, parts: Sequence[Sequence[int]]) -> ProcessGroup:
        """Divide the world into groups at the cost of making one of them; collective over the world.

        Args:
            parts: The ranks of each group, in its order; every rank of the world once; the same on all ranks.

        Returns:
            The group that this rank is in.

        Raises:
            ValueError: A rank is in none of the parts, or more than once, or a part is empty.
            CollectiveMismatchError: The ranks' parts differ.
        """
        chosen = check_parts(parts, self.size)
        backend = self.default_group.backend.partition(chosen)
        group = ProcessGroup(backend, next(part for part in chosen if self.rank in part))
        self._groups.append(group)
        return group

    def subworld(self, size: int) -> World | None:
        """Make a world of the first `size` ranks; collective; None on the other ranks.

        Raises:
            ValueError: `size` is not from 1 to the world's.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"size: expected 1 to {self.size} ranks, got {size}")
        backend = self.default_group.backend.split(range(size))
        if backend is None:
            return None
        nodes = objects.all_gather_object(backend, self.node_rank)
        world = World(backend, Topology.of(nodes, backend.rank))
        self._groups.append(world)
        return world

    @contextmanager
    def activate(self) -> Iterator[World]:
        """Make this world the calling thread's default for the duration of a `with` block; local."""
        before = getattr(_thread, "world", None)
        _thread.world = self
        try:
            yield self
        finally:
            _thread.world = before

    def fail(self, error: BaseException) -> None:
        """Say that this mock rank has failed, which releases the ranks that wait for it; local.

        Raises:
            TypeError: This is not a mock world; a real rank ends the job by raising.
        """
        backend = self.default_group.backend
        if not isinstance(backend, MockBackend):
            raise TypeError("fail() is for mock ranks; a rank that raises under MPI ends the job")
        backend.fail(error)

    @property
    def num_groups(self) -> int:
        """How many groups have been made of this world and not been released with `close_groups`."""
        return len(self._groups)

    def close_groups(self, keep: int = 0) -> None:
        """Release groups of this world, the newest first; collective in effect.

        Args:
            keep: How many of them to keep, the oldest ones.
        """
        while len(self._groups) > keep:
            self._groups.pop().close()

    def close(self) -> None:
        """Release all groups of this world, the newest first; collective in effect, may be called twice."""
        self.close_groups()
        self.default_group.close()


_thread = threading.local()
_process_world: World | None = None


def set_process_world(world: World | None) -> None:
    """Make `world` the default of all threads that have none of their own; local."""
    global _process_world
    _process_world = world


def forget_world(world: World) -> None:
    """Take `world` away as the default, the calling thread's and the process's; local."""
    if getattr(_thread, "world", None) is world:
        _thread.world = None
    if _process_world is world:
        set_process_world(None)


def current_world() -> World | None:
    """Return the calling thread's world, else the process's, else None; local."""
    world: World | None = getattr(_thread, "world", None)
    return _process_world if world is None else world


def default_group() -> ProcessGroup:
    """Return the group of all ranks of the current world; local.

    Raises:
        CommunicatorError: There is none yet.
    """
    world = getattr(_thread, "world", None) or _process_world
    if world is None:
        raise CommunicatorError("no process group yet: call axonmpi.init_process_group() first")
    group: ProcessGroup = world.default_group
    return group
