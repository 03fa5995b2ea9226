"""Sleeping on a number in memory: woken, not at all if it has changed, and no longer than asked."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from axonmpi.utils.futex import Futex

LONG = 20.0


@pytest.fixture(params=[True, False], ids=["futex", "naps"])
def numbers(request):
    """Numbers, and what sleeps on them: by the kernel where it can, or as where it cannot."""
    memory = torch.zeros(4, dtype=torch.int64)
    futex = Futex(memory.data_ptr())
    if not request.param:
        futex._call = None
    return memory, futex


def test_a_sleeper_is_woken(numbers) -> None:
    memory, futex = numbers
    woken = threading.Event()

    def sleep() -> None:
        while memory[2] == 0:
            futex.sleep(2, 0, LONG)
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    memory[2] = 1
    while not woken.is_set():  # it may not sleep yet at the first call
        futex.wake(2)
        woken.wait(0.001)
    sleeper.join()


def test_nobody_sleeps_on_a_number_that_has_changed(numbers) -> None:
    memory, futex = numbers
    memory[1] = 2**32 + 7
    began = time.monotonic()
    futex.sleep(1, 2**32 + 6, LONG)
    assert time.monotonic() - began < LONG / 2


def test_a_sleep_ends_in_time(numbers) -> None:
    _, futex = numbers
    began = time.monotonic()
    futex.sleep(0, 0, 0.05)
    assert time.monotonic() - began < LONG / 2
