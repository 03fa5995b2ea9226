"""Gradient buckets: the size of the first and of the others, the parameters in each, and the reduction of one.

    bucket 0  | grad of head.weight | grad of head.bias |          first to become ready in backward
    bucket 1  | grad of block3.w    | grad of block2.w  | ...

With `gradient_as_bucket_view`, `param.grad` is a view of its bucket: averages are not copied back, and a gradient
is copied in only if autograd allocated new memory for it instead of accumulating into the view. Views have the
strides of their parameters, so that an optimizer finds both in one layout.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..across_ranks.model_checks import gradient_strides
from ..backends import by_kind
from ..groups.process_group import ProcessGroup
from ..record import own_record
from ..types import ReduceOp, Work
from ..utils.memory import flat_zeros
from ..utils.partition import bucket_by_size

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that its reduction begins early in backward (Li et al. 2020, section 3.2.3)."""
BUCKETS_BETWEEN_NODES = 8
"""Least number of buckets whose reductions overlap with backward and cross a network: the last is not hidden."""


class Bucket:
    """Gradients of some parameters in one flat tensor.

    Args:
        parameters: The parameters by their positions in the reducer's list, all of one dtype and device.
        group: The ranks to average over.
        reduce_dtype: Dtype of communication, None for the gradients' own; complex gradients keep theirs.
        as_view: True if gradients become views of `flat`.
        async_op: True if the reduction runs beside backward.

    Attributes:
        flat: [numel] the gradients, end to end.
        wire: [numel] the tensor that is reduced: `flat` itself, or a copy in the dtype of communication.
        pending: Positions of the parameters whose gradients have not arrived yet.
        launched: True after the start of this backward's reduction.
    """

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        group: ProcessGroup,
        *,
        reduce_dtype: torch.dtype | None,
        as_view: bool,
        async_op: bool,
    ) -> None:
        self.parameters = dict(parameters)
        self._group = group
        self._as_view = as_view
        self._async_op = async_op
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
        """Expect the gradients of another backward; local."""
        self.pending = set(self.parameters)
        self.launched = False
        self._work: Work | None = None

    def put(self, position: int) -> None:
        """Copy in the gradient of one parameter, zeros if it has none; local."""
        parameter, view = self.parameters[position], self._views[position]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif not _is_on(grad, view):
            view.copy_(grad.detach())
            if self._as_view and not grad.requires_grad:
                parameter.grad = view.detach()
        self.pending.discard(position)

    def adopt(self) -> None:
        """Copy in existing gradients, so that views no longer hold the memory of earlier buckets; local."""
        for position, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.put(position)
        self.reset()

    def launch(self) -> None:
        """Begin to average the gradients over the ranks; collective."""
        self.launched = True
        self._launched_at = time.monotonic_ns()
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)
        self._work = self._group.all_reduce(self.wire, ReduceOp.AVERAGE, self._async_op)

    def wait(self) -> None:
        """Wait for the reduction, if one is under way; local."""
        if self._work is not None:
            self._work.wait(self._group.backend.timeout)
        if self.launched and (trace := own_record().trace) is not None:
            trace.span("bucket", self._launched_at, f"{len(self.parameters)} grads", self.wire.nbytes)

    def unpack(self, used: Sequence[bool], scale: float) -> None:
        """Write the averages into the gradients of the parameters that any rank uses; local.

        A gradient with a history (`create_graph=True`) is overwritten in place: backward through it gives each rank
        its own second gradient, which is averaged in turn.

        Args:
            used: For each parameter of the reducer, whether any rank uses it.
            scale: Factor on the averages.
        """
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)
        if scale != 1.0:
            self.flat.mul_(scale)
        for position, parameter in self.parameters.items():
            view = self._views[position]
            if not used[position]:
                continue
            if parameter.grad is not None and (parameter.grad.requires_grad or not self._as_view):
                parameter.grad.copy_(view)
            elif not self._as_view:
                parameter.grad = view.clone()
            elif parameter.grad is None or not _is_on(parameter.grad, view):
                parameter.grad = view.detach()


def _is_on(grad: Tensor, view: Tensor) -> bool:
    """Return True if a gradient is the view of the bucket; converting a module replaces gradients."""
    return grad.dtype == view.dtype and grad.is_set_to(view)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
    """Make [numel] zeros, in symmetric memory if the backend has it on this device; collective."""
    memory = group.backend.on(device)
    if memory.place != device:  # mock ranks with tensors on a GPU
        return torch.zeros(numel, dtype=dtype, device=device)
    return memory.symmetric_empty((numel,), dtype).zero_()


def assign_buckets(
    parameters: Sequence[nn.Parameter], order: Sequence[int], cap_bytes: int | None
) -> list[list[int]]:
    """Return the positions of the parameters of each bucket, one dtype and device a bucket; local.

    Args:
        parameters: All parameters.
        order: Their positions, in the order in which gradients are expected.
        cap_bytes: Largest bucket in bytes (a larger gradient gets its own); None: one bucket a dtype and device.
    """
    buckets: list[list[int]] = []
    for indices in by_kind([parameters[position] for position in order]).values():
        positions = [order[index] for index in indices]
        buckets += [positions] if cap_bytes is None else _split(parameters, positions, cap_bytes)
    # A bucket is ready with its last gradient, so that gradient and not the dtype decides the order of buckets.
    return sorted(buckets, key=lambda positions: order.index(positions[-1]))


def _split(parameters: Sequence[nn.Parameter], positions: list[int], cap_bytes: int) -> list[list[int]]:
    """Return the positions of each bucket, the first bucket a small one."""
    sizes = [parameters[position].nbytes for position in positions]
    count = len(bucket_by_size(sizes, min(FIRST_BUCKET_BYTES, cap_bytes))[0])
    rest = bucket_by_size(sizes[count:], cap_bytes)
    return [positions[:count], *([positions[count + index] for index in bucket] for bucket in rest)]
