"""A thread on each real rank that ends the job when a test does not end.

A rank that is stuck in MPI cannot say so, and the others cannot go on without it. So each rank has a thread that
knows until when the current step must be over and talks to the other ranks' threads on a communicator of its own:

    rank 2: a limit is over ── ALARM ─> rank 0 ── REQUEST ─> all ranks
                                        rank 0 <── STATE ─── all ranks: failures, output and stacks
                                        rank 0: prints them, ends the job

If rank 0 does not react, the rank that raised the alarm prints what it knows itself and ends the job.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..rank_text import merge_texts
from ..stacks import all_stacks

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Monitor"]

_ALARM, _REQUEST, _STATE = 1, 2, 3
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_RESCUE_SECONDS = 15.0
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
        while not self._stop.wait(_POLL_SECONDS):
            if (reason := self._take(_ALARM)) is not None:
                self._end_job(reason)
            self._answer()
            now = time.monotonic()
            if (over := next((limit for limit in tuple(self._limits) if now > limit.deadline), None)) is not None:
                self._raise_alarm(over.reason)

    def _take(self, tag: int) -> Any:
        """Return the next message of a kind, or None."""
        message = self.comm.improbe(tag=tag)
        return None if message is None else message.recv()

    def _send(self, thing: Any, rank: int, tag: int) -> None:
        self._sent.append(self.comm.isend(thing, rank, tag))

    def _answer(self) -> None:
        if self._take(_REQUEST):
            self._send((self._rank, self._state()), 0, _STATE)

    def _state(self) -> _State:
        failures = [limit.failure for limit in tuple(self._limits) if limit.failure]
        return _State("\n".join(failures), self._output(), all_stacks(without=[self._thread]))

    def _raise_alarm(self, reason: str) -> None:
        """Let rank 0 end the job; do it alone if rank 0 does not."""
        if self._rank == 0:
            self._end_job(reason)
        self._send(reason, 0, _ALARM)
        deadline = time.monotonic() + _RESCUE_SECONDS
        while time.monotonic() < deadline and not self._stop.wait(_POLL_SECONDS):
            self._answer()
        if not self._stop.is_set():
            self._print_and_abort(reason, {0: _State(), self._rank: self._state()})

    def _end_job(self, reason: str) -> None:
        """Collect the states of all ranks, print them and end the job; on rank 0."""
        others = range(1, self.comm.Get_size())
        for rank in others:
            self._send(True, rank, _REQUEST)
        states = {rank: _State() for rank in others} | {0: self._state()}
        missing = set(others)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            if (answer := self._take(_STATE)) is None:
                self._stop.wait(_POLL_SECONDS / 4)
                continue
            rank, states[rank] = answer
            missing.discard(rank)
        self._print_and_abort(reason, states)

    def _print_and_abort(self, reason: str, states: dict[int, _State]) -> None:
        parts = [self._earlier(), f"\naxonmpi: {reason}; the job is ended"]
        for attribute, title in (("failure", "failure of "), ("output", "output of "), ("stacks", "stack of ")):
            texts = {rank: getattr(state, attribute) for rank, state in states.items()}
            parts.append(merge_texts({rank: text for rank, text in texts.items() if text}, title))
        _write_all(self._stream, "\n".join(part for part in parts if part) + "\n")
        # An abort can hang while other threads are inside MPI.
        faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=self._stream)
        self._abort()
        os._exit(1)


def _write_all(stream: int, text: str) -> None:
    """Write to a descriptor and wait until the reader of a pipe has taken it, or the abort would cut it off."""
    data = memoryview(text.encode(errors="replace"))
    while data:
        data = data[os.write(stream, data) :]
    deadline = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline and _unread(stream):
        time.sleep(0.005)


def _unread(stream: int) -> int:
    """Return how many bytes wait in the pipe that `stream` writes to; 0 for anything else."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(stream, termios.FIONREAD, b"\0" * 4))[0])
    except OSError:
        return 0
