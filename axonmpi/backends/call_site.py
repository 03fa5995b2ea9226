"""The step of training and the line of the program that a collective was called in, for messages.

The line is told with `AXONMPI_DEBUG=1`. An asynchronous operation is called on one thread and runs on another one,
which is told both.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from ..launch.user_variables import debugs
from .call import Call

_PACKAGE = __name__.partition(".")[0]
_told = threading.local()


class Counter(Protocol):
    """Counts steps of training."""

    @property
    def number(self) -> int:
        """The step under way, from 1."""


def at_step(steps: Counter | None) -> None:
    """Let messages say that this thread is at a step of a model, from forward to the end of backward; local.

    Args:
        steps: Counts the model's steps; None: it is at none.
    """
    _told.steps = None if steps is None else weakref.ref(steps)


def call_site() -> str:
    """Return the line of the program that has called the library, if that is asked for, and the step; local."""
    told: str | None = getattr(_told, "site", None)
    if told is not None:
        return told
    return (_line(sys._getframe(1)) if debugs() else "") + _step()


def _step() -> str:
    reference: weakref.ref[Counter] | None = getattr(_told, "steps", None)
    steps = None if reference is None else reference()
    return "" if steps is None else f" in step {steps.number}"


def _line(frame: FrameType | None) -> str:
    """Return the place of the innermost frame outside the library, and outside torch below it."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in (_PACKAGE, "torch", "contextlib")


@contextmanager
def called_at(site: str) -> Iterator[None]:
    """Let this thread name the call site of another thread's call; local."""
    _told.site = site
    try:
        yield
    finally:
        _told.site = None


def text_with_site(call: Call, site: str | None = None) -> str:
    """Return the text of a call, with the place that it came from, by default this thread's; local."""
    return f"{call}{call_site() if site is None else site}"
