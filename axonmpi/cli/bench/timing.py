"""Taking turns and taking medians (layer 7)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...comm import all_reduce_max, barrier

__all__ = ["Samples", "interleave"]


@dataclass(frozen=True)
class Samples:
    """Seconds per call of one variant, one value a block, the slowest rank's.

    Attributes:
        seconds: The blocks' values.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the blocks, in seconds per call."""
        return statistics.median(self.seconds)


def interleave(variants: Mapping[str, Callable[[], object]], *, blocks: int, calls: int) -> dict[str, Samples]:
    """Time each variant in `blocks` short blocks of `calls` calls, taking turns; collective.

    The first block of each warms up and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(blocks + 1):
        for name, call in variants.items():
            barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
            all_reduce_max(taken)
            if block:
                seconds[name].append(float(taken))
    return {name: Samples(tuple(values)) for name, values in seconds.items()}
