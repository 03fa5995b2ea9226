"""Ranks as threads of one process, with the contract and the checks of a real backend.

For tests of distributed code without MPI. `MockBackend.create_world(n)` gives n backends, one for each of n
threads. They meet in a `Rendezvous`: each rank puts its part down, and when all are there each takes the whole
list.

    rank 0 ── put part 0 ─┐                 ┌─ [part 0, part 1, part 2]
    rank 1 ── put part 1 ─┼─ all are there ─┼─ [part 0, part 1, part 2]     then each reduces in rank order
    rank 2 ── put part 2 ─┘                 └─ [part 0, part 1, part 2]

A rank that fails says so to the `MockWorld` which all rendezvous of a world share, and every rank that waits, now
or later, raises `RankFailedError`. A rank that has returned leaves the rendezvous, and ranks that wait for it
raise, too. Results are the same bits as MPI's. Each backend keeps a log of its operations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CollectiveMismatchError
from ...launch.user_variables import pretended_node
from ...types import CompletedWork, ReduceOp, Seconds, Work
from ...utils.arguments import seconds
from ..buffers import copy_message, copy_of
from ..call import Call, mismatch_error
from ..call_site import call_site, text_with_site
from ..checks import check_named
from ..contract import Backend
from ..counters import NodeCounters
from ..flat_parts import FlatParts
from ..ranks import Parts
from ..reduction import reduce_in_rank_order, reduce_wide_into
from ..worker import Worker
from .rendezvous import MockWorld, Rendezvous

DEFAULT_TIMEOUT = 60.0
"""Seconds after which a mock rank that waits for the others gives up."""
MAX_LOGGED = 100_000
"""Operations that a log has at most."""


@dataclass(frozen=True)
class LoggedCall:
    """One operation in a mock backend's log.

    Attributes:
        operation: Name of the operation, as in `Backend`.
        dtype: Dtype of this rank's tensor, or None.
        shape: Its shape; -1 for dimensions in which the ranks may differ.
        op: The reduction, or None.
        root: Root, source or destination rank within the group, or None.
        nbytes: Size of this rank's tensor.
        ranks: Global mock ranks of the group.
    """

    operation: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    op: ReduceOp | None
    root: int | None
    nbytes: int
    ranks: tuple[int, ...]


class _ReceiveWork(Work):
    """A receive that was posted; the message is copied when somebody waits for it or asks."""

    def __init__(self, backend: MockBackend, tensor: Tensor, channel: tuple[int, int, int]) -> None:
        self._backend = backend
        self._tensor = tensor
        self._channel = channel
        self._ticket = backend.rendezvous.ticket(channel)
        self._complete = False
        self._error: Exception | None = None

    def wait(self, timeout: Seconds | None = None) -> None:
        """Block until the message is in the tensor; see `Work.wait`."""
        if not self._complete:
            self._receive(seconds("timeout", timeout, positive=False))
        if self._error is not None:
            raise self._error

    def _receive(self, timeout: float | None) -> None:
        try:
            message = self._backend.rendezvous.take(self._channel, self._ticket, timeout)
            copy_message(message, self._tensor, self._channel[0])
        except CollectiveMismatchError as error:
            self._error = error
        self._complete = True

    def done(self) -> bool:
        """Return True if the message is there, was of another size, or will never come."""
        if not self._complete and self._backend.rendezvous.is_settled(self._channel, self._ticket):
            self._receive(None)
        return self._complete

    def result(self) -> None:
        """Wait; a receive has no value of its own."""
        self.wait()


class MockBackend(Backend):
    """One rank of a world of threads; made by `create_world`.

    Attributes:
        log: The latest operations of this rank in this group, a list of `LoggedCall` that may be cleared.
        rendezvous: The meeting point of the group's ranks.
        record: The rank's record.
    """

    name = "mock"
    device_types = ("cpu", "cuda")

    def __init__(self, rendezvous: Rendezvous, rank: int, *, timeout: float | None = None) -> None:
        worker = Worker(f"axonmpi-mock-rank{rendezvous.ranks[rank]}")
        super().__init__(rank, len(rendezvous.ranks), worker)
        self.rendezvous = rendezvous
        self.record = rendezvous.world.records[rendezvous.ranks[rank]]
        self.notes = self.record.join(rank, self.size, rendezvous.number, rendezvous.ranks[0])
        rendezvous.enter(rank, worker)
        self.log: list[LoggedCall] = []
        self._wait_limit = timeout
        self._round = 0

    @classmethod
    def create_world(cls, size: int, *, timeout: Seconds | None = None) -> list[MockBackend]:
        """Make `size` backends that talk to each other, each to be used by a thread of its own; local.

        Args:
            size: Number of ranks, at least 1.
            timeout: Seconds that a rank waits for the others before `CollectiveTimeoutError`; None means 60.

        Returns:
            The backends in rank order.

        Raises:
            ValueError: `size` is below 1.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"size: expected a positive number of ranks, got {size!r}")
        limit = seconds("timeout", timeout)
        world = MockWorld(DEFAULT_TIMEOUT if limit is None else limit)
        rendezvous = world.rendezvous("world", tuple(range(size)))
        return [cls(rendezvous, rank, timeout=limit) for rank in range(size)]

    def fail(self, error: BaseException) -> None:
        """Say that this rank has failed: ranks that wait, now or later, raise `RankFailedError`; local."""
        self.rendezvous.world.fail(self.rendezvous.ranks[self.rank], error)

    def leave(self) -> None:
        """Say that this rank has returned: ranks that wait for a call of it raise `CollectiveMismatchError`; local.

        Operations that the rank has begun in any of its groups are done before.
        """
        self.rendezvous.world.leave(self.rendezvous.ranks[self.rank])

    def abort(self, code: int = 1) -> None:
        """Fail this rank, which releases the others; local."""
        self.fail(SystemExit(code))

    # ---- meeting ------------------------------------------------------------------------------------------

    def _agree(self, call: Call, item: Any = None, nbytes: int | None = None) -> list[Any]:
        """Meet the other ranks; return their items if all made the same call."""
        self._note(call.operation, call, call.root, call.nbytes if nbytes is None else nbytes)
        given = self._meet(call, (call, item, call_site()))
        if any(other.key != call.key for other, *_ in given):
            raise mismatch_error([text_with_site(other, site) for other, _, site in given])
        return [item for _, item, _ in given]

    def _meet(self, call: Call, item: Any = None) -> list[Any]:
        """Wait for the other ranks, in a call that all have agreed on, or to compare calls; return their items."""
        number, self._round = self._round, self._round + 1
        return self.rendezvous.swap(number, self.rank, item, str(call), self._wait_limit)

    def _note(self, operation: str, call: Call | Tensor, root: int | None, nbytes: int) -> None:
        op = call.op if isinstance(call, Call) else None
        entry = LoggedCall(operation, call.dtype, tuple(call.shape), op, root, nbytes, self.rendezvous.ranks)
        if len(self.log) >= MAX_LOGGED:
            del self.log[: MAX_LOGGED // 2]
        self.log.append(entry)

    # ---- operations ---------------------------------------------------------------------------------------

    def _reduce(self, call: Call, tensor: Tensor) -> None:
        parts = self._agree(call, copy_of(tensor))
        if call.root in (None, self.rank):
            reduce_in_rank_order(parts, call.op, tensor)

    def _broadcast(self, call: Call, tensor: Tensor) -> None:
        is_source = self.rank == call.root
        parts = self._agree(call, copy_of(tensor) if is_source else None)
        if not is_source:
            tensor.copy_(parts[call.root])

    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._agree(call, copy_of(tensor), tensor.nbytes), dim=dim)

    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        parts = self._agree(call, copy_of(tensor))
        slices = [part.tensor_split(self.size, dim)[self.rank] for part in parts]
        result = torch.empty_like(slices[0], memory_format=torch.contiguous_format)
        reduce_in_rank_order(slices, call.op, result)
        return result

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor] | None:
        parts = self._agree(call, copy_of(tensor), tensor.nbytes)
        return [copy_of(part) for part in parts] if self.rank == call.root else None

    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor:
        given = self._agree(
            call, None if tensor is None else copy_of(tensor), 0 if tensor is None else tensor.nbytes
        )
        part: Tensor = given[call.root].tensor_split(self.size)[self.rank]
        return copy_of(part)

    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        given = self._agree(call, [copy_of(tensor) for tensor in tensors], nbytes)
        return [sent[self.rank] for sent in given]

    def _barrier(self, call: Call) -> None:
        self._agree(call)

    def _symmetric_empty(self, call: Call) -> Tensor:
        self._agree(call)
        return torch.empty(call.shape, dtype=call.dtype, device="cpu")

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this group that share the memory of `node_empty`; local. See `Backend.node_ranks`."""
        nodes = [pretended_node(rank) for rank in self.rendezvous.ranks]
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])

    def _node_empty(self, call: Call) -> Tensor:
        first = self.node_ranks[0]
        made = torch.empty(call.shape, dtype=call.dtype, device="cpu") if self.rank == first else None
        common: Tensor = self._agree(call, made)[first]
        return common.data  # each rank counts its own changes

    def _counters(self, memory: Tensor) -> NodeCounters:
        limit = self.rendezvous.world.timeout if self.timeout is None else self.timeout
        return NodeCounters(memory, None, limit, self.check_peers, self.give_way, oversubscribed=True)

    def give_way(self) -> None:
        """Let other threads run: sleeping gives Python's lock away, which yielding the core does not."""
        time.sleep(0)

    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Raise if a mock rank has failed, or if `peer` has returned; local. See `Backend.check_peers`."""
        self.rendezvous.check(what, [] if peer is None else [peer])

    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        shares = output.split(sizes)
        parts = self._agree(call, copy_of(shares[self.rank] if tensor is None else tensor))
        here = self.node_ranks
        for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
            writer = rank if rank in here else here[rank % len(here)]
            if writer == self.rank:
                share.data.copy_(part)
        self._meet(call)

    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        given = self._agree(call, parts.flat())
        reduce_wide_into([flat.split(sizes)[self.rank] for flat in given], call.op, output)

    def _divide(self, call: Call, parts: Parts) -> MockBackend | None:
        found = parts.find(self.rank)
        members = () if found is None else tuple(self.rendezvous.ranks[rank] for rank in parts[found[0]])
        # Found before ranks meet: one that is quick may send, close its group and be gone before another looks.
        rendezvous = self.rendezvous.world.rendezvous((self.rendezvous.number, self._round, members), members)
        self._agree(call)
        return None if found is None else MockBackend(rendezvous, found[1], timeout=self._wait_limit)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._note("send", tensor, dst, tensor.nbytes)
        self.rendezvous.post((self.rank, dst, tag), copy_of(tensor))

    def _recv(self, tensor: Tensor, src: int, tag: int) -> None:
        self._note("recv", tensor, src, tensor.nbytes)
        _ReceiveWork(self, tensor, (src, self.rank, tag)).wait(self._wait_limit)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._send(tensor, dst, tag)
        return CompletedWork()

    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        src = check_named(src, self.name)
        self._note("recv", tensor, src, tensor.nbytes)
        return _ReceiveWork(self, tensor, (src, self.rank, tag))

    def _release(self) -> None:
        """Threads hold nothing that needs to be given back; the log outlives the group."""

    def global_ranks(self) -> Sequence[int]:
        """Return the mock world's numbers of this group's ranks; local."""
        return self.rendezvous.ranks
