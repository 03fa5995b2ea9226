"""Weights of linear layers, whose gradients need no second run of the graph.

    forward   y = x @ w         w is a parameter, or its transpose as in a linear layer
    way       dx = dy @ w'      autograd does this on the way to the stage's input
    later     dw = x' @ dy      all that is left to do for the weight

Only x and dy are kept of such a product, and the graph is freed after the first half. One operation computes the
product and adds it to the gradient of earlier micro-batches, so that no matrix of the weight's size is written and
read again. Autograd adds it where the parameter has hooks, and where the weight is computed from the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...wrapping.autograd import is_watched

Leaf: type = type(get_gradient_edge(torch.ones((), requires_grad=True)).node)
"""The class of nodes that add a gradient to that of a parameter."""

_TRANSPOSE = "TBackward0"
_saved_by_type: dict[type, list[str]] = {}


class _Kind(NamedTuple):
    """The attributes of autograd's nodes of one kind of product.

    Attributes:
        saved: Name of the attribute with the saved x.
        raw: Name of the attribute with its saved variable, which has the hooks.
        edge: Number of the edge that leads to w.
    """

    saved: str
    raw: str
    edge: int


_KINDS = {
    "MmBackward0": _Kind("_saved_self", "_raw_saved_self", 1),
    "AddmmBackward0": _Kind("_saved_mat1", "_raw_saved_mat1", 2),
}


class LinearWeight:
    """The weight of a product, between the halves of its backward.

    Args:
        x: The left operand.
        weight: The parameter that the right operand is, or is computed from.
        edge: Where autograd takes the gradient of the right operand.
        is_transposed: Whether the right operand is transposed in the product.
    """

    def __init__(self, x: Tensor, weight: Tensor, edge: GradientEdge, *, is_transposed: bool) -> None:
        self.weight = weight
        self.edge = edge
        self._x = x
        self._is_transposed = is_transposed
        self._dy: Tensor | None = None

    def take(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep dy: a hook of the product's node."""
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
    """Say whether a tensor is an ordinary one: no subclass, not sparse."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def add_weight_gradients(products: Sequence[LinearWeight]) -> None:
    """Add the gradients of the weights of products to the parameters' `grad`; local."""
    left = [(product, gradient) for product in products if (gradient := product.add()) is not None]
    if left:
        edges = [product.edge for product, _ in left]
        weights = [product.weight for product, _ in left]
        torch.autograd.backward(edges, [gradient for _, gradient in left], inputs=weights)


def find_linear_weight(node: Node, leaf: Node, weight: Tensor) -> LinearWeight | None:
    """Return the product that a node computes, if its weight is a parameter or computed from a parameter alone.

    Args:
        node: The node.
        leaf: The parameter's node, to which one edge of the node leads.
        weight: The parameter.
    """
    kind = _KINDS.get(node.name())
    if kind is None or getattr(node, kind.raw).unpack_hook is not None or getattr(node, "_saved_alpha", 1) != 1:
        return None
    x = getattr(node, kind.saved).detach()
    child, position = node.next_functions[kind.edge]
    is_transposed = child is not None and child.name() == _TRANSPOSE
    if child is not None and is_transposed:
        child, position = child.next_functions[0]
    if child is None or is_of_python(child) or not _leads_to(child, leaf) or not _is_plain(x):
        return None
    return LinearWeight(x, weight, GradientEdge(child, position), is_transposed=is_transposed)


def _leads_to(node: Node, leaf: Node) -> bool:
    """Say whether every node from one to a leaf has one edge only."""
    while node is not leaf:
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1:
            return False
        (node,) = below
    return True


def is_of_python(node: object) -> bool:
    """Say whether a node is a Python function, which only the graph keeps alive, and no reference to it; local."""
    return isinstance(node, BackwardCFunction)


def has_saved_hooks(node: Node) -> bool:
    """Say whether a node's saved tensors have to be unpacked, as under activation checkpointing; local."""
    kind = type(node)
    if kind not in _saved_by_type:
        _saved_by_type[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _saved_by_type[kind]:
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if getattr(one, "unpack_hook", None) is not None:
                return True
    return False
