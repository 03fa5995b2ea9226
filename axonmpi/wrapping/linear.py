"""Linear layers whose weights' gradients lie in memory that is used again.

    nn.Linear                 backward asks for new memory, the system clears it page by page, the product fills it
    linear                    the product fills the memory that the last step's gradient has had

The memory may be shared by the ranks of a node: then the gradient is computed where it will be reduced, and is
not copied at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from .. import matmul
from ..utils.memory import REUSED_BYTES

__all__ = ["LinearLayers", "QuickLinear", "is_linear", "linear", "saved_by_linear", "unviewed"]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, quick: bool = False) -> Tensor:
    """Return what `torch.nn.functional.linear` does; local.

    Backward puts the gradient of a large weight into memory that is used again.

    Args:
        input: [..., in].
        weight: [out, in].
        bias: [out], or None.
        quick: Whether the products may be left to the library that is quickest, at the cost of other roundings.
    """
    if not _is_worthwhile(input, weight, bias, quick):
        return (matmul.linear if quick else F.linear)(input, weight, bias)
    function: type[Function] = _Linear
    result: Tensor = function.apply(input, weight, bias, quick)
    return result


def _is_worthwhile(input: Tensor, weight: Tensor, bias: Tensor | None, quick: bool) -> bool:
    """Say whether there is something to gain, and nothing else than autograd looks on."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if not torch.is_grad_enabled() or not matmul.is_plain(tensors) or torch.is_autocast_enabled("cpu"):
        return False
    if any(tensor.dtype != weight.dtype for tensor in tensors) or weight.dtype.is_complex:
        return False
    if weight.requires_grad and weight.nbytes >= REUSED_BYTES:
        return True
    rows = input.numel() // max(weight.shape[-1], 1)
    return quick and matmul.gains(rows, weight.numel(), tensors) and any(t.requires_grad for t in tensors)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, quick: bool) -> Tensor:
        needed = ctx.needs_input_grad
        ctx.save_for_backward(input if needed[1] else None, weight if needed[0] else None)
        ctx.quick, ctx.parameter = quick, weight
        return unviewed(matmul.linear(input, weight, bias) if quick else F.linear(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (input, weight), quick = grads, ctx.saved_tensors, ctx.quick
        of_input, of_weight, of_bias = (_is_wanted(ctx, number) for number in range(3))
        rows = grad.reshape(-1, grad.shape[-1])
        results: list[Tensor | None] = [None, None, rows.sum(0) if of_bias else None]
        if of_input:
            results[0] = matmul.product(grad, weight) if quick else grad @ weight
        if of_weight:
            left, right = rows.t(), input.reshape(-1, input.shape[-1])
            if torch.is_grad_enabled():  # gradients of gradients need a product that autograd knows
                results[1] = left @ right
            else:
                results[1] = matmul.weight_gradient(ctx.parameter, left, right, quick=quick)
        return *results, None


def saved_by_linear(node: object) -> tuple[Tensor, bool] | None:
    """Return what a node of the graph has kept for the gradient of its weight, if it is one of `linear`; local.

    Returns:
        The input, [..., in], and whether its products are left to the quickest library; None for other nodes.
    """
    function: Any = _Linear
    if type(node) is not function._backward_cls:
        return None
    known: Any = node
    input = known.saved_tensors[0]
    return None if input is None else (input, known.quick)


def unviewed(result: Tensor) -> Tensor:
    """Return the result of a product as no view, so that it can be changed in place later; local."""
    whole: Tensor = torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result
    return whole


def _is_wanted(node: Any, number: int) -> bool:
    """Say whether this run of backward goes on to an input of a node: not if it is for other tensors only; local.

    Args:
        node: The node that runs.
        number: Which of its inputs.
    """
    if not node.needs_input_grad[number]:
        return False
    try:
        wanted: bool = torch._C._will_engine_execute_node(node.next_functions[number][0])
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True
    return wanted


class QuickLinear(nn.Linear):
    """A linear layer whose products are left to the library that is quickest."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out] of [..., in]."""
        return linear(input, self.weight, self.bias, quick=True)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Say whether a module is a linear layer that computes as they all do; local."""
    return isinstance(module, nn.Linear) and type(module).forward in (_plain_forward, QuickLinear.forward)


class LinearLayers:
    """The large linear layers of a module, which compute by `linear` within `direct`.

    Args:
        module: What is searched. Layers that compute in a way of their own are left alone.

    Attributes:
        weights: Those of the layers, each once.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if is_linear(layer) and _is_large(layer)]
        if _top_hooks is None:  # torch before 2.8 does not tell about activation checkpointing
            layers = [layer for layer in layers if isinstance(layer, QuickLinear)]
        self.weights = list(dict.fromkeys(layer.weight for layer in layers))
        self._forwards: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = [
            (layer, partial(_forward, layer)) for layer in layers if not isinstance(layer, QuickLinear)
        ]

    @contextmanager
    def direct(self) -> Iterator[None]:
        """Let the layers compute by `linear`; local. Under activation checkpointing they compute as ever."""
        changed = []
        try:
            for layer, forward in self._forwards:
                # Else it is somebody's own, or ours in a call within a call.
                if "forward" not in layer.__dict__ and type(layer).forward is _plain_forward:
                    layer.__dict__["forward"] = forward
                    changed.append((layer, forward))
            yield
        finally:
            for layer, forward in changed:
                if layer.__dict__.get("forward") is forward:
                    del layer.__dict__["forward"]


_plain_forward = nn.Linear.forward
_top_hooks: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _is_large(layer: nn.Linear) -> bool:
    # Attention of torch's reads its layer's weight, and does not call the layer.
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    weight = layer.weight
    return isinstance(weight, nn.Parameter) and weight.nbytes >= REUSED_BYTES and weight.is_contiguous()


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    # What is computed again in backward would be computed in the other way, and keep other tensors.
    if torch.compiler.is_compiling() or _top_hooks is None or _top_hooks(True) is not None:
        return F.linear(input, layer.weight, layer.bias)
    return linear(input, layer.weight, layer.bias)
