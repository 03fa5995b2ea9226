"""Waiting without taking the core from threads that compute, and operations in steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from typing import TypeVar

import torch

__all__ = ["Pause", "Steps", "compute_beside", "in_inference_mode", "is_beside_computation", "run_steps"]

YIELDS = 10
"""How often a thread gives way before it naps: beside one that computes, a nap is over sooner."""
_NAP_SECONDS = 1e-4
_NAP_BESIDE_SECONDS = 5e-4
"""Each look takes a core from those that compute, and the network has enough to do meanwhile."""

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
    """Say whether the calling thread communicates while others of its rank compute; local."""
    beside: bool = getattr(_thread, "beside", False)
    return beside


def compute_beside() -> None:
    """Take note that other threads of this rank compute while the calling one communicates; local."""
    _thread.beside = True
