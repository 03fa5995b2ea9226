"""Offsets of parameters in a flat parameter, and bounds of the ranks' shards; integer arithmetic only."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Alignment of every parameter and every shard, in elements."""


@dataclass(frozen=True)
class Layout:
    """Layout of a flat parameter.

        by elements     | weight ............. | bias | norm |pad|      parameters end to end, cut into equal shards
                        | rank 0 | rank 1 | rank 2 | rank 3      |
        by parameters   | weight (rank 0) | bias norm (rank 1) | ...    every parameter full on one rank

    Parameters and shards begin at multiples of 64 bytes at least, as memory that torch allocates does.

    Attributes:
        numels: Elements of each parameter.
        offsets: Index of each parameter's first element.
        sizes: Elements of each rank's shard; their sum is the size of the flat parameter.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Elements of the flat parameter, padding included."""
        return sum(self.sizes)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each rank's shard."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return first and last index (exclusive) of a rank's shard."""
        return self.starts[rank], self.starts[rank] + self.sizes[rank]

    def holders(self, index: int) -> range:
        """Return the ranks whose shards have elements of a parameter, in logarithmic time."""
        start, stop = self.offsets[index], self.offsets[index] + self.numels[index]
        if start == stop:
            return range(0)
        return range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return first and last index (exclusive) of a parameter's elements in a rank's shard; equal if none."""
        low, high = self.bounds(rank)
        start, numel = self.offsets[index], self.numels[index]
        first, last = max(low, start) - start, min(high, start + numel) - start
        return (first, last) if first < last else (0, 0)

    @functools.cached_property
    def keeps_full(self) -> bool:
        """True if every parameter is full on one rank."""
        ranks = range(len(self.sizes))
        return all(
            any(self.part(index, rank) == (0, numel) for rank in ranks) for index, numel in enumerate(self.numels)
        )


def by_elements(numels: Sequence[int], ranks: int) -> Layout:
    """Lay parameters end to end and cut them into equal shards; local."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end = _aligned(end + numel)
    shard = _aligned(-(-end // ranks))
    return Layout(tuple(numels), tuple(offsets), (shard,) * ranks)


def by_parameters(numels: Sequence[int], ranks: int, loads: list[int]) -> Layout:
    """Give each parameter, the largest first, to the rank with the fewest elements so far; local.

    Args:
        numels: Elements of each parameter.
        ranks: Number of ranks.
        loads: [ranks] elements of each rank so far; updated in place.
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owner = loads.index(min(loads))
        owned[owner].append(index)
        loads[owner] += numels[index]
    offsets = [0] * len(numels)
    sizes: list[int] = []
    for indices in owned:
        end = begin = sum(sizes)
        for index in sorted(indices):
            offsets[index] = end
            end = _aligned(end + numels[index])
        sizes.append(end - begin)
    return Layout(tuple(numels), tuple(offsets), tuple(sizes))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
