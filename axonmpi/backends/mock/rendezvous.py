"""The rendezvous of mock ranks, which are threads.

A `MockWorld` has a `Rendezvous` for each of its groups. A rank that fails tells the world, and every rank that
waits at any rendezvous, now or later, raises `RankFailedError`. A rank that has returned leaves each rendezvous
when the operations that it has begun there are done; ranks that wait for it raise `CollectiveMismatchError`.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...errors import CollectiveMismatchError, CollectiveTimeoutError, RankFailedError
from ...record import OwnRecord, private_record
from ...utils.text import name_ranks
from ..worker import Worker


class MockWorld:
    """State of one mock world, common to its groups: a lock, the failed ranks, the rendezvous, and the records."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failed: dict[int, BaseException] = {}
        self.numbers = itertools.count(1)
        self.records: defaultdict[int, OwnRecord] = defaultdict(private_record)
        self._rendezvous: weakref.WeakValueDictionary[Any, Rendezvous] = weakref.WeakValueDictionary()

    def rendezvous(self, key: Any, ranks: tuple[int, ...]) -> Rendezvous:
        """Find or make the rendezvous of a group; local."""
        with self.changed:
            return self._rendezvous.setdefault(key, Rendezvous(self, ranks))

    def fail(self, rank: int, error: BaseException) -> None:
        """Say that a rank has failed; local."""
        with self.changed:
            self.failed.setdefault(rank, error)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Say that a rank has returned and calls nothing more; local."""
        with self.changed:
            entered = [group for group in self._rendezvous.values() if rank in group.ranks]
        for group in entered:
            group.leave_when_idle(group.ranks.index(rank))

    def check(self, what: str) -> None:
        """Raise if a rank has failed; local."""
        if self.failed:
            rank, error = next(iter(self.failed.items()))
            raise RankFailedError(
                f"rank {rank} failed while {what} waited for it: {type(error).__name__}: {error}"
            ) from error

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], Sequence[int]],
        rendezvous: Rendezvous,
        timeout: float | None,
    ) -> None:
        """Wait for `ready()`; the lock is held. `missing()` are the members of the rendezvous who have not come."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not ready():
            rendezvous.check(what, missing())
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise CollectiveTimeoutError(f"{what} waited {limit:g} s for {rendezvous.names(missing())}")
            self.changed.wait(remaining)


class Rendezvous:
    """The meeting point of one group's ranks."""

    def __init__(self, world: MockWorld, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.ranks = ranks
        self.number = next(world.numbers)
        self._rounds: dict[int, dict[int, Any]] = defaultdict(dict)
        self._taken: dict[int, int] = defaultdict(int)
        self._posted: dict[tuple[int, int, int], itertools.count[int]] = defaultdict(itertools.count)
        self._messages: dict[tuple[int, int, int], dict[int, Tensor]] = defaultdict(dict)
        self._tickets: dict[tuple[int, int, int], itertools.count[int]] = defaultdict(itertools.count)
        self._workers: weakref.WeakValueDictionary[int, Worker] = weakref.WeakValueDictionary()
        self._left: set[int] = set()
        self._released: set[int] = set()

    def enter(self, rank: int, worker: Worker) -> None:
        """Register the worker for the asynchronous operations of a member; local."""
        with self.world.changed:
            self._workers[rank] = worker

    def leave_when_idle(self, rank: int) -> None:
        """Let a member leave when its operations are done; local."""
        worker = self._workers.get(rank)
        if worker is not None and worker.busy:
            worker.submit("return", partial(self._leave, rank))
        else:
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        with self.world.changed:
            self._left.add(rank)
            self.world.changed.notify_all()

    def check(self, what: str, missing: Sequence[int]) -> None:
        """Raise if one of the members waited for has left or failed, or any rank has failed; local."""
        gone = [rank for rank in missing if rank in self._left]
        if gone and not any(self.ranks[rank] in self.world.failed for rank in missing):
            has = "which has returned" if len(gone) == 1 else "which have returned"
            raise CollectiveMismatchError(f"{what} waits for {self.names(gone)}, {has} and calls nothing more")
        self.world.check(what)

    def names(self, members: Sequence[int]) -> str:
        """Name members by their numbers in the world."""
        return name_ranks(self.ranks[rank] for rank in members)

    def swap(self, number: int, rank: int, item: Any, what: str, timeout: float | None) -> list[Any]:
        """Give `item` in round `number`; return the items of all ranks."""
        size = len(self.ranks)
        with self.world.changed:
            if rank in self._released:  # it is not in the others' round any more
                self.world.check(what)
            given = self._rounds[number]
            given[rank] = item
            if len(given) == size:
                self.world.changed.notify_all()

            def missing() -> list[int]:
                return [i for i in range(size) if i not in given]

            try:
                self.world.wait_until(lambda: len(given) == size, what, missing, self, timeout)
            except RankFailedError:
                self._released.add(rank)
                raise
            self._taken[number] += 1
            if self._taken[number] == size:
                del self._rounds[number], self._taken[number]
        return [given[i] for i in range(size)]

    def post(self, channel: tuple[int, int, int], message: Tensor) -> None:
        """Leave a message for (source, destination, tag)."""
        with self.world.changed:
            self._messages[channel][next(self._posted[channel])] = message
            self.world.changed.notify_all()

    def ticket(self, channel: tuple[int, int, int]) -> int:
        """Return the number of the channel's message that a receive, posted now, will get."""
        with self.world.changed:
            return next(self._tickets[channel])

    def arrived(self, channel: tuple[int, int, int], ticket: int) -> bool:
        """Return True if a message is there; local."""
        return ticket in self._messages[channel]

    def is_settled(self, channel: tuple[int, int, int], ticket: int) -> bool:
        """Return True if a message is there, or never will be as its sender has returned; local."""
        return self.arrived(channel, ticket) or channel[0] in self._left

    def take(self, channel: tuple[int, int, int], ticket: int, timeout: float | None) -> Tensor:
        """Wait for a message and return it."""
        with self.world.changed:
            self.world.wait_until(
                lambda: self.arrived(channel, ticket),
                f"recv(tag={channel[2]})",
                lambda: [channel[0]],
                self,
                timeout,
            )
            return self._messages[channel].pop(ticket)
