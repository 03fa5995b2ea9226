"""Where mock ranks meet (layer 2).

All groups of one mock world live in a `House`, each in a `Room` of its own. A rank that fails says so to the
house, and every rank that waits in any room, now or later, raises `RankFailedError`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from typing import Any

from torch import Tensor

from ..errors import CollectiveTimeoutError, RankFailedError

__all__ = ["House", "Room"]


class House:
    """What all groups of one mock world share: one lock, the failed ranks and the rooms."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failed: dict[int, BaseException] = {}
        self._rooms: dict[Any, Room] = {}

    def room(self, key: Any, ranks: tuple[int, ...]) -> Room:
        """Find or make the room of a group; local."""
        with self.changed:
            return self._rooms.setdefault(key, Room(self, ranks))

    def fail(self, rank: int, error: BaseException) -> None:
        """Say that a rank has failed; local."""
        with self.changed:
            self.failed.setdefault(rank, error)
            self.changed.notify_all()

    def check(self, what: str) -> None:
        """Raise if a rank has failed; local."""
        if self.failed:
            rank, error = next(iter(self.failed.items()))
            raise RankFailedError(
                f"rank {rank} failed while {what} waited for it: {type(error).__name__}: {error}"
            ) from error

    def wait_until(self, ready: Any, what: str, missing: Any, timeout: float | None) -> None:
        """Wait for `ready()`; the lock is held. `missing()` names the ranks that have not come."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not ready():
            self.check(what)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise CollectiveTimeoutError(f"{what} waited {limit:g} s for {missing()}")
            self.changed.wait(remaining)


class Room:
    """Where the ranks of one group meet."""

    def __init__(self, house: House, ranks: tuple[int, ...]) -> None:
        self.house = house
        self.ranks = ranks
        self._rounds: dict[int, dict[int, Any]] = defaultdict(dict)
        self._taken: dict[int, int] = defaultdict(int)
        self._messages: dict[tuple[int, int, int], list[Tensor | None]] = defaultdict(list)
        self._tickets: dict[tuple[int, int, int], itertools.count[int]] = defaultdict(itertools.count)

    def swap(self, number: int, rank: int, item: Any, what: str, timeout: float | None) -> list[Any]:
        """Give `item` in round `number`; return the items of all ranks."""
        size = len(self.ranks)
        with self.house.changed:
            given = self._rounds[number]
            given[rank] = item
            if len(given) == size:
                self.house.changed.notify_all()

            def missing() -> str:
                names = [str(self.ranks[i]) for i in range(size) if i not in given]
                return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"

            self.house.wait_until(lambda: len(given) == size, what, missing, timeout)
            self._taken[number] += 1
            if self._taken[number] == size:
                del self._rounds[number], self._taken[number]
        return [given[i] for i in range(size)]

    def post(self, channel: tuple[int, int, int], message: Tensor) -> None:
        """Leave a message for (source, destination, tag)."""
        with self.house.changed:
            self._messages[channel].append(message)
            self.house.changed.notify_all()

    def ticket(self, channel: tuple[int, int, int]) -> int:
        """Say which message of the channel a receive, posted now, will get."""
        with self.house.changed:
            return next(self._tickets[channel])

    def arrived(self, channel: tuple[int, int, int], ticket: int) -> bool:
        """Say whether a message is there; local."""
        return len(self._messages[channel]) > ticket

    def take(self, channel: tuple[int, int, int], ticket: int, timeout: float | None) -> Tensor:
        """Wait for a message and return it."""
        with self.house.changed:
            self.house.wait_until(
                lambda: self.arrived(channel, ticket),
                f"recv(tag={channel[2]})",
                lambda: f"rank {self.ranks[channel[0]]}",
                timeout,
            )
            message = self._messages[channel][ticket]
            self._messages[channel][ticket] = None
        assert message is not None
        return message
