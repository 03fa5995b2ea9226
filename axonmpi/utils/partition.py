"""Partition of a number of elements, in integer arithmetic.

A tensor scattered over ranks and gradients packed into buckets are partitioned by these functions alone, so all
ranks, and sender and receiver, compute the same sizes without communication.

    split_sizes(10, 4)              (3, 3, 2, 2)                      as torch.tensor_split
    split_bounds(10, 4)             ((0, 3), (3, 6), (6, 8), (8, 10))
    split_range(10, 4, 1)           (3, 6)                            the second of these, at constant cost
    bucket_by_size([3, 2, 9, 1], 5) [[0, 1], [2], [3]]                in order, nothing dropped
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` elements into `parts` sizes as `torch.tensor_split` does: the first ones are larger by one.

    Args:
        total: Number of elements, at least 0.
        parts: Number of parts, at least 1; may exceed `total`, the last parts are then empty.

    Returns:
        `parts` sizes that add up to `total`.

    Raises:
        ValueError: `total` is negative or `parts` is below 1.
    """
    if total < 0 or parts < 1:
        raise ValueError(
            f"expected a total of at least 0 elements and at least 1 part, got total={total}, parts={parts}"
        )
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def split_bounds(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of each part of `split_sizes`.

    Args:
        total: Number of elements, at least 0.
        parts: Number of parts, at least 1.

    Returns:
        `parts` pairs `(start, stop)`, in elements, without gaps from 0 to `total`.

    Raises:
        ValueError: `total` is negative or `parts` is below 1.
    """
    sizes = split_sizes(total, parts)
    return tuple((stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))


def split_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds of one part of `split_sizes`, without computing the others.

    Args:
        total: Number of elements, at least 0.
        parts: Number of parts, at least 1.
        index: The part's number, from 0 to `parts` - 1.

    Returns:
        `(start, stop)`, in elements.
    """
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def bucket_by_size(sizes: Iterable[int], capacity: int) -> list[list[int]]:
    """Pack items into buckets in their order: an item opens a new bucket when the last one cannot take it.

    An item larger than `capacity` gets a bucket of its own; an item of size 0 joins the bucket before it.

    Args:
        sizes: Size of each item, at least 0, in the unit of `capacity`.
        capacity: Size of a bucket, at least 1.

    Returns:
        The buckets, each a list of indices of `sizes`; none is empty, and concatenated they are `0, 1, 2, …`.

    Raises:
        ValueError: `capacity` is below 1 or a size is negative.
    """
    if capacity < 1:
        raise ValueError(f"capacity: expected at least 1, got {capacity}")
    buckets: list[list[int]] = []
    free = -1
    for position, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"sizes: expected at least 0 each, got {size} at position {position}")
        if size > free:
            buckets.append([])
            free = capacity
        buckets[-1].append(position)
        free -= size
    return buckets
