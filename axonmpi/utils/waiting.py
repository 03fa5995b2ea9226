"""Waiting loops in Python, for messages and GPUs: polls, yields and naps that leave the core to computations."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

YIELDS = 10
"""Number of yields before the first nap."""
REQUEST_YIELDS = 1000
"""Number of yields before the first nap if ranks outnumber the cores."""
NAP_SECONDS = 1e-4
NAP_BESIDE_SECONDS = 5e-4
"""Length of a nap beside a computation: each poll takes a core from it."""


class _Thread(threading.local):
    waiters: set[int] | None = None  # a class attribute: AttributeError on a new thread takes ten times as long


_thread = _Thread()


class Backoff:
    """Pause between two polls: yields the core first, then naps.

    A nap takes a tenth of the time waited so far, within limits.

    Args:
        yields: Number of yields before the first nap.
        shortest: Seconds of the shortest nap.
        longest: Seconds of the longest nap; `shortest` if None.
    """

    def __init__(self, yields: int = 0, shortest: float = NAP_SECONDS, longest: float | None = None) -> None:
        self._yields = yields
        self._shortest = shortest
        self._longest = shortest if longest is None else longest
        self._left = yields
        self._began = 0.0

    def rest(self) -> None:
        """Pause before the next poll; local."""
        if self._left > 0:
            self._left -= 1
            os.sched_yield()
            return
        if not self._began:
            self._began = time.monotonic()
        time.sleep(min(max((time.monotonic() - self._began) / 10, self._shortest), self._longest))

    def reset(self) -> None:
        """Restart with yields, for the next wait; local."""
        self._left = self._yields
        self._began = 0.0


def wait_until(ready: Callable[[], object], backoff: Backoff, limit: float | None = None) -> bool:
    """Poll `ready()` until it returns true; local.

    Args:
        ready: Function to poll, at least once.
        backoff: Pauses between two polls.
        limit: Time limit in seconds; None waits without limit.

    Returns:
        False if the time limit was reached first.
    """
    deadline = None if limit is None else time.monotonic() + limit
    while not ready():
        if deadline is not None and time.monotonic() > deadline:
            return False
        backoff.rest()
    return True


class RequestWaiter:
    """Waits for MPI requests that leave the core to computation and to the awaited ranks.

    MPI itself polls without a pause.

    Args:
        request: The class `mpi4py.MPI.Request`.
        oversubscribed: True if ranks outnumber the cores on any node.
    """

    def __init__(self, request: Any, *, oversubscribed: bool) -> None:
        self._request = request
        self._oversubscribed = oversubscribed

    def wait(self, *requests: Any) -> None:
        """Wait for all requests: mostly asleep beside a computation, yielding if oversubscribed; local."""
        beside = is_beside_computation()
        if not beside and not self._oversubscribed:
            self._request.Waitall(requests)
            return
        if self._request.Testall(requests):
            return
        # After a yield to a thread that computes, the core comes back after milliseconds; after a nap, at once.
        backoff = Backoff(0 if beside else REQUEST_YIELDS)
        while not self._request.Testall(requests):
            if beside and not is_beside_computation():  # the computation is over and waits for these requests
                self.wait(*requests)
                return
            backoff.rest()


def network_backoff() -> Backoff:
    """Return a Backoff for waits for the network; local."""
    return Backoff(0, NAP_BESIDE_SECONDS) if is_beside_computation() else Backoff(YIELDS)


def is_beside_computation() -> bool:
    """Return True if another thread of this rank may compute while the calling thread communicates; local."""
    return _thread.waiters is not None and not _thread.waiters


def compute_beside(waiters: set[int]) -> None:
    """Declare that other threads of this rank compute while the calling thread communicates; local.

    Args:
        waiters: Ids of the threads that wait for the calling thread, kept up to date by the caller; empty while the
            main thread may be computing.
    """
    _thread.waiters = waiters


@contextmanager
def asleep() -> Iterator[None]:
    """Let the calling thread nap in waits of a `with` block, as beside a computation: they may be long; local."""
    before = _thread.waiters
    _thread.waiters = set()
    try:
        yield
    finally:
        _thread.waiters = before
