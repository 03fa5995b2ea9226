"""Linear layers whose weights' gradients lie in memory that is used again (layer 4).

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
from ..memory import REUSED_BYTES

__all__ = ["LinearLayers", "QuickLinear", "is_linear", "linear"]


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
    rows = input.numel() // max(weight.shape[-1], 1)
    return (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and not torch.compiler.is_compiling()
        and (weight.nbytes >= REUSED_BYTES or (quick and matmul.gains(rows, weight.numel(), tensors)))
        and all(tensor.device.type == "cpu" and tensor.dtype == weight.dtype for tensor in tensors)
        and all(type(tensor) in matmul.PLAIN for tensor in tensors)
        and not torch.is_autocast_enabled("cpu")
        and matmul.nothing_transforms()
    )


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, quick: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.quick = quick
        return matmul.linear(input, weight, bias) if quick else F.linear(input, weight, bias)

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
            # Gradients of gradients need a product that autograd knows.
            recorded = torch.is_grad_enabled()
            results[1] = left @ right if recorded else matmul.weight_gradient(weight, left, right, quick=quick)
        return *results, None


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
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, QuickLinear.forward)


class LinearLayers:
    """The large linear layers of a module, which compute by `linear` within `direct`.

    Args:
        module: What is searched. Layers that compute in a way of their own are left alone.

    Attributes:
        weights: Those of the layers, each once.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if is_linear(layer) and _is_large(layer)]
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
                if "forward" not in layer.__dict__:  # somebody else's, or ours in a call within a call
                    layer.__dict__["forward"] = forward
                    changed.append(layer)
            yield
        finally:
            for layer in changed:
                layer.__dict__.pop("forward", None)


def _is_large(layer: nn.Linear) -> bool:
    return isinstance(layer.weight, nn.Parameter) and layer.weight.nbytes >= REUSED_BYTES


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    # What is computed again in backward would be computed in the other way, and keep other tensors.
    if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return F.linear(input, layer.weight, layer.bias)
    return linear(input, layer.weight, layer.bias)
