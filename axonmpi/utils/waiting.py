"""Turns of a thread on a core that others want too, and waiting without taking it from them.

A thread that communicates mostly sleeps, and wants the core for a moment at a time. The scheduler of Linux lets a
thread that asks for short turns have them soon (since 6.12, as custom slices of its fair share: EEVDF, Stoica and
Abdel-Wahab 1995); others would wait until the threads that compute have had their longer ones.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Generator
from typing import TypeVar

import torch

__all__ = ["Pause", "Steps", "in_inference_mode", "is_beside_computation", "run_steps", "take_short_turns"]

YIELDS = 10
"""How often a thread gives way before it naps: beside one that computes, a nap is over sooner."""
_NAP_SECONDS = 1e-4
_NAP_BESIDE_SECONDS = 5e-4
"""Each look takes a core from those that compute, and the network has enough to do meanwhile."""

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


T = TypeVar("T")
Steps = Generator[bool, None, T]
"""An operation in steps, each of which says whether it got on; between them others of the same thread do."""

_thread = threading.local()


class Pause:
    """Waiting for what other ranks or the network do, between two looks."""

    def __init__(self) -> None:
        beside = is_beside_computation()
        self._yields = 0 if beside else YIELDS
        self._nap = _NAP_BESIDE_SECONDS if beside else _NAP_SECONDS
        self._looks = 0

    def rest(self) -> None:
        """Wait before the next look."""
        naps = self._looks - self._yields
        if naps < 0:
            os.sched_yield()
        else:
            time.sleep(self._nap)
        self._looks += 1

    def end(self) -> None:
        """Take note that something has come."""
        self._looks = 0


def run_steps(steps: Steps[T]) -> T:
    """Run an operation to its end, waiting where it does not get on; local."""
    pause = Pause()
    while True:
        try:
            moved = next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        if moved:
            pause.end()
        else:
            pause.rest()


def in_inference_mode(steps: Steps[T]) -> Steps[T]:
    """Do the steps in torch's inference mode, which is a thread's own and which tensors made in it need."""
    while True:
        with torch.inference_mode():
            try:
                moved = next(steps)
            except StopIteration as end:
                value: T = end.value
                return value
        yield moved


def is_beside_computation() -> bool:
    """Say whether the calling thread has asked for short turns: others of its rank compute; local."""
    beside: bool = getattr(_thread, "short", False)
    return beside


def take_short_turns() -> bool:
    """Ask for short turns for the calling thread, as much time in all as before; local.

    Returns:
        Whether the system has taken note; older ones do, and change nothing.
    """
    _thread.short = True
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
