"""The stack of a thread of this process, as text."""

from __future__ import annotations

import re
import sys
import threading
import traceback

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
