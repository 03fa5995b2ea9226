"""Where in the user's program a collective was called: messages say so with `AXONMPI_DEBUG=1`.

An asynchronous operation is called on one thread and runs on another one, which is told the place.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..launch.settings import debugs
from .call import Call

__all__ = ["call_site", "called_at", "text_with_site"]

_PACKAGE = __name__.partition(".")[0]
_told = threading.local()


def call_site() -> str:
    """Return where this thread has called the library, empty unless that is asked for; local."""
    if not debugs():
        return ""
    told: str | None = getattr(_told, "site", None)
    return _site(sys._getframe(1)) if told is None else told


def _site(frame: FrameType | None) -> str:
    """Return the place of the innermost frame outside the library, and outside torch below it."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in (_PACKAGE, "torch", "contextlib")


@contextmanager
def called_at(site: str) -> Iterator[None]:
    """Let this thread say that it does what was called somewhere else; local."""
    _told.site = site or None
    try:
        yield
    finally:
        _told.site = None


def text_with_site(call: Call, site: str | None = None) -> str:
    """Return the text of a call, with the place that it came from, by default this thread's; local."""
    site = call_site() if site is None else site
    return f"{call} at {site}" if site else str(call)
