"""Sleeping on a number in memory: woken, not at all if it has changed, and no longer than asked."""

import threading

import pytest
import torch

from axonmpi.utils.futex import Futex

HANG = 600.0
"""Seconds that only a hang reaches."""


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

    def sleep() -> None:
        while memory[2] == 0:
            futex.sleep(2, 0, HANG)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    memory[2] = 1
    while sleeper.is_alive():  # it may not sleep yet at the first call
        futex.wake(2)
        sleeper.join(0.001)


def test_nobody_sleeps_on_a_number_that_has_changed(numbers) -> None:
    """A test that does would hang."""
    memory, futex = numbers
    memory[1] = 2**32 + 7
    futex.sleep(1, 2**32 + 6, HANG)


def test_a_sleep_ends_in_time(numbers) -> None:
    """A test that sleeps on would hang."""
    _, futex = numbers
    futex.sleep(0, 0, 0.05)
