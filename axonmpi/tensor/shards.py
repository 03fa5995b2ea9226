"""Shards of a parameter over the ranks of a group: integer arithmetic, and copies of rows.

    even      0 1 2 3 | 4 5 6 7                           each rank its slice
    packed    q0 q1 k0 k1 | q2 q3 k2 k3                   each rank its slice of each part of a packed parameter
    padded    0 1 2 3 | 4 5 6 ·                           slices of equal size, with zeros after the last row
    heads     k0 | k0 | k1 | k1                           fewer heads than ranks: several ranks have the same one

A `Shard` has the rows of each rank, so that the same few lines cut a parameter for training and join it again for a
checkpoint. "Rows" are indices along `dim`, so they may be columns of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..backends import wrap_dim
from ..groups.process_group import ProcessGroup
from ..utils.arguments import check_flags

Range = tuple[int, int]
"""The first row, and the one after the last."""


@dataclass(frozen=True)
class Shard:
    """The rows of a parameter that each rank has.

    Attributes:
        dim: Dimension that is cut; negative numbers count from the end.
        size: Rows of the full parameter.
        ranges: For each rank its rows, in the order of its tensor.
        local: Rows of each rank's tensor; rows beyond the rank's ranges are padding, zeros at the end.
        copies: Number of ranks that have each row.
        is_transposed: Whether the full parameter is [in, out] and the ranks' tensors are [out, in]; `dim` is a
            dimension of the ranks' tensors.

    Raises:
        ValueError: The ranges do not give each row to `copies` ranks, or one rank has more than `local` rows.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]
    local: int
    copies: int = 1
    is_transposed: bool = False

    def __post_init__(self) -> None:
        check_flags(is_transposed=self.is_transposed)
        counts = Counter(bounds for own in self.ranges for bounds in own)
        ends = [0]
        for start, stop in sorted(counts):
            ends.append(stop if start == ends[-1] < stop else -1)
        if ends[-1] != self.size or -1 in ends or not {*counts.values()} <= {self.copies}:
            raise ValueError(
                f"ranges: expected ranges that have each of {self.size} rows on {self.copies} ranks and overlap "
                f"nowhere else, got {self.ranges}"
            )
        most = max(map(self.rows, range(self.group_size)), default=0)
        if most > self.local:
            raise ValueError(f"local: expected at least the {most} rows that a rank has, got {self.local}")

    @classmethod
    def even(cls, dim: int, size: int, group_size: int) -> Shard:
        """Cut into slices of equal size; local.

        Args:
            dim: Dimension that is cut, from 0.
            size: Rows of the full parameter.
            group_size: Number of ranks.

        Raises:
            ValueError: `size` is no multiple of `group_size`.
        """
        return cls.packed(dim, [size], group_size)

    @classmethod
    def packed(cls, dim: int, sizes_of_parts: Sequence[int], group_size: int) -> Shard:
        """Cut each part of a packed parameter, such as queries, keys and values in one matrix; local.

        Args:
            dim: Dimension that is cut, from 0.
            sizes_of_parts: Rows of each part, in their order in the full parameter.
            group_size: Number of ranks.

        Raises:
            ValueError: A size is no multiple of `group_size`.
        """
        for size in sizes_of_parts:
            check_divides("size", size, group_size)
        starts = [0, *accumulate(sizes_of_parts)]
        ranges = [
            [
                (start + rank * (size // group_size), start + (rank + 1) * (size // group_size))
                for start, size in zip(starts, sizes_of_parts, strict=False)
            ]
            for rank in range(group_size)
        ]
        return _shard(dim, starts[-1], ranges, starts[-1] // group_size)

    @classmethod
    def padded(cls, dim: int, size: int, group_size: int) -> Shard:
        """Cut into slices of equal size, the last ones padded with zeros, as is usual for a vocabulary; local.

        Args:
            dim: Dimension that is cut, from 0.
            size: Rows of the full parameter, any number.
            group_size: Number of ranks.
        """
        local = -(-size // group_size)
        ranges = [[(min(rank * local, size), min((rank + 1) * local, size))] for rank in range(group_size)]
        return _shard(dim, size, ranges, local)

    @classmethod
    def heads(cls, dim: int, num_heads: int, head_width: int, group_size: int, parts: int = 1) -> Shard:
        """Cut between attention heads; with fewer heads than ranks each head is on several ranks; local.

        Args:
            dim: Dimension that is cut, from 0.
            num_heads: Number of heads in each part.
            head_width: Rows of each head.
            group_size: Number of ranks.
            parts: Number of parts, such as keys and values in one matrix.

        Raises:
            ValueError: Neither of `num_heads` and `group_size` is a multiple of the other.
        """
        if num_heads < 1 or (num_heads % group_size and group_size % num_heads):
            raise ValueError(
                f"num_heads: expected a multiple or a divisor of the {group_size} ranks of the group, got "
                f"{num_heads}; use another number of ranks"
            )
        size = num_heads * head_width
        if num_heads % group_size == 0:
            return cls.packed(dim, [size] * parts, group_size)
        copies = group_size // num_heads
        ranges = []
        for rank in range(group_size):
            starts = [part * size + rank // copies * head_width for part in range(parts)]
            ranges.append([(start, start + head_width) for start in starts])
        return _shard(dim, parts * size, ranges, parts * head_width, copies)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def is_plain(self) -> bool:
        """Whether concatenating the ranks' tensors gives the full one."""
        flat = [bounds for own in self.ranges for bounds in own]
        return self.copies == 1 and self.local * self.group_size == self.size and flat == sorted(flat)

    def along(self, dim: int) -> Shard:
        """Return the shard, along a dimension, of activations that are computed with the parameter."""
        return replace(self, dim=dim, is_transposed=False)

    def rows(self, rank: int) -> int:
        """Return the number of a rank's rows; the rest of its `local` rows is padding."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's tensor; local.

        Args:
            full: The full parameter, [..., size, ...].
            rank: The rank.

        Returns:
            A new contiguous tensor, [..., local, ...]; autograd follows.

        Raises:
            ValueError: `full` has another size along `dim`.
        """
        full = full.t() if self.is_transposed else full
        dim = wrap_dim(self.dim, full.dim())
        if full.shape[dim] != self.size:
            raise ValueError(f"expected a tensor of size {self.size} along dim {dim}, got shape {list(full.shape)}")
        pieces = [full.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        padding = self.local - self.rows(rank)
        if padding:
            pieces.append(full.new_zeros(_with(full.shape, dim, padding)))
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, dim) if pieces else full.new_empty(_with(full.shape, dim, 0))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the ranks' tensors; local.

        Args:
            parts: [..., local, ...] of each rank, in rank order. Of several ranks with one row the first counts.

        Returns:
            The full parameter, a new tensor [..., size, ...]; autograd follows.

        Raises:
            ValueError: A part is missing, or has another size along `dim`.
        """
        dim = wrap_dim(self.dim, parts[0].dim()) if parts else 0
        if len(parts) != self.group_size or any(part.shape[dim] != self.local for part in parts):
            raise ValueError(
                f"expected {self.group_size} parts of size {self.local} along dim {dim}, "
                f"got shapes {[list(part.shape) for part in parts]}"
            )
        pieces: dict[Range, Tensor] = {}
        for own, part in zip(self.ranges, parts, strict=True):
            at = 0
            for start, stop in own:
                pieces.setdefault((start, stop), part.narrow(dim, at, stop - start))
                at += stop - start
        ordered = [pieces[bounds] for bounds in sorted(pieces)]
        full = torch.cat(ordered, dim) if ordered else parts[0].new_empty(_with(parts[0].shape, dim, 0))
        return full.t().contiguous() if self.is_transposed else full

    def full_shape(self, local: Sequence[int]) -> list[int]:
        """Return the shape of the full parameter, from the shape of a rank's tensor; local."""
        full = _with(local, wrap_dim(self.dim, len(local)), self.size)
        return full[::-1] if self.is_transposed else full


@runtime_checkable
class Sharded(Protocol):
    """A module some of whose own parameters are cut over the ranks of a group.

    Attributes:
        process_group: The ranks.
        shards: The shards of its own parameters, by name; parameters without one are the same on all ranks.
    """

    process_group: ProcessGroup
    shards: Mapping[str, Shard]


def gather_shards(part: Tensor, shard: Shard, group: ProcessGroup) -> Tensor:
    """Return the full parameter of all ranks' tensors; collective."""
    return shard.join(group.backend.all_gather(part[None], sizes=[1] * group.size).unbind(0))


def scatter_shards(full: Tensor | None, shard: Shard, group: ProcessGroup) -> Tensor:
    """Return this rank's tensor of rank 0's full parameter, which is None on other ranks; collective."""
    parts = None if full is None else torch.stack([shard.cut(full, rank) for rank in range(group.size)])
    part: Tensor = group.scatter(parts)[0]
    return part


def _shard(dim: int, size: int, ranges: Sequence[Sequence[Range]], local: int, copies: int = 1) -> Shard:
    """Make a shard without empty ranges, in which neighbouring ranges are one."""
    return Shard(dim, size, tuple(tuple(_merged(own)) for own in ranges), local, copies)


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        elif start < stop:
            merged.append((start, stop))
    return merged


def check_divides(name: str, size: int, ranks: int, advice: str = "") -> None:
    """Raise unless a size is a multiple of the number of ranks; local.

    Args:
        name: The argument's name.
        size: The size.
        ranks: The number of ranks.
        advice: The end of the message: another way to divide it.

    Raises:
        ValueError: `size` is no multiple of `ranks`.
    """
    if size % ranks:
        raise ValueError(
            f"{name}: expected a multiple of the {ranks} ranks of the group, got {size}; "
            f"use another size or number of ranks{advice}"
        )


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]
