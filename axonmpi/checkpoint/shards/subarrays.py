"""Subarrays: rectangular ranges of a tensor, in integer arithmetic only.

    shape (4, 5)      . . . . .
                      . . # # #     elements 7 to 16 in row-major order, such as a shard of a flat parameter, are
                      # # # # #     three subarrays: the end of a row, full rows, the beginning of a row
                      # . . . .

In a file, the elements of a subarray that is full in all but its first dimension are contiguous. Other subarrays
are several contiguous runs with gaps between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Subarray:
    """A rectangular range of a tensor, as in `MPI_Type_create_subarray`.

    Attributes:
        start: Index of its first element, a number for each dimension.
        size: Elements along each dimension.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Subarray:
        """Return the subarray of all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the subarray in the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def intersection(self, other: Subarray) -> Subarray | None:
        """Return the elements that are in both subarrays, None if there are none."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(
            min(a + m, b + n) - begin
            for a, m, b, n, begin in zip(self.start, self.size, other.start, other.size, start, strict=True)
        )
        return Subarray(start, size) if all(extent > 0 for extent in size) else None

    def within(self, outer: Subarray) -> Subarray:
        """Return the subarray with a start that is relative to that of another subarray around it."""
        return Subarray(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def offset_in(self, shape: Sequence[int]) -> int:
        """Return the row-major number of its first element in a tensor."""
        return sum(index * stride for index, stride in zip(self.start, strides_of(shape), strict=True))

    def run_in(self, shape: Sequence[int]) -> int:
        """Return the length of its contiguous runs in a tensor, in elements."""
        run = 1
        for size, extent in zip(reversed(self.size), reversed(shape), strict=True):
            run *= size
            if size != extent:
                break
        return run

    def run_offsets(self, shape: Sequence[int]) -> Iterator[int]:
        """Yield the row-major number of the first element of each contiguous run in a tensor."""
        first, run = self.offset_in(shape), self.run_in(shape)
        if run == self.numel:
            yield first
            return
        strides = strides_of(shape)
        for number in range(0, self.numel, run):
            index = np.unravel_index(number, self.size)
            yield first + sum(int(at) * stride for at, stride in zip(index, strides, strict=True))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def subarrays_of_range(shape: Sequence[int], first: int, last: int) -> list[Subarray]:
    """Return the subarrays that the elements from `first` up to `last` make, in row-major order.

    Args:
        shape: Of the tensor.
        first: Number of the first element.
        last: Number of the last element, plus one.

    Returns:
        At most two for each dimension, less one; none if there are no elements.
    """
    if first >= last:
        return []
    if not shape:
        return [Subarray((), ())]
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # the full rows
    if begin > end:  # all elements are in one row
        return _in_row(shape, end, first - end * row, last - end * row)
    found = _in_row(shape, begin - 1, first - (begin - 1) * row, row if first < begin * row else 0)
    if begin < end:
        found.append(Subarray((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:])))
    return found + _in_row(shape, end, 0, last - end * row)


def _in_row(shape: Sequence[int], index: int, first: int, last: int) -> list[Subarray]:
    inner = subarrays_of_range(shape[1:], first, last)
    return [Subarray((index, *subarray.start), (1, *subarray.size)) for subarray in inner]
