"""Where parameters lie in a flat one, and which part of it is whose.

    by elements     | weight ............. | bias | norm |pad|      every parameter where it comes, then cut into
                    | rank 0 | rank 1 | rank 2 | rank 3      |      equal shards
    by parameters   | weight (rank 0) | bias norm (rank 1) | ...    every parameter whole on one rank

Everything begins at a multiple of 64 bytes or more, as memory that torch allocates does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Layout", "by_elements", "by_parameters"]

ALIGNMENT = 16
"""Elements that every parameter and every shard begins at a multiple of."""


@dataclass(frozen=True)
class Layout:
    """A flat parameter.

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

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's shard begins and ends."""
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter, from and to, lie in a rank's shard; equal if none do."""
        low, high = self.bounds(rank)
        start, numel = self.offsets[index], self.numels[index]
        first, last = max(low, start) - start, min(high, start + numel) - start
        return (first, last) if first < last else (0, 0)

    @functools.cached_property
    def keeps_whole(self) -> bool:
        """Whether no parameter is divided."""
        parts = [[self.part(index, rank) for rank in range(len(self.sizes))] for index in range(len(self.numels))]
        return all((0, numel) in own for numel, own in zip(self.numels, parts, strict=True))

    def gaps(self) -> list[int]:
        """Return the elements of padding before each parameter, and after the last one."""
        order = sorted(range(len(self.numels)), key=lambda index: (self.offsets[index], self.numels[index]))
        gaps, at = [0] * len(self.numels), 0
        for index in order:
            gaps[index] = self.offsets[index] - at
            at = self.offsets[index] + self.numels[index]
        return [*gaps, self.total - at]


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
        loads: [ranks] what each has already; updated.
    """
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += numels[index]
    offsets, sizes, end = [0] * len(numels), [], 0
    for rank in range(ranks):
        begin = end
        for index, numel in enumerate(numels):
            if owners[index] == rank:
                offsets[index] = end
                end = _aligned(end + numel)
        sizes.append(end - begin)
    return Layout(tuple(numels), tuple(offsets), tuple(sizes))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
