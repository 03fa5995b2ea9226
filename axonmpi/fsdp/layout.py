"""Where parameters lie in a flat parameter, and which rank has which elements; integer arithmetic only."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements that every parameter and every shard begins at a multiple of."""


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a flat one, and which part of it is whose.

        by elements     | weight ............. | bias | norm |pad|      every parameter where it comes, cut into
                        | rank 0 | rank 1 | rank 2 | rank 3      |      equal shards
        by parameters   | weight (rank 0) | bias norm (rank 1) | ...    every parameter whole on one rank

    Everything begins at a multiple of 64 bytes or more, as memory that torch allocates does.

    Attributes:
        numels: Elements of each parameter.
        offsets: Where each begins.
        sizes: Elements of each rank's shard; their sum is that of the flat parameter.
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
        """Where each rank's shard begins."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's shard begins and ends."""
        return self.starts[rank], self.starts[rank] + self.sizes[rank]

    def holders(self, index: int) -> range:
        """Return the ranks in whose shards a parameter lies, at once also for thousands of them."""
        start, stop = self.offsets[index], self.offsets[index] + self.numels[index]
        if start == stop:
            return range(0)
        return range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter, from and to, lie in a rank's shard; equal if none do."""
        low, high = self.bounds(rank)
        start, numel = self.offsets[index], self.numels[index]
        first, last = max(low, start) - start, min(high, start + numel) - start
        return (first, last) if first < last else (0, 0)

    @functools.cached_property
    def keeps_full(self) -> bool:
        """Whether no parameter is divided."""
        ranks = range(len(self.sizes))
        return all(
            any(self.part(index, rank) == (0, numel) for rank in ranks) for index, numel in enumerate(self.numels)
        )


def by_elements(numels: Sequence[int], ranks: int) -> Layout:
    """Lay parameters end to end and cut the whole into equal shards; local."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end = _aligned(end + numel)
    shard = _aligned(-(-end // ranks))
    return Layout(tuple(numels), tuple(offsets), (shard,) * ranks)


def by_parameters(numels: Sequence[int], ranks: int, loads: list[int]) -> Layout:
    """Give each parameter, the largest first, to the rank that has least so far; local.

    Args:
        numels: Elements of each parameter.
        ranks: Number of ranks.
        loads: [ranks] elements that each rank has already; updated.
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
