"""The Python stacks of ranks, whatever they do: blocked in MPI, in an endless loop, waiting for Python's lock.

A rank is asked through a pipe beside its record, where its watchdog listens, and writes the stacks of all its threads
to a file there. If its watchdog does not answer, something holds Python's lock: then a signal has `faulthandler`
write them without the lock. That is not the first way, since threads may then end while their stacks are read,
which ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from ..record.files import own_record
from ..record.reader import Condition, RankRecord
from ..record.writer import Header
from ..utils.own_files import open_own
from ..utils.waiting import Backoff, wait_until

_SIGNAL = signal.SIGRTMAX - 5
"""A signal that neither Python, torch, MPI libraries nor launchers use."""
_WATCHDOG = re.compile(r'observe/watchdog\.py", line \d+ in _watch$', re.MULTILINE)
"""In the stack of the watchdog's own thread, which says nothing about the program; others may be starting it."""
_QUESTION, _WAKING = b"?", b"!"
ANSWER_SECONDS = 2.0
_END = b"\0"
"""Marks the end of a watchdog's answer. The signal handler cannot write it."""
_SETTLE_SECONDS = 0.05
"""A signal handler's answer counts as complete when it has not grown for this long."""


class HasFileno(Protocol):
    """A socket or a connection: anything that `select` takes."""

    def fileno(self) -> int:
        """Return the file descriptor."""


class StackServer:
    """Where others ask this rank for its stacks, and the file that it writes them to.

    Args:
        record: The file of the rank's record.

    Raises:
        OSError: There is no room for them.
    """

    def __init__(self, record: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._answers = os.open(_answers_of(record), flags, 0o600)  # stays open: the handler writes there
        os.mkfifo(_questions_of(record), 0o600)
        # Open for writing as well, or it would be at its end whenever nobody asks.
        self._pipe = os.open(_questions_of(record), os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(_SIGNAL, file=self._answers, all_threads=True)
            own_record().words[Header.STACKS_BY] = _SIGNAL

    def wait(self, seconds: float, also: Collection[HasFileno] = ()) -> bool:
        """Wait for so long, or until a question has been answered; say whether one of `also` can be read; local."""
        poll = select.poll()  # select takes no descriptor from 1,024 on
        for file in (self._pipe, *(each.fileno() for each in also)):
            poll.register(file, select.POLLIN)
        ready = [file for file, _ in poll.poll(1000 * seconds)]
        if self._pipe in ready and _QUESTION in os.read(self._pipe, 4096):
            self.write_stacks()
        return any(file != self._pipe for file in ready)

    def wake(self) -> None:
        """End a wait of another thread; local."""
        os.write(self._pipe, _WAKING)

    def write_stacks(self) -> None:
        """Write the stacks down; local."""
        faulthandler.dump_traceback(self._answers, all_threads=True)
        os.write(self._answers, _END)


def stacks_of(
    records: Iterable[RankRecord], own: StackServer | None = None, limit: float = ANSWER_SECONDS
) -> dict[int, str]:
    """Ask ranks for the stacks of their threads, all at once; local.

    Args:
        records: Of the ranks.
        own: Where this process is asked, if it is one of the ranks.
        limit: Seconds that they have to begin an answer, once by their watchdogs and once by the signal, and
            seconds that they have to complete it.

    Returns:
        By rank, as faulthandler writes them, innermost frame first; or in brackets why there are none.
    """
    asked, stacks = {}, {}
    for record in records:
        condition = record.condition()
        if condition in (Condition.GONE, Condition.UNKNOWN, Condition.STOPPED):
            stacks[record.rank] = f"(no stack: the process {condition.value})"
            continue
        asked[record] = _size(record)
        if own is not None and record.pid == os.getpid():
            own.write_stacks()
        else:
            _ask(record)

    def silent() -> list[RankRecord]:
        return [record for record, before in asked.items() if _size(record) == before]

    wait_until(lambda: not silent(), Backoff(0, 0.01), limit)
    by_signal = silent()
    for record in by_signal:
        _ask_by_signal(record)
    wait_until(lambda: not silent(), Backoff(0, 0.01), limit)
    for record, before in asked.items():
        answer = _complete_answer(record, before, limit, by_signal=record in by_signal)
        stacks[record.rank] = answer or "(no stack: no answer)"
    return dict(sorted(stacks.items()))


def _ask(record: RankRecord) -> None:
    with contextlib.suppress(OSError):  # it does not listen
        pipe = os.open(_questions_of(record.path), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(pipe, _QUESTION)
        finally:
            os.close(pipe)


def _ask_by_signal(record: RankRecord) -> None:
    if record.stacks_by:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, record.stacks_by)


def _complete_answer(record: RankRecord, offset: int, limit: float, *, by_signal: bool) -> str:
    """Wait until a rank's answer is complete, and return it.

    Args:
        record: The record of the rank.
        offset: Size of the answer file, in bytes, before the question.
        limit: Seconds until what is there by then is returned.
        by_signal: Whether the signal handler writes the answer.
    """
    sizes = [offset]

    def is_complete() -> bool:
        sizes.append(_size(record))
        return sizes[-1] == sizes[-2] if by_signal else _answer(record, offset).endswith(_END)

    wait_until(is_complete, Backoff(0, _SETTLE_SECONDS), limit)
    threads = _answer(record, offset).replace(_END, b"").decode(errors="replace").split("\n\n")
    return "\n\n".join(thread.strip() for thread in threads if not _WATCHDOG.search(thread)).strip()


def _answer(record: RankRecord, offset: int) -> bytes:
    """Read the answer file from an offset; empty if there is no file."""
    try:
        with open(open_own(_answers_of(record.path)), "rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def _size(record: RankRecord) -> int:
    try:
        return _answers_of(record.path).stat().st_size
    except OSError:
        return 0


def _answers_of(record: Path) -> Path:
    return record.with_name(record.name + ".stacks")


def _questions_of(record: Path) -> Path:
    return record.with_name(record.name + ".ask")
