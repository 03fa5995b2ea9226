"""How long it takes to write a cache line that another rank has just read.

Where two ranks share a cache that is a few nanoseconds, where their cores are far apart about ten times as many,
and with it changes the time of everything that goes through shared memory. A system may move ranks meanwhile,
so it is measured beside each block.
"""

from __future__ import annotations

import statistics
import time

import torch

from ....comm import broadcast, symmetric_empty
from ....groups.world import World

__all__ = ["LineProbe"]

_LINE_BYTES = 64
_LINES = 4096
_REPEATS = 5


class LineProbe:
    """Measures the time of writing lines on rank 0 that the others have read.

    Args:
        world: The ranks; the methods are collective over all of them.

    Attributes:
        nanoseconds: What was measured, on rank 0; empty elsewhere, and where ranks do not read each other's memory.
            Where there was too little memory to share (a warning says so) it is about memory of rank 0 alone.
    """

    def __init__(self, world: World) -> None:
        self.nanoseconds: list[float] = []
        self._is_writer = world.rank == 0
        shares = getattr(world.default_group.backend, "path", "") == "node"
        self._memory = symmetric_empty((_LINES * _LINE_BYTES,), torch.uint8) if shares else None

    def sample(self) -> None:
        """Add a measurement; collective."""
        if self._memory is None:
            return
        taken = []
        for repeat in range(_REPEATS + 1):
            began = time.perf_counter()
            if self._is_writer:
                self._memory.fill_(repeat)
            taken.append((time.perf_counter() - began) / _LINES * 1e9)
            broadcast(self._memory)
        if self._is_writer:
            self.nanoseconds.append(statistics.median(taken[1:]))

    def median(self) -> float | None:
        """Return the median of what was measured since the last call, None if nothing was, and forget it; local."""
        taken, self.nanoseconds = self.nanoseconds, []
        return statistics.median(taken) if taken else None
