"""Python stacks of ranks, on request, also of ranks that are blocked in MPI or in an endless loop.

A rank is asked through a pipe beside its record, which its watchdog reads, and writes the stacks of all its threads
to a file there. If its watchdog does not answer, some code holds Python's lock: then a signal makes `faulthandler`
write the stacks without the lock. The pipe comes first, because threads may end while their stacks are read without
the lock, which ends the process.
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

from ..launch.node_links import Link
from ..record.files import own_record
from ..record.layout import Header
from ..record.reader import Condition, RankRecord
from ..utils.own_files import open_own
from ..utils.waiting import Backoff, wait_until

_SIGNAL = signal.SIGRTMAX - 5
"""A signal that neither Python, torch, MPI libraries nor launchers use."""
_WATCHDOG = re.compile(r'observe/watchdog\.py", line \d+ in _watch$', re.MULTILINE)
"""A frame of the watchdog's own thread, which is not shown; a thread that starts the watchdog is."""
_QUESTION, _WAKING = b"?", b"!"
ANSWER_SECONDS = 2.0
_END = b"\0"
"""Marks the end of a watchdog's answer. The signal handler cannot write it."""
_SETTLE_SECONDS = 0.05
"""Time without growth after which a signal handler's answer is complete."""


class StackServer:
    """The pipe through which this rank is asked for its stacks, and the file of its answers.

    Args:
        record: File of the rank's record.

    Raises:
        OSError: There is no room for them.
    """

    def __init__(self, record: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._answers = os.open(_answers_of(record), flags, 0o600)  # stays open: the signal handler writes there
        os.mkfifo(_questions_of(record), 0o600)
        # Open for writing as well, or the pipe would be at its end whenever nobody asks.
        self._pipe = os.open(_questions_of(record), os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(_SIGNAL, file=self._answers, all_threads=True)
            own_record().words[Header.STACKS_BY] = _SIGNAL

    def wait(self, seconds: float, also: Collection[Link] = ()) -> bool:
        """Wait until a question is answered, at most `seconds`; return True if one of `also` is readable; local."""
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
        """Write the stacks of all threads to the file; local."""
        faulthandler.dump_traceback(self._answers, all_threads=True)
        os.write(self._answers, _END)


def stacks_of(
    records: Iterable[RankRecord], own: StackServer | None = None, limit: float = ANSWER_SECONDS
) -> dict[int, str]:
    """Ask ranks for the stacks of their threads, all at once; local.

    Args:
        records: Records of the ranks.
        own: This process's server, if it is one of the ranks.
        limit: Time limit in seconds: for the begin of the watchdogs' answers, again for the begin of the signal
            handlers' answers, and for the end of each answer.

    Returns:
        Stacks by rank, as faulthandler writes them, innermost frame first; or a reason in brackets.
    """
    asked, stacks = {}, {}
    for record in records:
        condition = record.condition()
        if condition in (Condition.GONE, Condition.UNKNOWN, Condition.STOPPED):
            stacks[record.rank] = f"(no stack: the process {condition.value})"
            continue
        asked[record] = len(_answer(record))
        if own is not None and record.pid == os.getpid():
            own.write_stacks()
        else:
            _ask(record)

    def silent() -> list[RankRecord]:
        return [record for record, before in asked.items() if len(_answer(record)) == before]

    wait_until(lambda: not silent(), Backoff(0, 0.01), limit)
    by_signal = silent()
    for record in by_signal:
        if number := record.word(Header.STACKS_BY):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, number)
    wait_until(lambda: not silent(), Backoff(0, 0.01), limit)
    for record, before in asked.items():
        answer = _complete_answer(record, before, limit, by_signal=record in by_signal)
        stacks[record.rank] = answer or "(no stack: no answer)"
    return dict(sorted(stacks.items()))


def _ask(record: RankRecord) -> None:
    with contextlib.suppress(OSError):  # the rank does not read the pipe
        pipe = os.open(_questions_of(record.path), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(pipe, _QUESTION)
        finally:
            os.close(pipe)


def _complete_answer(record: RankRecord, offset: int, limit: float, *, by_signal: bool) -> str:
    """Wait until a rank's answer is complete, and return it.

    Args:
        record: The rank's record.
        offset: Size of the answer file, in bytes, before the question.
        limit: Time limit in seconds, at which an incomplete answer is returned.
        by_signal: True if the signal handler writes the answer.
    """
    answers = [b""]

    def is_complete() -> bool:
        answers.append(_answer(record)[offset:])
        return answers[-1] == answers[-2] if by_signal else answers[-1].endswith(_END)

    wait_until(is_complete, Backoff(0, _SETTLE_SECONDS), limit)
    threads = answers[-1].replace(_END, b"").decode(errors="replace").split("\n\n")
    return "\n\n".join(thread.strip() for thread in threads if not _WATCHDOG.search(thread)).strip()


def _answer(record: RankRecord) -> bytes:
    """Return the contents of a rank's answer file; empty without one."""
    try:
        with open(open_own(_answers_of(record.path)), "rb") as file:
            return file.read()
    except OSError:
        return b""


def _answers_of(record: Path) -> Path:
    return record.with_name(record.name + ".stacks")


def _questions_of(record: Path) -> Path:
    return record.with_name(record.name + ".ask")
