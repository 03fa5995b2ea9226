"""How a parameter is cut over the ranks of a group: integer arithmetic, and copying rows.

    even      0 1 2 3 | 4 5 6 7                           each rank its slice
    packed    q0 q1 k0 k1 | q2 q3 k2 k3                   each rank its slice of each part of a packed parameter
    padded    0 1 2 3 | 4 5 6 ·                           slices of equal size, with zeros after the last row
    heads     k0 | k0 | k1 | k1                           fewer heads than ranks: several ranks have the same one

A `Shard` says which rows each rank has, so that the same few lines cut a parameter for training and join it again
for a checkpoint. "Rows" lie along `dim`, so they may be columns of a matrix.
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

Range = tuple[int, int]
"""The first row, and the one after the last."""


@dataclass(frozen=True)
class Shard:
    """How one parameter is cut.

    Attributes:
        dim: Dimension that is cut; negative ones count from the end.
        size: Rows of the whole parameter.
        ranges: For each rank the rows that it has, in the order in which its tensor has them.
        local: Rows of each rank's tensor; rows beyond the rank's ranges are padding, zeros at the end.
        copies: On how many ranks each row is.

    Raises:
        ValueError: The ranges do not give each row to `copies` ranks, or one rank has more than `local` rows.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]
    local: int
    copies: int = 1

    def __post_init__(self) -> None:
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
            size: Rows of the whole parameter.
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
            sizes_of_parts: Rows of each part, in their order in the whole parameter.
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
            size: Rows of the whole parameter, any number.
            group_size: Number of ranks.
        """
        local = -(-size // group_size)
        ranges = [[(min(rank * local, size), min((rank + 1) * local, size))] for rank in range(group_size)]
        return _shard(dim, size, ranges, local)

    @classmethod
    def heads(cls, dim: int, num_heads: int, head_width: int, group_size: int) -> Shard:
        """Cut between attention heads; with fewer heads than ranks each head is on several ranks; local.

        Args:
            dim: Dimension that is cut, from 0.
            num_heads: Number of heads.
            head_width: Rows of each head.
            group_size: Number of ranks.

        Raises:
            ValueError: Neither of `num_heads` and `group_size` is a multiple of the other.
        """
        if num_heads < 1 or (num_heads % group_size and group_size % num_heads):
            raise ValueError(
                f"num_heads: expected a multiple or a divisor of the {group_size} ranks of the group, got "
                f"{num_heads}; use another number of ranks"
            )
        if num_heads % group_size == 0:
            return cls.even(dim, num_heads * head_width, group_size)
        copies = group_size // num_heads
        ranges = [[(rank // copies * head_width, (rank // copies + 1) * head_width)] for rank in range(group_size)]
        return _shard(dim, num_heads * head_width, ranges, head_width, copies)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def is_plain(self) -> bool:
        """Whether concatenating the ranks' tensors gives the whole one."""
        flat = [bounds for own in self.ranges for bounds in own]
        return self.copies == 1 and self.local * self.group_size == self.size and flat == sorted(flat)

    def along(self, dim: int) -> Shard:
        """Return the same division of another dimension, such as of the activations that belong to a parameter."""
        return replace(self, dim=dim)

    def rows(self, rank: int) -> int:
        """Return how many rows of the whole parameter a rank has; the rest of its `local` rows is padding."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's part; local.

        Args:
            full: The whole parameter, [..., size, ...].
            rank: Whose part.

        Returns:
            A new contiguous tensor, [..., local, ...]; autograd follows.

        Raises:
            ValueError: `full` has another size along `dim`.
        """
        dim = wrap_dim(self.dim, full.dim())
        if full.shape[dim] != self.size:
            raise ValueError(f"expected a tensor of size {self.size} along dim {dim}, got shape {list(full.shape)}")
        pieces = [full.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        padding = self.local - self.rows(rank)
        if padding:
            pieces.append(full.new_zeros(_with(full, dim, padding)))
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, dim) if pieces else full.new_empty(_with(full, dim, 0))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the ranks' parts; local.

        Args:
            parts: [..., local, ...] of each rank, in rank order. Where several ranks have a row, the first counts.

        Returns:
            The whole parameter, a new tensor [..., size, ...]; autograd follows.

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
        whole = [pieces[bounds] for bounds in sorted(pieces)]
        return torch.cat(whole, dim) if whole else parts[0].new_empty(_with(parts[0], dim, 0))


@runtime_checkable
class Sharded(Protocol):
    """A module some of whose own parameters are cut over the ranks of a group.

    Attributes:
        process_group: The ranks.
        shards: How its own parameters are cut, by name; the others are the same on all ranks.
    """

    process_group: ProcessGroup
    shards: Mapping[str, Shard]


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
    """Raise unless ranks can have equal shares of a size; local.

    Args:
        name: The argument's name.
        size: The size.
        ranks: The number of ranks.
        advice: How to divide it otherwise.

    Raises:
        ValueError: `size` is no multiple of `ranks`.
    """
    if size % ranks:
        raise ValueError(
            f"{name}: expected a multiple of the {ranks} ranks of the group, got {size}; "
            f"use another size or number of ranks{advice}"
        )


def _with(tensor: Tensor, dim: int, size: int) -> list[int]:
    return [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
