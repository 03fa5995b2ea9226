"""A probe of the ranks' caches: the time to write a cache line that other ranks have just read."""

from __future__ import annotations

import statistics
import time

import torch

from ....comm import broadcast, symmetric_empty
from ....groups.world import World

_LINE_BYTES = 64
_LINES = 4096
_REPEATS = 5


class LineProbe:
    """A timer of writes by rank 0 to cache lines that the others have just read.

    A write takes a few nanoseconds where two ranks share a cache, about ten times as much where their cores are far
    apart, and the time of every transfer through shared memory changes with it. A system may move ranks at any
    time, so this time is measured beside each block.

    Args:
        world: The ranks; the methods are collective over all of them.

    If there was too little memory to share (a warning says so), rank 0 writes memory that no other rank reads.
    """

    def __init__(self, world: World) -> None:
        self._nanoseconds: list[float] = []
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
            self._nanoseconds.append(statistics.median(taken[1:]))

    def median(self) -> float | None:
        """Return the median of the measurements since the last call, in nanoseconds; local.

        None on ranks other than 0, and where ranks do not read each other's memory.
        """
        taken, self._nanoseconds = self._nanoseconds, []
        return statistics.median(taken) if taken else None
