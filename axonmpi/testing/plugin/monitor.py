"""A thread on each real rank that ends the job when a test does not end.

A rank that is stuck in MPI cannot say so, and the others cannot go on without it. So each rank has a thread that
knows until when the current step must be over and talks to the other ranks' threads on a communicator of its own:

    rank 2: a limit is over ── REQUEST ──> all other ranks
            prints, ends the job <── STATE ── their failures, output and stacks

Where limits of several ranks are over at the same time, the lowest of these ranks does it.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...utils.pipes import wait_until_read
from ..rank_text import merge_texts
from ..stacks import all_stacks

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Monitor"]

_REQUEST, _STATE = 1, 2
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_DRAIN_SECONDS = 2.0
_ABORT_SECONDS = 3.0


@dataclass(frozen=True)
class _Limit:
    deadline: float
    reason: str
    failure: str


@dataclass(frozen=True)
class _State:
    """What a rank says about itself when the job is ended."""

    failure: str = ""
    output: str = ""
    stacks: str = "  (no answer: it runs code that does not let other threads run)"


class Monitor:
    """Ends the job when a limit set on any rank is over.

    Args:
        comm: Used by nobody else.
        stream: File descriptor to print to; must not be captured.
        abort: Ends the job.
        output: Returns what this rank printed in the current test.
        earlier: Returns the failures of the tests before, which are not printed yet.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        stream: int,
        abort: Callable[[], None],
        output: Callable[[], str],
        earlier: Callable[[], str],
    ) -> None:
        self.comm = comm
        self._rank: int = comm.Get_rank()
        self._stream = stream
        self._abort = abort
        self._output = output
        self._earlier = earlier
        self._limits: list[_Limit] = []
        self._sent: list[MPI.Request] = []  # a message's memory lives in its request
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonmpi test monitor", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float, reason: str, failure: str = "") -> Iterator[None]:
        """End the job if the `with` block does not end in time; local.

        Args:
            seconds: How long it may take.
            reason: What to print then.
            failure: How this rank has failed already, printed as well.
        """
        limit = _Limit(time.monotonic() + seconds, reason, failure)
        self._limits.append(limit)
        try:
            yield
        finally:
            self._limits.remove(limit)

    def stop(self) -> None:
        """End the thread; local, may be called twice."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        other_ends_job = False
        while not self._stop.wait(_POLL_SECONDS):
            other_ends_job |= self._answer() is not None
            now = time.monotonic()
            over = next((limit for limit in tuple(self._limits) if now > limit.deadline), None)
            if over is not None and not other_ends_job:
                self._end_job(over.reason)
                other_ends_job = True

    def _take(self, tag: int) -> Any:
        """Return the next message of a kind, or None."""
        message = self.comm.improbe(tag=tag)
        return None if message is None else message.recv()

    def _answer(self) -> int | None:
        """Tell a rank that asks what this rank does; return its number, or None where no rank asks."""
        asking: int | None = self._take(_REQUEST)
        if asking is not None:
            self._sent.append(self.comm.isend((self._rank, self._state()), asking, _STATE))
        return asking

    def _state(self) -> _State:
        failures = [limit.failure for limit in tuple(self._limits) if limit.failure]
        return _State("\n".join(failures), self._output(), all_stacks(without=[self._thread]))

    def _end_job(self, reason: str) -> None:
        """Collect the states of all ranks, print them and end the job; return if a lower rank does so."""
        states = {rank: _State() for rank in range(self.comm.Get_size())} | {self._rank: self._state()}
        missing = set(states) - {self._rank}
        self._sent += [self.comm.isend(self._rank, rank, _REQUEST) for rank in missing]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            asking = self._answer()
            if asking is not None and asking < self._rank:
                return
            if (answer := self._take(_STATE)) is None:
                self._stop.wait(_POLL_SECONDS / 4)
            else:
                rank, states[rank] = answer
                missing.discard(rank)
        self._print_and_abort(reason, states)

    def _print_and_abort(self, reason: str, states: dict[int, _State]) -> None:
        parts = [self._earlier(), f"\naxonmpi: {reason}; the job is ended"]
        for attribute, title in (("failure", "failure of "), ("output", "output of "), ("stacks", "stack of ")):
            texts = {rank: getattr(state, attribute) for rank, state in states.items()}
            parts.append(merge_texts({rank: text for rank, text in texts.items() if text}, title))
        data = memoryview(("\n".join(filter(None, parts)) + "\n").encode(errors="replace"))
        while data:
            data = data[os.write(self._stream, data) :]
        wait_until_read([self._stream], _DRAIN_SECONDS)  # or the abort would cut it off
        # An abort can hang while other threads are inside MPI.
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=self._stream)
        self._abort()
        os._exit(1)
