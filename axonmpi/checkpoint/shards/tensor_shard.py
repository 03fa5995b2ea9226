"""Shards of tensors, under the names that the full tensors have in the files.

    full tensor     "blocks.0.output.weight" [8, 6], of a model with tensor parallelism and FSDP
    a rank's shard  pieces [5, 2] at (0, 2) and [1, 1] at (5, 2): views of the rank's own memory

Checkpoints are written from shards and read into shards, so readers and writers do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .subarrays import Subarray


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
        """Return this rank's place among ranks; a rank that is none of them counts as the only one."""
        return cls(len(ranks), ranks.index(rank)) if rank in ranks else cls(1, 0)

    def times(self, inner: Replicas) -> Replicas:
        """Return the replicas if each of these ranks stands for as many ranks as `inner` has."""
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


@dataclass(frozen=True)
class TensorShard:
    """This rank's shard of one tensor.

    Attributes:
        name: The tensor's name in the file.
        shape: Of the full tensor.
        dtype: Of the rank's memory.
        pieces: The rank's elements; empty if other ranks have all of them.
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


def full_shard(name: str, tensor: Tensor, *, is_split: bool = False) -> TensorShard:
    """Return the shard of a rank that has the full tensor; local."""
    shape = tuple(tensor.shape)
    piece = Piece(Subarray.full(shape), tensor.detach())
    return TensorShard(name, shape, tensor.dtype, [piece], is_split=is_split)
