"""Turns of a thread on a core that others want too (layer 1).

A thread that communicates mostly sleeps, and wants the core for a moment at a time. The scheduler of Linux lets a
thread that asks for short turns have them soon (since 6.12, as custom slices of its fair share: EEVDF, Stoica and
Abdel-Wahab 1995); others would wait until the threads that compute have had their longer ones.
"""

from __future__ import annotations

import ctypes
import platform
import sys

__all__ = ["take_short_turns"]

_SET = {"x86_64": 314, "aarch64": 274, "ppc64le": 355, "riscv64": 274}
_GET = {"x86_64": 315, "aarch64": 275, "ppc64le": 356, "riscv64": 275}
_NORMAL = 0
_SHORT_NANOSECONDS = 100_000


class _Attributes(ctypes.Structure):
    """What sched_setattr(2) sets."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """Ask for short turns for the calling thread, as much time in all as before; local.

    Returns:
        Whether the system has taken note; older ones do, and change nothing.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _SET:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    if call(_GET[machine], 0, ctypes.byref(attributes), size, 0) or attributes.policy != _NORMAL:
        return False
    attributes.runtime = _SHORT_NANOSECONDS
    return bool(call(_SET[machine], 0, ctypes.byref(attributes), 0) == 0)
