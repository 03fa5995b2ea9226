"""Shards of a tensor as subarrays: integer arithmetic only.

    shape (4, 5)      . . . . .
                      . . # # #     elements 7 to 16 in row-major order, as a shard of a flat parameter has them,
                      # # # # #     are three subarrays: the end of a row, whole rows, the beginning of a row
                      # . . . .

A subarray is its start and its size along each dimension. Elements of a subarray whose later dimensions are full
follow each other in a file; those of other subarrays are runs with gaps between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subarray:
    """A shard of a tensor.

    Attributes:
        start: Index of its first element, a number for each dimension.
        size: Elements along each dimension.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Subarray:
        """Return all of a tensor of a shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the subarray in the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def meet(self, other: Subarray) -> Subarray | None:
        """Return what two subarrays have in common, None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(
            min(a + m, b + n) - begin
            for a, m, b, n, begin in zip(self.start, self.size, other.start, other.size, start, strict=True)
        )
        return Subarray(start, size) if all(extent > 0 for extent in size) else None

    def within(self, outer: Subarray) -> Subarray:
        """Return the same subarray as seen from the first element of another one around it."""
        return Subarray(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def first_in(self, shape: Sequence[int]) -> int:
        """Return the number of its first element in a tensor of a shape."""
        return sum(index * stride for index, stride in zip(self.start, strides_of(shape), strict=True))

    def run_in(self, shape: Sequence[int]) -> int:
        """Return how many elements of it follow each other in a tensor of a shape."""
        run = 1
        for size, extent in zip(reversed(self.size), reversed(shape), strict=True):
            run *= size
            if size != extent:
                break
        return run

    def is_contiguous_in(self, shape: Sequence[int]) -> bool:
        """Say whether all its elements follow each other in a tensor of a shape."""
        return self.run_in(shape) == self.numel


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many elements of a row-major tensor an index counts for, along each dimension."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def subarrays_of_range(shape: Sequence[int], first: int, last: int) -> list[Subarray]:
    """Return the subarrays that the elements from `first` up to `last` of a row-major tensor make, in their order.

    Args:
        shape: Of the tensor.
        first: Number of the first element.
        last: Number of the last element, plus one.

    Returns:
        At most two for each dimension, one less in all; none if there are no elements.
    """
    return list(_subarrays(tuple(shape), first, last))


def _subarrays(shape: tuple[int, ...], first: int, last: int) -> Iterator[Subarray]:
    if first >= last:
        return
    if not shape:
        yield Subarray((), ())
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:  # within one row
        yield from _in_row(shape, end, first - end * row, last - end * row)
        return
    yield from _in_row(shape, begin - 1, first - (begin - 1) * row, row if first < begin * row else 0)
    if begin < end:
        yield Subarray((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]))
    yield from _in_row(shape, end, 0, last - end * row)


def _in_row(shape: tuple[int, ...], index: int, first: int, last: int) -> Iterator[Subarray]:
    for subarray in _subarrays(shape[1:], first, last):
        yield Subarray((index, *subarray.start), (1, *subarray.size))
