"""Gradients laid end to end, to be reduced together (layer 5).

    bucket 0  | grad of head.weight | grad of head.bias |          first to become ready in backward
    bucket 1  | grad of block3.w    | grad of block2.w  | ...

`param.grad` is a view of its bucket (with `gradient_as_bucket_view`), so nothing is copied on the way back. On the
way in a gradient that autograd allocated itself is copied once; one that accumulates into the view is not copied.
The views have the strides of their parameters, so that optimizers find both laid out alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..bucketing import by_dtype
from ..memory import flat_zeros
from ..partition import bucket_by_size

__all__ = ["Bucket", "gradient_strides", "make_buckets"]

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that its reduction begins early in backward (Li et al. 2020, section 3.2.3)."""


class Bucket:
    """Some parameters' gradients in one flat tensor.

    Attributes:
        members: Positions of the parameters in the reducer's list.
        flat: [numel] the gradients, end to end.
        wire: [numel] what is reduced: `flat` itself, or a copy in the dtype chosen for communication.
        pending: Members whose gradients are not in yet.
        launched: Whether the reduction of this backward has begun.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], members: Sequence[int], reduce_dtype: torch.dtype | None
    ) -> None:
        self.members = list(members)
        self._parameters = [parameters[member] for member in members]
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        self.flat = flat_zeros(sum(sizes), first.dtype, first.device)
        parts = torch.split(self.flat, sizes)
        self._views = [_shaped_like(part, p) for part, p in zip(parts, self._parameters, strict=True)]
        self.wire = self.flat
        if reduce_dtype is not None and reduce_dtype != first.dtype and not first.dtype.is_complex:
            self.wire = flat_zeros(self.flat.numel(), reduce_dtype, first.device)
        self._slot = {member: position for position, member in enumerate(self.members)}
        self.pending: set[int] = set()
        self.launched = False

    def reset(self) -> None:
        """Expect all gradients anew."""
        self.pending = set(self.members)
        self.launched = False

    def put(self, member: int, *, as_view: bool) -> None:
        """Take in the gradient of one member, zero if it has none."""
        parameter, view = self._parameters[self._slot[member]], self._views[self._slot[member]]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad.detach())  # it has a history after backward(create_graph=True)
            if as_view:
                parameter.grad = view
        self.pending.discard(member)

    def adopt(self) -> None:
        """Make the gradients that there are views of this bucket, with the values they have."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad.detach())
                parameter.grad = view

    def pack(self) -> None:
        """Convert what was taken in to the dtype of communication."""
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)

    def unpack(self, used: Sequence[bool], *, as_view: bool, scale: float) -> None:
        """Bring the reduced values into the gradients of the members that are used on any rank."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)
        if scale != 1.0:
            self.flat.mul_(scale)
        for member, parameter, view in zip(self.members, self._parameters, self._views, strict=True):
            if not used[member]:
                continue
            if as_view:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where it fills its memory, else those of its shape and order of dims."""
    return torch.empty_like(parameter, device="meta").stride()


def _shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    return part.as_strided(parameter.shape, gradient_strides(parameter), part.storage_offset())


def make_buckets(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    cap_bytes: int | None,
    reduce_dtype: torch.dtype | None,
) -> list[Bucket]:
    """Pack gradients into buckets, one dtype each, in the given order; local.

    Args:
        parameters: All parameters.
        order: Their positions, in the order in which gradients are expected.
        cap_bytes: Largest bucket in bytes (a larger gradient gets one of its own); None: one bucket a dtype.
        reduce_dtype: Dtype of communication, None for the gradients' own.
    """
    groups: list[list[int]] = []
    ordered = [parameters[position] for position in order]
    for positions in by_dtype(ordered).values():
        members = [order[position] for position in positions]
        groups += [members] if cap_bytes is None else _cut(parameters, members, cap_bytes)
    # A bucket can go when its last gradient is ready: that, not the dtype, is the order of the buckets.
    rank_in_order = {member: place for place, member in enumerate(order)}
    groups.sort(key=lambda members: rank_in_order[members[-1]])
    return [Bucket(parameters, members, reduce_dtype) for members in groups]


def _cut(parameters: Sequence[nn.Parameter], members: list[int], cap_bytes: int) -> list[list[int]]:
    sizes = [parameters[member].nbytes for member in members]
    first = bucket_by_size(sizes, min(FIRST_BUCKET_BYTES, cap_bytes))[0]
    rest = bucket_by_size(sizes[len(first) :], cap_bytes)
    cut = [first] + [[len(first) + entry for entry in bucket] for bucket in rest]
    return [[members[entry] for entry in bucket] for bucket in cut]
