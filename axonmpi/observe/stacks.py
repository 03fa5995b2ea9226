"""The Python stacks of ranks, whatever they do: blocked in MPI, in an endless loop, waiting for Python's lock.

A rank that is asked by a signal writes the stacks of all its threads to a file beside its page. The handler is
`faulthandler`'s, which needs neither Python's lock nor the interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from ..launch.board import own_page
from ..launch.page import Header
from ..utils.waiting import Backoff, wait_until
from .board import Condition, RankPage

__all__ = ["answer_when_asked", "stacks_of"]

_SIGNAL = signal.SIGRTMAX - 5
"""A signal that neither Python, torch, MPI libraries nor launchers use."""
_WATCHDOG = "observe/watchdog.py"
"""In the stacks of threads that say nothing about the program."""
ANSWER_SECONDS = 2.0
_SETTLE_SECONDS = 0.05
"""How long a file that has grown must not grow any more."""


def answer_when_asked() -> None:
    """Have this rank write its stacks down when it is asked; local, does nothing where the signal is in use."""
    page = own_page()
    if page.path is None or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(_file_of(page.path), flags, 0o600)  # stays open: the handler writes there
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    page.words[Header.STACKS_BY] = _SIGNAL


def stacks_of(pages: Iterable[RankPage], limit: float = ANSWER_SECONDS) -> dict[int, str]:
    """Ask ranks for the stacks of their threads, all at once; local.

    Args:
        pages: Of the ranks.
        limit: Seconds that they have to answer.

    Returns:
        By rank, as faulthandler writes them, innermost frame first; or in brackets why there are none.
    """
    asked, stacks = {}, {}
    for page in pages:
        condition = page.condition()
        if not page.stacks_by or condition in (Condition.GONE, Condition.UNKNOWN, Condition.STOPPED):
            stacks[page.rank] = f"(no stack: the process {condition.value})"
        else:
            asked[page] = _size(page)
            with contextlib.suppress(ProcessLookupError):
                os.kill(page.pid, page.stacks_by)
    wait_until(lambda: all(_size(page) > before for page, before in asked.items()), Backoff(0, 0.01), limit)
    for page, before in asked.items():
        stacks[page.rank] = _written(page, before) or "(no stack: no answer)"
    return dict(sorted(stacks.items()))


def _written(page: RankPage, before: int) -> str:
    """Return what a rank has written, once it writes no more."""
    seen = [before]

    def settled() -> bool:
        seen.append(_size(page))
        return seen[-1] == seen[-2]

    wait_until(settled, Backoff(0, _SETTLE_SECONDS), ANSWER_SECONDS)
    try:
        with _file_of(page.path).open("rb") as file:
            file.seek(before)
            threads = file.read().decode(errors="replace").split("\n\n")
    except OSError:
        return ""
    return "\n\n".join(thread.strip() for thread in threads if _WATCHDOG not in thread).strip()


def _size(page: RankPage) -> int:
    try:
        return _file_of(page.path).stat().st_size
    except OSError:
        return 0


def _file_of(page: Path) -> Path:
    return page.with_name(page.name + ".stacks")
