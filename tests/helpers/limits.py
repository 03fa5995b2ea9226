"""Limits of time that only a hang reaches, however busy the machine is.

A limit is written for a quiet machine. It is stretched by the time that a new Python takes to import torch now,
over the time on a quiet machine: most of what tests wait for are processes that do just that.
"""

import functools
import subprocess
import sys
import time

QUIET_SECONDS = 2.0
"""A start that is quick: a slower one stretches the limits."""
ROOM = 3.0
"""A machine may become so many times busier after the start was measured."""


@functools.cache
def slowness() -> float:
    """Return how many times longer a start takes than on a quick machine, at least 1; measured once a process."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - began) / QUIET_SECONDS)


def limit(seconds: float) -> float:
    """Return the limit for what takes at most `seconds` on a quick and quiet machine."""
    return seconds * ROOM * slowness()
