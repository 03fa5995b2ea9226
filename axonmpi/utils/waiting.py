"""Waiting without taking the core from threads that compute."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

YIELDS = 10
"""Number of yields before the first nap."""
REQUEST_YIELDS = 1000
"""How often a rank yields while other ranks, which outnumber the cores, have to run first."""
NAP_SECONDS = 1e-4
NAP_BESIDE_SECONDS = 5e-4
"""Of a thread that communicates while others compute: each look takes a core from them."""


class _Thread(threading.local):
    waiters: set[int] | None = None  # of the class, since looking for what a thread lacks takes ten times as long


_thread = _Thread()


class Backoff:
    """Waiting between two looks at what other ranks, processes or the network do: yields the core, then naps.

    A nap is a tenth of the time waited so far, within limits.

    Args:
        yields: How often the core is yielded before the first nap.
        shortest: Seconds of the shortest nap.
        longest: Seconds of the longest; `shortest` if not given.
    """

    def __init__(self, yields: int = 0, shortest: float = NAP_SECONDS, longest: float | None = None) -> None:
        self._yields = yields
        self._shortest = shortest
        self._longest = shortest if longest is None else longest
        self._left = yields
        self._began = 0.0

    def rest(self) -> None:
        """Wait before the next look; local."""
        if self._left > 0:
            self._left -= 1
            os.sched_yield()
            return
        if not self._began:
            self._began = time.monotonic()
        time.sleep(min(max((time.monotonic() - self._began) / 10, self._shortest), self._longest))

    def reset(self) -> None:
        """Begin anew: what was waited for has come; local."""
        self._left = self._yields
        self._began = 0.0


def wait_until(ready: Callable[[], object], backoff: Backoff, limit: float | None = None) -> bool:
    """Look again and again whether `ready()` is true; local.

    Args:
        ready: Called once at least.
        backoff: How to wait between two looks.
        limit: Seconds; None waits as long as it takes.

    Returns:
        Whether it became true in time.
    """
    deadline = None if limit is None else time.monotonic() + limit
    while not ready():
        if deadline is not None and time.monotonic() > deadline:
            return False
        backoff.rest()
    return True


class RequestWaiter:
    """Waiting for MPI's requests: MPI polls, which takes a core from computation, or from the awaited rank itself.

    Args:
        request: The class `mpi4py.MPI.Request`.
        oversubscribed: Whether ranks outnumber the cores anywhere.
    """

    def __init__(self, request: Any, *, oversubscribed: bool) -> None:
        self._request = request
        self._oversubscribed = oversubscribed

    def wait(self, *requests: Any) -> None:
        """Wait for all of them: asleep most of the time beside a computation, yielding among many ranks; local."""
        beside = is_beside_computation()
        if not beside and not self._oversubscribed:
            self._request.Waitall(requests)
            return
        if self._request.Testall(requests):
            return
        # After a yield to a thread that computes, the core comes back after milliseconds; after a nap, at once.
        backoff = Backoff(0 if beside else REQUEST_YIELDS)
        while not self._request.Testall(requests):
            if beside and not is_beside_computation():  # the computation is over, and waits for this
                self.wait(*requests)
                return
            backoff.rest()


def network_backoff() -> Backoff:
    """Return a Backoff for what the network brings; local."""
    return Backoff(0, NAP_BESIDE_SECONDS) if is_beside_computation() else Backoff(YIELDS)


def is_beside_computation() -> bool:
    """Say whether the calling thread communicates while others of its rank compute, or may; local."""
    return _thread.waiters is not None and not _thread.waiters


def compute_beside(waiters: set[int]) -> None:
    """Take note that other threads of this rank compute while the calling one communicates; local.

    Args:
        waiters: Those of them that wait for the calling one, as long as they do: then none is held up by it.
    """
    _thread.waiters = waiters
