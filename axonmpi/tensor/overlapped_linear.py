"""The linear operation of column layers, with communication that overlaps the computation of backward.

    forward      x ── gather ── y = x wᵀ + b
    backward     dy ── start to gather x ── dx = dy w ── start the sum of dx ── dw = dyᵀ x ── wait for dx

Without sequence parallelism nothing is gathered, and the sum is an all-reduce. With it each rank has a slice of x:
the sum is a reduce-scatter, and only the slice is kept for backward.

Layers that share an input get the result of `regions.enter`, which gathers it and sums dx once for all layers. It
attaches this rank's slice to the tensor: layers keep the slice, and in backward the first one gathers it for all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .. import autograd
from ..errors import CollectiveMismatchError
from ..groups.process_group import ProcessGroup
from ..types import ReduceOp, Work
from ..utils.torch_internals import engine_runs

_ENTERED = "_axonmpi_entered"


def column_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int | None
) -> Tensor:
    """Return x wᵀ + b; backward sums the gradient of x over the ranks, and is collective as forward is.

    Args:
        input: [..., in] the same on all ranks, or this rank's slice of the sequence.
        weight: [out, in].
        bias: [out], or None.
        group: The ranks, each of which has other outputs.
        dim: Dimension of the sequence in the input; None without sequence parallelism.
    """
    if group.size == 1 or (dim is None and not is_differentiated(input)):
        return F.linear(input, weight, bias)
    local, weight, bias = _cast(input, weight, bias)
    full = local if dim is None else gathered(local.detach(), group, dim)
    rows = apply(_OverlappedLinear, local, weight, bias, (full, local), InputGather(group, dim), True)
    return rows.view(*full.shape[:-1], weight.shape[0])


def entered_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x wᵀ + b of the result of `enter`, or of a function of it; backward gathers a sequence again.

    Args:
        input: [..., in] the full input.
        weight: [out, in].
        bias: [out], or None.
    """
    if not hasattr(input, _ENTERED) or not torch.is_grad_enabled():
        return F.linear(input, weight, bias)
    gathering, local = getattr(input, _ENTERED)
    full, weight, bias = _cast(input, weight, bias)
    rows = apply(_OverlappedLinear, full, weight, bias, (full, local.to(full.dtype)), gathering, False)
    return rows.view(*full.shape[:-1], weight.shape[0])


class InputGather:
    """The all-gather of an input in backward, once for all layers that share the input.

    Args:
        group: The ranks.
        dim: Dimension of the sequence; None if each rank has the full input.

    Attributes:
        group: The ranks.
        dim: Dimension of the sequence, or None.
        users: Number of layers that need the full input in backward.
    """

    def __init__(self, group: ProcessGroup, dim: int | None) -> None:
        self.group = group
        self.dim = dim
        self.users = 0
        self._served = 0
        self._full: Tensor | Work | None = None

    def mark(self, full: Tensor, local: Tensor) -> None:
        """Attach this rank's slice to the full input, for the layers that get it; local."""
        setattr(full, _ENTERED, (self, local))

    def start(self, local: Tensor) -> None:
        """Start to gather, unless another layer has; collective.

        Args:
            local: This rank's slice.
        """
        if self.dim is not None and self._full is None and not torch.is_grad_enabled():
            backend = self.group.backend
            self._full = backend.all_gather(
                local.detach(),
                self.dim,
                async_op=backend.on(local.device).overlaps,
                sizes=[local.shape[self.dim]] * self.group.size,
            )

    def full(self, local: Tensor) -> Tensor:
        """Return the full input, after `start`; dropped after the last layer's call.

        Args:
            local: This rank's slice.
        """
        if torch.is_grad_enabled():  # gradients of gradients are wanted, which are sums over the ranks too
            group, dim = self.group, self.dim
            return autograd.copy(local, group) if dim is None else autograd.all_gather(local, group, dim)
        if self.dim is None:
            return local
        full = self._full.result() if isinstance(self._full, Work) else self._full
        assert full is not None
        self._served += 1
        self._full = full
        if self._served >= self.users:
            self._full, self._served = None, 0
        return full


class _OverlappedLinear(Function):
    """[..., in] -> [N, out], with other rows of the weight on each rank.

    A result [..., out] would be a view, and views that an autograd function returns cannot be changed in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: tuple[Tensor, Tensor],
        gathering: InputGather,
        sums: bool,
    ) -> Tensor:
        full, local = values
        ctx.save_for_backward(local, weight)
        ctx.options = gathering, sums, full.shape
        gathering.users += ctx.needs_input_grad[1]
        return F.linear(_rows(full), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (local, weight), (gathering, sums, shape) = grads, ctx.saved_tensors, ctx.options
        of_input, of_weight, of_bias = (_is_wanted(ctx, number) for number in range(3))
        dx, dw, work = None, None, None
        if of_weight:
            gathering.start(local)
        if of_input:
            dx = (grad @ weight.conj()).view(shape)
            if sums:
                dx, work = _start_sum(dx, gathering.group, gathering.dim)
        if of_weight:
            dw = grad.t() @ _rows(gathering.full(local)).conj()
        if work is not None:
            scattered = work.result()
            dx = dx if scattered is None else scattered
        return dx, dw, grad.sum(0) if of_bias else None, None, None, None


def _start_sum(parts: Tensor, group: ProcessGroup, dim: int | None) -> tuple[Tensor, Work | None]:
    """Start the sum over the ranks; return its tensor, or one that the work's result replaces, and the work."""
    if torch.is_grad_enabled():  # gradients of gradients are wanted
        return autograd.reduce(parts, group) if dim is None else autograd.reduce_scatter(parts, group, dim), None
    overlaps = group.backend.on(parts.device).overlaps
    if dim is None:
        return parts, group.all_reduce(parts, ReduceOp.SUM, overlaps)
    started = group.reduce_scatter(parts, ReduceOp.SUM, dim, overlaps)
    return (parts, started) if overlaps else (started, None)


def _is_wanted(node: Any, number: int) -> bool:
    """Return True if the backward that runs now needs the gradient of an input of this node; local."""
    if not node.needs_input_grad[number]:
        return False
    try:
        return engine_runs(node.next_functions[number][0])
    except RuntimeError:  # torch.autograd.grad of this very leaf
        return True


def gathered(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return the full sequence of the ranks' slices; collective.

    Raises:
        ValueError: The slices are not equally long.
    """
    try:
        full: Tensor = group.backend.all_gather(tensor, dim, sizes=[tensor.shape[dim]] * group.size)
    except CollectiveMismatchError as error:
        raise ValueError(
            f"expected slices of a sequence that are equally long on all {group.size} ranks of the group, got "
            f"{tensor.shape[dim]} along dim {dim} on rank {group.rank}; use split_sequence(). {error}"
        ) from error
    return full


def is_differentiated(tensor: Tensor) -> bool:
    """Return True if autograd records operations on a tensor; local."""
    return tensor.requires_grad and torch.is_grad_enabled()


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call an autograd function that has one output."""
    result: Tensor = function.apply(*inputs)
    return result


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a linear layer, in the dtype of autocast if it is enabled."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = input.dtype if input.dtype is torch.float64 else torch.get_autocast_dtype(kind)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
