"""Gradients laid end to end, to be reduced together.

    bucket 0  | grad of head.weight | grad of head.bias |          first to become ready in backward
    bucket 1  | grad of block3.w    | grad of block2.w  | ...

`param.grad` is a view of its bucket (with `gradient_as_bucket_view`), so nothing is copied on the way back. On the
way in, a gradient in new memory of autograd's is copied once; one that accumulates into the view is not copied.
The views have the strides of their parameters, so that optimizers find both laid out alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..across_ranks.model_checks import gradient_strides
from ..backends import by_kind
from ..groups.process_group import ProcessGroup
from ..types import ReduceOp, Work
from ..utils.memory import flat_zeros
from ..utils.partition import bucket_by_size

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that its reduction begins early in backward (Li et al. 2020, section 3.2.3)."""
BUCKETS_BETWEEN_NODES = 8
"""A small model has as many at least where they go over a network beside backward: of what is reduced last, little
is hidden."""


class Bucket:
    """Some parameters' gradients in one flat tensor.

    Args:
        parameters: The parameters by their positions in the reducer's list, all of one dtype and device.
        reduce_dtype: Dtype of communication, None for the gradients' own; complex gradients keep theirs.
        group: The ranks to reduce over.

    Attributes:
        flat: [numel] the gradients, end to end.
        wire: [numel] what is reduced: `flat` itself, or a copy in the dtype of communication.
        pending: Positions of the parameters whose gradients have not arrived yet.
        launched: Whether the reduction of this backward has begun.
    """

    def __init__(
        self, parameters: Mapping[int, nn.Parameter], reduce_dtype: torch.dtype | None, group: ProcessGroup
    ) -> None:
        self.parameters = dict(parameters)
        self._group = group
        first = next(iter(parameters.values()))
        sizes = [parameter.numel() for parameter in parameters.values()]
        if reduce_dtype in (None, first.dtype) or first.dtype.is_complex:
            self.flat = self.wire = _zeros(sum(sizes), first.dtype, first.device, group)
        else:
            self.flat = flat_zeros(sum(sizes), first.dtype, first.device)
            self.wire = _zeros(sum(sizes), reduce_dtype, first.device, group)
        self._views = {
            position: part.as_strided(parameter.shape, gradient_strides(parameter), part.storage_offset())
            for (position, parameter), part in zip(parameters.items(), torch.split(self.flat, sizes), strict=True)
        }
        self.reset()

    def reset(self) -> None:
        """Expect all gradients anew; local."""
        self.pending = set(self.parameters)
        self.launched = False
        self._work: Work | None = None

    def put(self, position: int, *, as_view: bool) -> None:
        """Copy in the gradient of one parameter, zero if it has none; local."""
        parameter, view = self.parameters[position], self._views[position]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif not _is_on(grad, view):
            view.copy_(grad.detach())
            if as_view and not grad.requires_grad:
                parameter.grad = view.detach()
        self.pending.discard(position)

    def adopt(self) -> None:
        """Make existing gradients views of this bucket, with the values they have; local."""
        for position, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.put(position, as_view=True)
        self.reset()

    def launch(self, *, async_op: bool) -> None:
        """Begin to average the gradients over the ranks; collective."""
        self.launched = True
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)
        self._work = self._group.all_reduce(self.wire, ReduceOp.AVERAGE, async_op)

    def wait(self) -> None:
        """Wait for the reduction, if one is under way; local."""
        if self._work is not None:
            self._work.wait(self._group.backend.timeout)

    def unpack(self, used: Sequence[bool], *, as_view: bool, scale: float) -> None:
        """Make the reduced values the gradients of the parameters that any rank uses.

        A gradient that has a history keeps it: backward through it gives each rank its part of the next gradient,
        which is averaged in its turn.
        """
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)
        if scale != 1.0:
            self.flat.mul_(scale)
        for position, parameter in self.parameters.items():
            view = self._views[position]
            if not used[position]:
                continue
            if parameter.grad is not None and (parameter.grad.requires_grad or not as_view):
                parameter.grad.copy_(view)
            elif not as_view:
                parameter.grad = view.clone()
            elif parameter.grad is None or not _is_on(parameter.grad, view):
                parameter.grad = view.detach()


def _is_on(grad: Tensor, view: Tensor) -> bool:
    """Say whether a gradient is a view of the bucket; converting a module puts gradients elsewhere."""
    return grad.dtype == view.dtype and grad.is_set_to(view)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Make [numel] zeros, in memory that the ranks of a node share where they can; collective."""
    memory = group.backend.on(device)
    if memory.place != device:  # as with threads that have tensors on a GPU
        return torch.zeros(numel, dtype=dtype, device=device)
    return memory.symmetric_empty((numel,), dtype).zero_()


def divided_into_buckets(
    parameters: Sequence[nn.Parameter], order: Sequence[int], cap_bytes: int | None
) -> list[list[int]]:
    """Return the positions of the parameters of each bucket, one dtype and device each, in the given order; local.

    Args:
        parameters: All parameters.
        order: Their positions, in the order in which gradients are expected.
        cap_bytes: Largest bucket in bytes (a larger gradient gets one of its own); None: one bucket a kind.
    """
    groups: list[list[int]] = []
    for places in by_kind([parameters[position] for position in order]).values():
        positions = [order[place] for place in places]
        groups += [positions] if cap_bytes is None else _cut(parameters, positions, cap_bytes)
    # A bucket can go when its last gradient is ready: that, not the kind, is the order of the buckets.
    return sorted(groups, key=lambda positions: order.index(positions[-1]))


def _cut(parameters: Sequence[nn.Parameter], positions: list[int], cap_bytes: int) -> list[list[int]]:
    sizes = [parameters[position].nbytes for position in positions]
    count = len(bucket_by_size(sizes, min(FIRST_BUCKET_BYTES, cap_bytes))[0])
    rest = bucket_by_size(sizes[count:], cap_bytes)
    return [positions[:count], *([positions[count + place] for place in bucket] for bucket in rest)]
