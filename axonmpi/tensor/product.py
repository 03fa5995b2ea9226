"""The product of an entered tensor with a weight, so that backward communicates while it computes.

Autograd takes the nodes that are ready newest first, so the order in which forward makes nodes decides what
backward does first. Forward makes them as they stand here from top to bottom, and backward goes from bottom to top:

    enter            waits for the sum of the input's gradient
    _OfWeight        computes the weight's gradient
    _OfInput         computes the input's gradient and starts its sum over the ranks
    _Fetch           starts to gather the whole input again, with sequence parallelism
    _Product         hands the output's gradient to the nodes above

The gradients of input and weight are nodes of their own, so that a backward in two halves does nothing twice. What
a node needs in its backward, but gives no gradient for, comes in a tuple, where autograd does not look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import autograd, matmul
from ..wrapping.linear import linear, unviewed
from .entry import Entered, Entry

__all__ = ["apply", "autocast_dtype", "product"]


def product(input: Entered, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `torch.nn.functional.linear` does; backward is collective where the input's gradient is summed.

    Args:
        input: [..., in].
        weight: [out, in].
        bias: [out], or None.
    """
    tensor, entry = input.tensor, input.entry
    if not torch.is_grad_enabled():
        return matmul.linear(tensor, weight, bias)
    if entry is None:
        return linear(tensor, weight, bias, quick=True)
    dtype = autocast_dtype(tensor)
    values = tensor.to(dtype)
    if torch.is_autocast_enabled(tensor.device.type):  # else other dtypes are a mistake, as in torch's own layer
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    shape = (*tensor.shape[:-1], weight.shape[0])
    of_weight = of_input = None
    if weight.requires_grad:
        of_weight = apply(_OfWeight, weight, shape, entry, (values if input.local is None else input.local,))
    if tensor.requires_grad:
        of_input = apply(_OfInput, tensor, shape, entry, (weight,))
    if of_weight is not None and input.local is not None:
        of_weight = apply(_Fetch, of_weight, entry, (input.local,))
    return apply(_Product, of_weight, of_input, bias, (values, weight))


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes with the tensor, which under autocast is not its own."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(kind)


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call a function of autograd's that has one output."""
    result: Tensor = function.apply(*inputs)
    return result


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _nothing(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that takes no memory, for nodes from which only a gradient is wanted."""
    return like.new_zeros(()).expand(shape)


class _OfWeight(Function):
    """[out, in] weight -> where the gradient [..., out] of the outputs comes in."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: tuple[int, ...], entry: Entry, values: tuple[Tensor]) -> Tensor:
        ctx.entry, ctx.parameter = entry, weight
        ctx.save_for_backward(*values)
        entry.weights += 1
        return _nothing(weight, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, (values,), entry = grads[0], ctx.saved_tensors, ctx.entry
        if torch.is_grad_enabled():  # gradients of gradients are wanted
            if entry.dim is not None:
                values = autograd.all_gather(values, entry.group, entry.dim)
            return _rows(grad).t() @ _rows(values.to(grad.dtype)).conj(), None, None, None
        if entry.dim is not None:
            values = entry.whole(values)
        left, right = _rows(grad).t(), _rows(values.to(grad.dtype)).conj()
        return matmul.weight_gradient(ctx.parameter, left, right, quick=True), None, None, None


class _OfInput(Function):
    """[..., in] entered tensor -> where the gradient [..., out] of the outputs comes in."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: tuple[int, ...], entry: Entry, weight: tuple[Tensor]) -> Tensor:
        ctx.entry = entry
        ctx.save_for_backward(*weight)
        entry.gradients += 1
        return _nothing(weight[0], shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, (weight,) = grads[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            return grad @ weight.conj(), None, None, None
        ctx.entry.add(_rows(grad), weight.conj())
        return None, None, None, None


class _Fetch(Function):
    """Nothing, but that the whole input is on its way when the weight's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, of_weight: Tensor, entry: Entry, local: tuple[Tensor]) -> Tensor:
        ctx.entry = entry
        ctx.save_for_backward(*local)
        return of_weight.view_as(of_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            ctx.entry.fetch(*ctx.saved_tensors)
        return grads[0], None, None


class _Product(Function):
    """The values; from here the outputs' gradient goes to the nodes made before."""

    @staticmethod
    def forward(
        ctx: Any,
        of_weight: Tensor | None,
        of_input: Tensor | None,
        bias: Tensor | None,
        operands: tuple[Tensor, Tensor],
    ) -> Tensor:
        # Not needed again, and kept elsewhere: so it can be seen that checkpointing will compute this node again.
        ctx.save_for_backward(operands[1])
        return unviewed(matmul.linear(*operands, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed, grad = ctx.needs_input_grad, grads[0]
        of_bias = _rows(grad).sum(0) if needed[2] else None
        return grad if needed[0] else None, grad if needed[1] else None, of_bias, None
