"""Many tensors in few collectives: laid end to end in flat buffers, a few for each dtype (layer 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .backends.base import Backend
from .partition import bucket_by_size
from .types import ReduceOp

__all__ = ["all_reduce_coalesced", "broadcast_coalesced", "by_dtype"]

BUCKET_BYTES = 25 << 20


def by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """Return the positions of the tensors of each dtype, dtypes in order of first appearance."""
    positions: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.dtype, []).append(position)
    return positions


def all_reduce_coalesced(backend: Backend, tensors: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce each tensor over all ranks, in place, in few collectives; collective.

    Args:
        backend: The communicator.
        tensors: The same shapes and dtypes in the same order on all ranks.
        op: The reduction.

    Raises:
        TypeError: `tensors` is a single tensor, or holds something else.
    """
    _coalesced(backend, tensors, lambda flat: backend.all_reduce(flat, op))


def broadcast_coalesced(backend: Backend, tensors: Sequence[Tensor], src: int) -> None:
    """Copy rank `src`'s tensors into those of all others, in place, in few collectives; collective.

    Args:
        backend: The communicator.
        tensors: The same shapes and dtypes in the same order on all ranks.
        src: Rank to copy from.
    """
    _coalesced(backend, tensors, lambda flat: backend.broadcast(flat, src))


def _coalesced(backend: Backend, tensors: Any, operation: Callable[[Tensor], object]) -> None:
    if isinstance(tensors, Tensor):
        raise TypeError("expected a list of tensors, got one tensor; put it into a list")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a list of tensors, got {type(tensor).__name__} at position {position}")
    with torch.no_grad():
        for bucket in _buckets(tensors):
            if len(bucket) == 1:
                operation(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            operation(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for positions in by_dtype(tensors).values():
        sizes = [tensors[position].nbytes for position in positions]
        for bucket in bucket_by_size(sizes, BUCKET_BYTES):
            yield [tensors[positions[entry]] for entry in bucket]
