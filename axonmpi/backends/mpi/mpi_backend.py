"""The backend of CPU tensors under MPI: a group's life, and each collective handed to its `Connection`.

Every collective begins with an agreement of the ranks on the call: mismatched calls are noticed on every rank
before any data is moved, and a small operation (a loss, a counter, a flag) is complete with it. All of that is the
group's `Connection`'s, which `connect` chooses when the group is made. Operations that send something else to each
rank (gather, scatter, all-to-all, messages) are MPI messages always.
"""

from __future__ import annotations

import functools
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...errors import CommunicatorError
from ...launch import exit as exits
from ...launch import start as runtime
from ...launch.cpu import CoreShare, core_share
from ...observe import unfinished_operation
from ...record import own_record
from ...types import Seconds, Work
from ...utils.partition import split_range
from ...utils.rows import Exchange
from ...utils.waiting import RequestWaiter
from ..buffers import DESCRIPTION_BYTES, as_bytes, describe, described, empty, flat_elements, write_back
from ..call import Call
from ..checks import MAX_TAG
from ..connection.all_gather import all_gather, all_gather_into
from ..connection.all_reduce import reduce
from ..connection.broadcast import broadcast, broadcast_small
from ..connection.connection import ChunkSizes, connect
from ..connection.reduce_scatter import reduce_scatter, reduce_scatter_into
from ..connection.scan import scan
from ..connection.segment import warn_no_shared_memory
from ..contract import Backend
from ..counters import NodeCounters
from ..flat_parts import FlatParts
from ..local import LocalBackend
from ..ranks import Parts
from ..worker import AtOnce, Worker
from .exchange_rows import exchange_rows
from .point_to_point import FIRST_TAG_OF_USERS, TAG_OF_PAIRS, MessagePort, RequestWork

if TYPE_CHECKING:
    from mpi4py import MPI

_live: weakref.WeakSet[MpiBackend] = weakref.WeakSet()


def _close_all() -> None:
    """End all use of MPI: a thread inside MPI while MPI is finalised ends in a segmentation fault.

    Raises:
        CommunicatorError: An operation is under way.
    """
    stopped = [backend.stop_worker(timeout=4.0) for backend in list(_live)]
    if (text := unfinished_operation()) or not all(stopped):
        raise CommunicatorError(text or "an asynchronous operation was still under way when the program ended")
    for backend in list(_live):
        backend.invalidate("the program has ended, and MPI with it")


def _leave_to_parent() -> None:
    for backend in list(_live):
        backend.invalidate(f"this process is a fork of rank {backend.rank}, and MPI belongs to that rank alone")


@functools.cache
def _register_with_exits() -> None:
    exits.before_finalize(_close_all)
    os.register_at_fork(after_in_child=_leave_to_parent)


def _identity(mpi: Any, comm: Any) -> tuple[int, int, int]:
    """Return the identity of a group; collective.

    Returns:
        A number that no other group has; the world's number of the group's rank 0; the step to those of the others,
        0 if it varies.
    """
    rank, own = comm.Get_rank(), runtime.communicator_of_world(mpi).Get_rank()
    key = secrets.randbits(62) | 1 if rank == 0 else 0
    told = np.array([key, own if rank == 0 else -1, own if rank == 1 else -1])
    comm.Allreduce(mpi.IN_PLACE, told, mpi.MAX)
    key, first, second = told.tolist()
    varies = np.array([own != first + (second - first) * rank])
    comm.Allreduce(mpi.IN_PLACE, varies, mpi.LOR)
    return key, first, 0 if varies[0] else second - first


@contextmanager
def _making_communicators(mpi: Any) -> Iterator[None]:
    """Raise an error with the remedy if MPI has no communicator left."""
    try:
        yield
    except mpi.Exception as error:
        raise CommunicatorError(
            f"MPI cannot make another group: {error}\nA process has room for some hundred groups (MPICH: 2,048 "
            "communicators, of which a group takes up to three). Release those that are used no more: "
            "group.close(), mesh.close(), or world.close_groups() for all of them"
        ) from error


class MpiBackend(Backend):
    """A communicator over MPI for tensors on the CPU.

    Args:
        comm: An mpi4py intracommunicator, duplicated so that messages never mix with the caller's;
            None means all ranks of the job, for which MPI is started if need be. Collective over it.
        timeout: Seconds after which a blocking collective raises `CollectiveTimeoutError`; None never does.
        parent: The backend that `comm` was split from: `comm` is taken over and freed when this one is closed.
        sizes: Sizes of chunks and messages, the same on all ranks; those of `parent` if not given.

    Attributes:
        mpi_comm: The mpi4py communicator that carries this group's collectives.
        cores: How many cores the ranks have.
        path: Which way large data takes: `"node"`, `"nodes"` or `"plain"`.
        sizes: Sizes of chunks and messages.
    """

    name = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        timeout: float | None = None,
        parent: MpiBackend | None = None,
        sizes: ChunkSizes | None = None,
    ) -> None:
        self._mpi = runtime.start_mpi()
        self.failures = (self._mpi.Exception,)
        comm = runtime.communicator_of_world(self._mpi) if comm is None else comm
        rank = comm.Get_rank()
        self.allows_threads = self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE
        self._on_main_thread = self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED
        worker = Worker(f"axonmpi-mpi-rank{rank}") if self.allows_threads else AtOnce(always=self._on_main_thread)
        super().__init__(rank, comm.Get_size(), worker, timeout=timeout)
        self.sizes: ChunkSizes = sizes or (ChunkSizes() if parent is None else parent.sizes)
        with _making_communicators(self._mpi):
            self.mpi_comm = comm.Dup() if parent is None else comm
            self.cores: CoreShare = core_share(self._mpi, self.mpi_comm) if parent is None else parent.cores
            identity = _identity(self._mpi, self.mpi_comm)
            gives_up = timeout is not None and self.allows_threads
            self.notes = own_record().join(rank, self.size, *identity, gives_up=gives_up)
            self._waiter = RequestWaiter(self._mpi.Request, oversubscribed=self.cores.oversubscribed)
            self._messages = MessagePort(self._mpi, self.mpi_comm, FIRST_TAG_OF_USERS)
            self._pairs = MessagePort(self._mpi, self.mpi_comm, TAG_OF_PAIRS)
            self._connection = connect(
                self._mpi, self.mpi_comm, self.sizes, oversubscribed=self.cores.oversubscribed, timeout=timeout
            )
        if self._connection.obstacle:
            warn_no_shared_memory(self._connection.obstacle)
        self._agree = self._connection.agreement.agree
        self._node_ranks = self._connection.topology.node_ranks
        self.path = self._connection.path
        self.spans_nodes = self.path != "node"
        self._is_open_mpi = self._connection.is_open_mpi
        self.grace = 1.0 if timeout is not None and self.path != "plain" else 0.0
        self.kept_timeout = self.timeout if self.path == "node" else None  # by barriers that collectives begin with
        # Ranks wait for a network asleep, so the thread that communicates takes little from the one that computes.
        self.overlaps = self.allows_threads and (self.cores.spare or self.path != "node")
        _live.add(self)
        _register_with_exits()

    @classmethod
    def of_members(cls, ranks: Sequence[int], *, timeout: float | None = None) -> MpiBackend:
        """Make a communicator of some ranks of the world; collective over these alone: no other rank calls.

        Args:
            ranks: Different numbers in the world, this rank's among them, in order; the same on all of them.
            timeout: As for every backend.
        """
        mpi = runtime.start_mpi()
        with _making_communicators(mpi):
            world = runtime.communicator_of_world(mpi)
            members = world.Get_group().Incl(ranks)
            # Ranks may make several groups at a time, in different orders: the tag tells these apart.
            comm = world.Create_group(members, hash(tuple(ranks)) % (MAX_TAG + 1))
            members.Free()
        backend = cls(comm, timeout=timeout)
        comm.Free()
        return backend

    def abort(self, code: int = 1) -> None:
        """End the whole job now, with exit code `code`; local."""
        if self.is_open:
            self._connection.barrier.mark_failed(f"rank {self.rank} has aborted the job")
        self._mpi.COMM_WORLD.Abort(code)

    @property
    def gathers_ahead(self) -> bool:
        """Whether it saves time to gather early, beside computation."""
        # With Open MPI steps of fully sharded training took an eighth longer for it.
        is_late = self.path == "plain" and self._is_open_mpi
        return self.overlaps and (self.cores.spare or not is_late)

    def _check_open(self, operation: str) -> None:
        super()._check_open(operation)
        if self._on_main_thread:
            runtime.check_thread(self._mpi, operation)

    def set_timeout(self, timeout: Seconds | None) -> None:
        """Change the time-out of operations from now on; local, to be done on all ranks."""
        super().set_timeout(timeout)
        self._connection.barrier.timeout = self.timeout
        if self.path == "node":
            self.kept_timeout = self.timeout

    def give_up(self, reason: str) -> None:
        """Make every later operation raise, and tell the ranks of this node that wait for this one; local."""
        if self.is_open:
            self._connection.barrier.mark_failed(reason)
        super().give_up(reason)

    def stop_worker(self, timeout: float) -> bool:
        """End the worker thread; False if it is still busy after `timeout` seconds; local."""
        return self._worker.close(timeout)

    # ---- reductions ---------------------------------------------------------------------------------------

    def _reduce(self, call: Call, tensor: Tensor) -> None:
        reduce(self._connection, call, tensor)

    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return reduce_scatter(self._connection, call, tensor, dim)

    def _scan(self, call: Call, tensor: Tensor, chosen: range, reverse: bool) -> None:
        scan(self._connection, call, tensor, self._shift, chosen, reverse=reverse)

    # ---- copies -------------------------------------------------------------------------------------------

    def _broadcast(self, call: Call, tensor: Tensor) -> None:
        broadcast(self._connection, call, tensor)

    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return all_gather(self._connection, call, tensor, dim)

    def _all_gather_flat(self, call: Call, tensor: Tensor, output: Tensor) -> None:
        all_gather(self._connection, call, tensor, 0, output)

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor] | None:
        sizes = self._connection.numbers(call, tensor.shape[0] if tensor.dim() else 0)
        sends = {call.root: tensor.contiguous()}
        if self.rank != call.root:
            self._exchange(sends, {})
            return None
        parts = [empty((size, *tensor.shape[1:]) if tensor.dim() else (), tensor.dtype) for size in sizes]
        self._exchange(sends, dict(enumerate(parts)))
        return parts

    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor:
        words = np.zeros(DESCRIPTION_BYTES // 8, np.int64) if tensor is None else describe(tensor)
        broadcast_small(self._connection, call, words.view(np.uint8))
        dtype, shape = described(words)
        start, stop = split_range(shape[0], self.size, self.rank)
        part = empty((stop - start, *shape[1:]), dtype)
        slices = () if tensor is None else tensor.tensor_split(self.size)
        self._exchange({peer: each.contiguous() for peer, each in enumerate(slices)}, {call.root: part})
        return part

    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        self._agree(call)
        questions = np.stack([describe(tensor) for tensor in tensors])
        answers = np.empty_like(questions)
        specs = [[words, DESCRIPTION_BYTES, self._mpi.BYTE] for words in (questions, answers)]
        self._waiter.wait(self.mpi_comm.Ialltoall(*specs))
        received = [empty(shape, dtype) for dtype, shape in (described(answer) for answer in answers)]
        self._exchange({peer: each.contiguous() for peer, each in enumerate(tensors)}, dict(enumerate(received)))
        return received

    def _exchange_rows(self, call: Call, shown: list[Tensor], outputs: list[Tensor], plan: Exchange) -> None:
        exchange_rows(self._connection, call, shown, outputs, plan, self._begin_exchange)

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """Send and receive contiguous tensors all at once, each to or from the rank that is its key."""
        self._begin_exchange(sends, receives)()

    def _begin_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        """Begin what `_exchange` does; return how to wait for it."""
        own, target = sends.pop(self.rank, None), receives.pop(self.rank, None)
        if own is not None and target is not None:
            target.copy_(own)
        requests = []
        for peer in self._next_first(receives):
            requests += self._pairs.start_receive(as_bytes(receives[peer]), peer, 0, self.sizes.message)
        for peer in self._next_first(sends):
            requests += self._pairs.start_send(as_bytes(sends[peer]), peer, 0, self.sizes.message)

        def wait() -> None:
            self._waiter.wait(*requests)
            sends.clear()  # their memory has to live until now

        return wait

    def _next_first(self, peers: Iterable[int]) -> list[int]:
        """Return ranks in an order in which no two ranks begin with the same one; local."""
        return sorted(peers, key=lambda peer: (peer - self.rank) % self.size)

    def _shift(self, data: Tensor, received: Tensor, distance: int) -> bool:
        """Send contiguous data to the rank at a distance, and receive from the one behind; False: there is none."""
        to, source = self.rank + distance, self.rank - distance
        sends = {to: data} if 0 <= to < self.size else {}
        receives = {source: received} if 0 <= source < self.size else {}
        self._exchange(sends, dict(receives))
        return bool(receives)

    def _barrier(self, call: Call) -> None:
        self._agree(call)

    def _divide(self, call: Call, parts: Parts) -> Backend | None:
        self._agree(call)
        color, place = parts.find(self.rank) or (self._mpi.UNDEFINED, 0)
        with _making_communicators(self._mpi):
            comm: Any = self.mpi_comm.Split(color, place)
        if color == self._mpi.UNDEFINED:
            return None
        if comm.size == 1:
            comm.Free()
            return LocalBackend(timeout=self.timeout)
        return MpiBackend(comm, timeout=self.timeout, parent=self)

    # ---- point to point -----------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._messages.send(as_bytes(tensor.contiguous()), dst, tag, self.sizes.message)

    def _recv(self, tensor: Tensor, src: int, tag: int) -> None:
        flat = flat_elements(tensor)
        self._messages.receive(as_bytes(flat), src, tag, self.sizes.message)
        write_back(flat, tensor)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        work = self._messages.send_work(as_bytes(tensor.contiguous()), dst, tag, self.sizes.message)
        work.waiting = functools.partial(self.waiting, "wait for isend", dst, tag=tag)
        return work

    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        flat = flat_elements(tensor)
        finish = functools.partial(write_back, flat, tensor)
        limit = self.sizes.message
        if src is None and tensor.nbytes >= limit:
            raise ValueError(
                f"irecv from any rank: expected fewer than {limit} bytes, got {tensor.nbytes}; name the rank"
            )
        if src is None and not self._is_open_mpi and len(self._node_ranks) < self.size:
            work: RequestWork = self._messages.match_later(as_bytes(flat), tag, finish)
        else:
            work = self._messages.receive_work(as_bytes(flat), src, tag, limit, finish)
        work.waiting = functools.partial(self.waiting, "wait for irecv", src, tag=tag)
        return work

    # ---- memory -------------------------------------------------------------------------------------------

    def _symmetric_empty(self, call: Call) -> Tensor:
        self._agree(call)
        if not call.nbytes:
            return empty(call.shape, call.dtype)
        return self._connection.symmetric_empty(call.nbytes).view(call.dtype).view(call.shape)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this group that share the memory of `node_empty`; local. See `Backend.node_ranks`."""
        return self._node_ranks

    def _node_empty(self, call: Call) -> Tensor:
        self._agree(call)
        if not call.nbytes:
            return empty(call.shape, call.dtype)
        return self._connection.node_empty(call.nbytes).view(call.dtype).view(call.shape)

    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Raise if a rank of this node has ended; elsewhere a rank that fails ends the job; local."""
        self._connection.barrier.check_alive(what)

    def _counters(self, memory: Tensor) -> NodeCounters:
        fence, busy = self._connection.barrier.sync, self.cores.oversubscribed
        return NodeCounters(memory, fence, self.timeout, self.check_peers, self.give_way, oversubscribed=busy)

    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        if output.numel() and not self._connection.is_common(output):
            raise ValueError("output: expected memory from node_empty() of this group, got other memory")
        all_gather_into(self._connection, call, tensor, output, sizes)

    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        reduce_scatter_into(self._connection, call, parts, output, sizes)

    def _release(self) -> None:
        _live.discard(self)
        self._connection.free()
        self.mpi_comm.Free()
        # Its memory goes with the group, however long anybody keeps the closed one.
        del self._agree, self._connection, self._messages, self._pairs
