"""Collectives on many tensors at once, in a few flat buffers for each dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..types import ReduceOp
from ..utils.partition import bucket_by_size
from .call import Layout
from .checks import check_writable
from .contract import Backend
from .reduction import check_reducible

BUCKET_BYTES = 25 << 20


@runtime_checkable
class JointReduction(Protocol):
    """A backend that reduces tensors of one device without laying them end to end."""

    def reduce_together(self, tensors: Sequence[Tensor], op: ReduceOp) -> bool:
        """Reduce each tensor over all ranks, in place, in one launch; collective.

        Args:
            tensors: At least one; the same shapes and dtypes in the same order on all ranks.
            op: The reduction.

        Returns:
            False if the backend cannot do so with these tensors; nothing was done then.
        """


def by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """Return the positions of the tensors of each dtype and device, these in order of first appearance."""
    positions: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault((tensor.dtype, tensor.device), []).append(position)
    return positions


def all_reduce_coalesced(backend: Backend, tensors: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce each tensor over all ranks, in place, in few collectives; collective.

    Args:
        backend: The communicator.
        tensors: The same shapes and dtypes in the same order on all ranks.
        op: The reduction.

    Raises:
        TypeError: `tensors` is a single tensor, or holds something else.
        ValueError: One of them cannot be reduced in place; nothing was sent.
        CollectiveMismatchError: The ranks' lists differ; nothing was changed.
    """
    checked = _check_list(backend, tensors)
    kinds = by_kind(checked)
    for dtype, _ in kinds:
        check_reducible(dtype, op)
    places = {place for _, place in kinds}
    # Tensors on several devices, and an empty list, have no single part of the backend that carries them.
    carrier: object = backend.on(places.pop()) if len(places) == 1 else None
    with torch.no_grad():
        if isinstance(carrier, JointReduction) and carrier.reduce_together(checked, op):
            return
        _coalesced(backend, checked, lambda flat, layout: backend.all_reduce(flat, op, layout=layout))


@torch.no_grad()
def broadcast_coalesced(backend: Backend, tensors: Sequence[Tensor], src: int, label: str = "") -> None:
    """Copy rank `src`'s tensors into those of all others, in place, in few collectives; collective.

    Args:
        backend: The communicator.
        tensors: The same shapes and dtypes in the same order on all ranks. May require grad.
        src: Rank to copy from.
        label: Whose tensors they are, the same on all ranks; for messages.

    Raises:
        TypeError: `tensors` is a single tensor, or holds something else.
        ValueError: One of them cannot be written to; nothing was sent.
        CollectiveMismatchError: The ranks' lists differ; nothing was changed.
    """
    checked = _check_list(backend, tensors)
    _coalesced(backend, checked, lambda flat, layout: backend.broadcast(flat, src, layout=layout, label=label))


def _check_list(backend: Backend, tensors: object) -> list[Tensor]:
    """Check all tensors before the first one is sent."""
    if isinstance(tensors, Tensor):
        raise TypeError("expected a list of tensors, got one tensor; put it into a list")
    if not isinstance(tensors, Sequence):
        raise TypeError(f"expected a list of tensors, got {type(tensors).__name__}; make it one with list(...)")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a list of tensors, got {type(tensor).__name__} at position {position}")
    return [check_writable(tensor, backend.name, backend.device_types) for tensor in tensors]


def _coalesced(backend: Backend, tensors: Sequence[Tensor], operation: Callable[[Tensor, Layout], object]) -> None:
    """Run `operation` on flat buckets; the ranks compare the whole list with the first one."""
    layout = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    if not tensors:  # the other ranks' lists may not be empty
        operation(torch.empty(0, device=backend.place), layout)
    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            operation(bucket[0], layout)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        operation(flat, layout)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for positions in by_kind(tensors).values():
        sizes = [tensors[position].nbytes for position in positions]
        for bucket in bucket_by_size(sizes, BUCKET_BYTES):
            yield [tensors[positions[entry]] for entry in bucket]
