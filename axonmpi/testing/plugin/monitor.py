"""Time limits of tests on real ranks: a thread on each rank that ends the job when a test does not end.

A rank that is stuck in MPI cannot report it. So each rank has a thread that knows the deadline of the current step.
After the deadline, every rank of the node appends a report to one file beside the ranks' records:

    rank 2: a limit is over ── creates the file <── all other ranks: failure, output
    the rank that was first: prints the reports and the stacks of all ranks, ends the job

Stacks come from the ranks' watchdogs. The ranks of other nodes have files, and limits, of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import _pytest
import pluggy
import pytest

from ...launch.exit import end_job
from ...observe import Condition, records_of, stacks_of
from ...record import own_record
from ...utils import waiting
from ...utils.pipes import wait_until_read
from ...utils.waiting import Backoff, wait_until
from ..merged_texts import merge_texts
from ..stacks import stack_of

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_OTHERS_SECONDS = 60.0
"""Time that a rank leaves to the first rank for ending the job."""
_DRAIN_SECONDS = 2.0
_RUNNERS = (
    *(f"{module.__path__[0]}/" for module in (_pytest, pluggy, pytest)),
    *(f"{Path(__file__).parents[1]}/", f"{waiting.__file__}", f'{sys.argv[0]}"', "<frozen runpy>", runpy.__file__),
)
"""Beginnings of files of the test runner, whose frames are left out."""


@dataclass(frozen=True)
class _Limit:
    deadline: float
    reason: str
    failure: str


class _Report(NamedTuple):
    """A rank's report at the end of the job."""

    rank: int
    reason: str
    failure: str
    output: str


class Monitor:
    """The thread that ends the job when a time limit of any rank is over.

    Args:
        rank: This process's rank.
        stream: File descriptor to print to; must not be captured.
        output: Returns this rank's output in the current test.
        earlier: Returns the failures of the tests before, which are not printed yet.
    """

    def __init__(self, rank: int, stream: int, output: Callable[[], str], earlier: Callable[[], str]) -> None:
        self._rank = rank
        self._stream = stream
        self._output = output
        self._earlier = earlier
        # Without /dev/shm there is no record and no job's name: then each rank is the first.
        page = own_record()
        self._job = str(page.identity.get("job", secrets.token_hex(4)))
        self._file = None if page.path is None else page.path.with_name(f"{self._job}-node.reports")
        self._limits: list[_Limit] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonmpi test monitor", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float, reason: str, failure: str = "") -> Iterator[None]:
        """End the job if the `with` block does not end in time; local.

        Args:
            seconds: The time limit.
            reason: Text to print when it is over.
            failure: Text of an earlier failure of this rank, printed as well.
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
            now = time.monotonic()
            reason = next((limit.reason for limit in tuple(self._limits) if now > limit.deadline), "")
            if reason or (self._file is not None and self._file.exists()):
                self._end_job(reason)

    def _end_job(self, reason: str) -> None:
        """Report; then, as the first rank of the node, print all reports and stacks and end the job."""
        failures = [limit.failure for limit in tuple(self._limits) if limit.failure]
        own = _Report(self._rank, reason, "\n".join(failures), self._output())
        if self._file is not None:
            with suppress(OSError), self._file.open("ab", buffering=0) as file:
                file.write(f"{json.dumps(own)}\n".encode())
        first = next(iter(self._reports()), own)
        if first.rank != self._rank and self._stop.wait(_OTHERS_SECONDS):
            return
        pages = records_of(self._job)
        stacks = {rank: _of_the_test(text) for rank, text in stacks_of(pages, limit=_ANSWER_SECONDS).items()}
        expected = {page.rank for page in pages if page.condition() is Condition.LIVES}
        wait_until(lambda: expected <= {each.rank for each in self._reports()}, Backoff(0, 0.02), _ANSWER_SECONDS)
        self._print(self._reports() or [own], stacks or {self._rank: stack_of(threading.main_thread())})
        end_job(1)

    def _reports(self) -> list[_Report]:
        """Return the reports of the ranks so far, in order."""
        if self._file is None:
            return []
        try:
            *lines, _ = self._file.read_text().split("\n")  # the last line is empty, or being written
        except OSError:
            return []
        return [_Report(*json.loads(line)) for line in lines]

    def _print(self, reports: list[_Report], stacks: Mapping[int, str]) -> None:
        reason = next((report.reason for report in reports if report.reason), "a limit is over")
        parts = [
            self._earlier(),
            f"\naxonmpi: {reason}; the job is ended",
            merge_texts({report.rank: report.failure for report in reports if report.failure}, "failure of "),
            merge_texts({report.rank: report.output for report in reports if report.output}, "output of "),
            merge_texts(stacks, "stack of "),
        ]
        data = memoryview(("\n".join(filter(None, parts)) + "\n").encode(errors="replace"))
        while data:
            data = data[os.write(self._stream, data) :]
        wait_until_read([self._stream], _DRAIN_SECONDS)  # or the abort would cut it off


def _of_the_test(stacks: str) -> str:
    """Return stacks without frames of the test runner, this thread, and threads without other frames."""
    left_out = tuple(f'  File "{beginning}' for beginning in _RUNNERS)
    shown = []
    for thread in stacks.split("\n\n"):
        lines = [line for line in thread.split("\n") if not line.startswith(left_out)]
        if __file__ not in thread and (len(lines) > 1 or lines[0].startswith("(no stack")):
            shown += lines
    return "\n".join(shown) or "(in the test runner)"
