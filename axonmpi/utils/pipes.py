"""Waiting for the reader of a pipe, such as the launcher that reads a rank's output."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
from collections.abc import Iterable

from .waiting import Backoff, wait_until


def wait_until_read(descriptors: Iterable[int], limit: float) -> None:
    """Wait until the readers of pipes have read everything; local.

    Args:
        descriptors: File descriptors; a descriptor that is no pipe counts as read.
        limit: Seconds after which to give up.
    """
    wait_until(lambda: not any(map(_unread, descriptors)), Backoff(0, 1e-3), limit)


def _unread(descriptor: int) -> bool:
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
        answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    except OSError:
        return False
    return struct.unpack("i", answer) > (0,)
