"""What a rank has of a model or of an optimizer's state: shards of whole tensors, under the whole ones' names.

    whole tensor      "blocks.0.output.weight" [8, 6], of which a rank with tensor parallelism and sharding has
    its shard          pieces [5, 2] at (0, 2) and [1, 1] at (5, 2): views of the rank's own memory

A checkpoint is written from shards and read into shards, so neither knows why a tensor is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .subarrays import Subarray


@dataclass(frozen=True)
class Piece:
    """A subarray of a whole tensor, and this rank's memory for it.

    Attributes:
        subarray: Where it is in the whole tensor.
        view: [*subarray.size] its values, of any strides and on any device; written to when a checkpoint is loaded.
    """

    subarray: Subarray
    view: Tensor


@dataclass(frozen=True)
class TensorShard:
    """What a rank has of one tensor.

    Attributes:
        name: The tensor's name in the file.
        shape: Of the whole tensor.
        dtype: Of the rank's memory.
        pieces: What this rank has; nothing, if other ranks have all of it.
        copies: How many ranks of a tensor-parallel group have the same elements.
        copy: This rank's number among them.
        is_split: Whether ranks with the same elements each write some of them. Else the first of them writes all:
            their values may differ, as those of buffers do.
        may_wait: Whether nothing but the optimizer's step changes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece] = field(default=(), compare=False)
    copies: int = 1
    copy: int = 0
    is_split: bool = True
    may_wait: bool = False


def full_shard(name: str, tensor: Tensor, *, is_split: bool = False) -> TensorShard:
    """Return the shard of a rank that has all of a tensor; local."""
    shape = tuple(tensor.shape)
    return TensorShard(
        name, shape, tensor.dtype, [Piece(Subarray.whole(shape), tensor.detach())], is_split=is_split
    )
