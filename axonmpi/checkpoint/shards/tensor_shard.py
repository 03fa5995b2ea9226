"""A rank's shard of one tensor of a checkpoint: name, full shape, subarrays and their memory.

    full tensor     "blocks.0.output.weight" [8, 6], of a model with tensor parallelism and FSDP
    a rank's shard  pieces [5, 2] at (0, 2) and [1, 1] at (5, 2): views of the rank's own memory

Checkpoints are written from shards and read into shards, so readers and writers do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .subarrays import Subarray, subarrays_of_range


class Replicas(NamedTuple):
    """Ranks with the same elements.

    Attributes:
        size: Number of ranks.
        rank: This rank's number among them.
    """

    size: int
    rank: int

    @classmethod
    def among(cls, ranks: Sequence[int], rank: int) -> Replicas:
        """Return ranks as replicas; a rank that is none of them counts as the only one."""
        return cls(len(ranks), ranks.index(rank)) if rank in ranks else cls(1, 0)

    def times(self, inner: Replicas) -> Replicas:
        """Return the replicas if each of these ranks stands for as many ranks as `inner` has."""
        if self.size == 1:  # the usual case
            return inner
        return Replicas(self.size * inner.size, self.rank * inner.size + inner.rank)


UNREPLICATED = Replicas(1, 0)


@dataclass(frozen=True)
class Piece:
    """A subarray of a full tensor in this rank's memory.

    Attributes:
        subarray: Its position in the full tensor.
        view: [*subarray.size] its values, of any strides and on any device; loading writes to it.
    """

    subarray: Subarray
    view: Tensor

    def copy_from(self, other: Piece, dtype: torch.dtype | None = None) -> None:
        """Copy the elements that another piece has as well; local.

        Args:
            other: A piece of the same tensor.
            dtype: Floating-point values are rounded to it first.
        """
        common = self.subarray.intersection(other.subarray)
        if common is not None:
            values = other.view[common.within(other.subarray).slices]
            if dtype is not None and values.is_floating_point():
                values = values.to(dtype)
            self.view[common.within(self.subarray).slices].copy_(values)


def pieces_of_range(elements: Tensor, shape: Sequence[int], first: int) -> Iterator[Piece]:
    """Yield the pieces of a tensor that contiguous elements are; local.

    Args:
        elements: [n] the elements from `first` on, in row-major order.
        shape: Of the tensor.
        first: Number of the first element.
    """
    at = 0
    for subarray in subarrays_of_range(shape, first, first + len(elements)):
        yield Piece(subarray, elements[at : at + subarray.numel].view(subarray.size))
        at += subarray.numel


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of one tensor.

    Attributes:
        name: The tensor's name in the file.
        shape: Shape of the full tensor.
        dtype: Dtype of the rank's memory.
        pieces: The rank's elements; empty if this rank has none.
        replicas: The ranks of a tensor-parallel group with the same elements.
        is_split: Ranks with the same elements write a slice each. If False, the first of them writes all elements:
            their values may differ, as those of buffers do.
        may_wait: Only the optimizer's step changes the values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece] = field(default=(), compare=False)
    replicas: Replicas = UNREPLICATED
    is_split: bool = True
    may_wait: bool = False
