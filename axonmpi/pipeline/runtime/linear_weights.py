"""Weight gradients of linear layers, computed without autograd's graph.

    forward        y = x @ w         w is a parameter, or its transpose as in a linear layer
    first half     dx = dy @ w'      by autograd, on the way to the stage's input
    second half    dw = x' @ dy

Only x and dy are kept of such a layer, and the graph is freed after the first half. One operation computes dw and
adds it to the gradient of earlier micro-batches, so that no matrix of the weight's size is written and read again.
Autograd adds dw for parameters with hooks, and for weights that are computed from a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...wrapping.gradient_hooks import is_watched

Leaf: type = type(get_gradient_edge(torch.ones((), requires_grad=True)).node)
"""The class of autograd's nodes that add to the `grad` of a leaf."""

_TRANSPOSE = "TBackward0"
_MULTIPLICATIONS = {"MmBackward0": ("self", 1), "AddmmBackward0": ("mat1", 2)}
"""By the name of a node: autograd's name of the saved x, and the index of the edge to w."""


class LinearWeight:
    """The weight of a linear layer, between the halves of its backward.

    Args:
        x: The left operand.
        weight: The parameter that is, or that determines, the right operand.
        edge: The edge from the layer to the right operand.
        is_transposed: Whether the right operand is transposed in the multiplication.
    """

    def __init__(self, x: Tensor, weight: Tensor, edge: GradientEdge, *, is_transposed: bool) -> None:
        self.weight = weight
        self.edge = edge
        self._x = x
        self._is_transposed = is_transposed
        self._dy: Tensor | None = None

    def take(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep dy: a hook of the layer's node."""
        self._dy = gradients[0]

    def add(self) -> Tensor | None:
        """Compute the gradient and add it, once; return it instead if autograd has to add it."""
        x, dy = self._x, self._dy
        if dy is None:
            return None
        self._dy = None
        dy = dy.reshape(-1, dy.shape[-1])
        left, right = (dy.t(), x.conj()) if self._is_transposed else (x.conj().t(), dy)
        weight, total = self.weight, self.weight.grad
        if type(self.edge.node) is not Leaf or is_watched(weight):
            return left.mm(right)
        if total is not None and _is_like(total, dy) and not total.requires_grad:
            total.addmm_(left, right)
        elif total is None and _is_like(weight, dy) and weight.is_contiguous():
            weight.grad = left.mm(right)
        else:
            return left.mm(right)
        return None


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and _is_plain(one)


def _is_plain(tensor: Tensor) -> bool:
    """Return True unless a tensor is sparse or of a subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def add_weight_gradients(linear_weights: Sequence[LinearWeight]) -> None:
    """Add the gradients of weights to their parameters' `grad`; local."""
    left = [(each, gradient) for each in linear_weights if (gradient := each.add()) is not None]
    if left:
        edges = [each.edge for each, _ in left]
        weights = [each.weight for each, _ in left]
        torch.autograd.backward(edges, [gradient for _, gradient in left], inputs=weights)


def find_linear_weight(node: Node, leaf: Node, weight: Tensor) -> LinearWeight | None:
    """Return the weight of a node that multiplies by a parameter, or by a function of one parameter alone.

    Args:
        node: The node.
        leaf: The parameter's node, below one edge of `node`.
        weight: The parameter.
    """
    if node.name() not in _MULTIPLICATIONS:
        return None
    operand, edge = _MULTIPLICATIONS[node.name()]
    has_hooks = getattr(node, f"_raw_saved_{operand}").unpack_hook is not None
    if has_hooks or getattr(node, "_saved_alpha", 1) != 1:
        return None
    x = getattr(node, f"_saved_{operand}").detach()
    child, position = node.next_functions[edge]
    is_transposed = child is not None and child.name() == _TRANSPOSE
    if child is not None and is_transposed:
        child, position = child.next_functions[0]
    if child is None or is_of_python(child) or not _leads_to(child, leaf) or not _is_plain(x):
        return None
    return LinearWeight(x, weight, GradientEdge(child, position), is_transposed=is_transposed)


def _leads_to(node: Node, leaf: Node) -> bool:
    """Return True if each node from `node` down to a leaf has one edge only."""
    while node is not leaf:
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1:
            return False
        (node,) = below
    return True


def is_of_python(node: object) -> bool:
    """Return True for the node of a Python function, which only the graph keeps alive; local."""
    return isinstance(node, BackwardCFunction)


def has_saved_hooks(node: Node) -> bool:
    """Return True if a node's saved tensors have to be unpacked, as under activation checkpointing; local."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if getattr(one, "unpack_hook", None) is not None:
                return True
    return False


@cache
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
