"""Linux's futex: sleep until a number in shared memory changes. Counters and barriers decide when to.

A rank that polls takes the core from the rank that it waits for; a rank that naps wakes up late. The kernel's futex
(futex(2); Franke, Russell and Kirkwood 2002) avoids both, on memory that processes share. A sleep may end early,
and ends at its time limit if no rank wakes it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
"""Number of the system call, on 64-bit little-endian processors."""
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeps on an array of 64-bit numbers; without a futex it naps.

    Args:
        address: Address of the first number.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._call = ctypes.CDLL(None).syscall if self._number is not None else None

    def sleep(self, index: int, seen: int, seconds: float) -> None:
        """Sleep until `wake` is called for a number, unless the number has changed already; local.

        Args:
            index: Index of the number.
            seen: The number's value when the caller read it.
            seconds: Time limit.
        """
        if self._call is None:
            time.sleep(min(seconds, 1e-4))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        word = ctypes.c_void_p(self._address + 8 * index)
        self._call(self._number, word, _WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF), ctypes.byref(limit), None, 0)

    def wake(self, index: int) -> None:
        """Wake all sleepers on a number; local."""
        if self._call is not None:
            self._call(self._number, ctypes.c_void_p(self._address + 8 * index), _WAKE, _ALL, None, None, 0)
