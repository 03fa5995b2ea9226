"""Runs of a function on mock ranks, one thread each.

    run_ranks(3, fn) ─┬─ thread 0: fn(world 0) ─┐
                      ├─ thread 1: fn(world 1) ─┼─ [result 0, result 1, result 2]
                      └─ thread 2: fn(world 2) ─┘

A rank that raises releases the others, which then raise `RankFailedError`; the caller gets the first rank's
exception. A rank that waits for a rank that has returned raises `CollectiveMismatchError` at once. Ranks in a
deadlock are released after the time-out, and the error has the stack of each rank.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends import MockBackend
from ..errors import CollectiveTimeoutError, RankFailedError
from ..groups.world import World
from ..types import Seconds
from ..utils.arguments import seconds
from ..utils.text import name_ranks
from .merged_texts import merge_texts
from .stacks import stack_of

_NO_LIMIT = threading.TIMEOUT_MAX / 4
_RELEASE_SECONDS = 2.0
"""Time in which released ranks have to end; after it they are left behind as daemon threads."""


@dataclass(frozen=True)
class RankRun:
    """The end of a run on mock ranks: results and errors.

    Attributes:
        size: Number of ranks.
        results: The function's results, by rank; only of ranks that returned.
        errors: Exceptions by rank; only of ranks that raised before they were released.
        timeout: The error with the stack of each rank, if the ranks did not end in time.
    """

    size: int
    results: Mapping[int, Any]
    errors: Mapping[int, BaseException]
    timeout: CollectiveTimeoutError | None = None

    @property
    def causes(self) -> dict[int, BaseException]:
        """The errors, without those that followed from another rank's failure."""
        own = {rank: error for rank, error in self.errors.items() if not isinstance(error, RankFailedError)}
        return own or dict(self.errors)

    def error(self) -> BaseException | None:
        """Return the error of the run, or None."""
        causes = self.causes
        return causes[min(causes)] if causes else self.timeout


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: Seconds | None = 60.0) -> list[Any]:
    """Run `fn(world, *args)` on n mock ranks, each on a thread of its own; local, no MPI needed.

    Each thread has its own world as default, so functions with `group=None` work.

    Args:
        n: Number of ranks, at least 1.
        fn: Called once a rank with that rank's `World`.
        *args: Passed to each rank, not copied.
        timeout: Seconds for the whole run, None for no limit.

    Returns:
        The results of `fn` in rank order.

    Raises:
        Exception: The exception of the lowest rank that failed by itself, with a note that names all such ranks.
        CollectiveTimeoutError: The ranks did not end in time; the message has every rank's stack.
        ValueError: `n` is below 1, or the time-out is not positive.
    """
    limit = seconds("timeout", timeout)
    run = start_ranks(n, lambda world: fn(world, *args), math.inf if limit is None else limit)
    error = run.error()
    if error is not None:
        if n > 1 and run.causes:
            _add_note(error, f"raised on {name_ranks(run.causes)} of {n} mock ranks")
        if run.timeout is not None and error is not run.timeout:
            _add_note(error, str(run.timeout))
        raise error
    return [run.results[rank] for rank in range(n)]


def start_ranks(n: int, body: Callable[[World], Any], timeout: float) -> RankRun:
    """Run `body(world)` on n mock ranks until all have ended or were left behind; local, does not raise."""
    timeout = min(timeout, _NO_LIMIT)
    # The limit of a single wait is beyond the limit of the run, whose error can show all the stacks.
    peers = World.mock(n, timeout=2 * timeout).peers
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(world: World) -> None:
        __tracebackhide__ = True
        backend = world.default_group.backend.control
        assert isinstance(backend, MockBackend)
        try:
            with world.activate():
                result = body(world)
            backend.leave()
            results[world.rank] = result
        except BaseException as error:
            errors[world.rank] = error
            world.fail(error)

    threads = [
        threading.Thread(target=run, args=(world,), name=f"mock rank {world.rank}", daemon=True) for world in peers
    ]
    for thread in threads:
        thread.start()
    try:
        ended = _join(threads, timeout)
    except BaseException as error:  # an interrupt of the caller: the ranks must not wait for ever
        _release(peers, error)
        raise
    if ended:
        if errors:  # asynchronous operations that a failed rank never joined must end too
            _release(peers, errors[min(errors)])
        for world in peers:
            world.close()
        return RankRun(n, results, errors)
    stuck = {rank: stack_of(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    late = CollectiveTimeoutError(
        f"{name_ranks(stuck)} of {n} mock ranks did not end within {timeout:g} s\n{merge_texts(stuck, 'stack of ')}"
    )
    run_so_far = RankRun(n, dict(results), dict(errors), late)
    _release(peers, late)
    _join(threads, _RELEASE_SECONDS)
    return run_so_far


def _join(ranks: Sequence[threading.Thread], timeout: float) -> bool:
    """Return True once all threads have ended, False after the time-out."""
    deadline = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    return not any(rank.is_alive() for rank in ranks)


def _release(peers: Sequence[World], error: BaseException) -> None:
    for world in peers:
        world.fail(error)


def _add_note(error: BaseException, note: str) -> None:
    """Attach a note; before Python 3.11 at the end of the message, if that is a text."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
