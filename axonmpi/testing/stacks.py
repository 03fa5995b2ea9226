"""The stacks of this process's threads, as text."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Iterable

__all__ = ["all_stacks", "stack_of"]

_RUNNERS = re.compile(r"(_pytest|pluggy|runpy|threading|axonmpi\.testing|axonmpi\.utils\.waiting)(\.|$)")
"""Modules whose frames say nothing about the code under test."""


def stack_of(thread: threading.Thread) -> str:
    """Return the stack of a running thread, innermost frame last, without the test runner's frames; local."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "  (not running)\n"
    steps = list(traceback.walk_stack(frame))[::-1]
    names = [str(step.f_globals.get("__name__")) for step, _ in steps]
    first = next((index for index, name in enumerate(names) if name.startswith("_pytest.")), 0)
    shown = [step for step, name in zip(steps[first:], names[first:], strict=True) if not _RUNNERS.match(name)]
    summary = traceback.StackSummary.extract(iter(shown))
    return "".join(summary.format()) or "  (in the test runner)\n"


def all_stacks(without: Iterable[threading.Thread] = ()) -> str:
    """Return the stacks of all threads of this process but some, the main thread first; local."""
    left_out = set(without)
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main]
    return "".join(
        f"thread {thread.name}:\n{stack_of(thread)}" for thread in (main, *others) if thread not in left_out
    )
