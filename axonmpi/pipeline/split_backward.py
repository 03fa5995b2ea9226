"""Backward in two halves: first the gradients of inputs, later those of parameters (layer 5).

The stage before waits for the gradient of this stage's input; nobody waits for the gradients of its parameters
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). In the graph that autograd has recorded,

    output ── AddmmBackward ── GeluBackward ── AddmmBackward ── input
                   │                                │
                 weight                           weight

the nodes between output and input lie on the *way*. The first half runs along it, and keeps the gradients that
arrive at the nodes where a branch to parameters leaves it. The second half runs each of those nodes again with
what was kept, this time for the parameters only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["WeightGradients", "input_gradients"]

_LEAF = "torch::autograd::AccumulateGrad"


class WeightGradients:
    """The second half of a backward: what it needs of the first one.

    Args:
        branches: For each node with branches, the leaves they lead to.
        roots: Outputs with their gradients, whose parameters are not behind any node on the way.
        behind_roots: Those parameters.
    """

    def __init__(
        self,
        branches: dict[Node, list[Tensor]],
        roots: tuple[list[GradientEdge], list[Tensor]],
        behind_roots: list[Tensor],
    ) -> None:
        self._branches = branches
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        self._roots = roots
        self._behind_roots = behind_roots

    def keep(self, node: Node) -> Any:
        """Have what arrives at a node kept; return the hook's handle."""

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = gradients

        return node.register_prehook(hook)

    def compute(self) -> None:
        """Add the gradients of the parameters to their `grad`; once. Afterwards the graph is free."""
        for node, leaves in self._branches.items():
            arrived = self._arrived.pop(node, ())
            pairs = [(GradientEdge(node, number), grad) for number, grad in enumerate(arrived) if grad is not None]
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(edges, gradients, inputs=leaves)
        edges_of_roots, gradients_of_roots = self._roots
        if self._behind_roots:
            torch.autograd.backward(edges_of_roots, gradients_of_roots, inputs=self._behind_roots)
        self._branches, self._roots, self._behind_roots = {}, ([], []), []


def input_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightGradients:
    """Add the gradients of a stage's inputs to their `grad`, and prepare those of its parameters; local.

    Args:
        edges: Where backward begins: the gradient edges of the outputs.
        gradients: What comes back for each output.
        inputs: Leaves that require grad.

    Returns:
        The second half.
    """
    graph = _Graph([edge.node for edge in edges], inputs)
    shared = graph.shared
    weights = WeightGradients(graph.branches, (list(edges), list(gradients)), graph.behind_roots)
    if not graph.way:
        return weights
    handles = [weights.keep(node) for node in graph.branches]
    try:
        # A parameter that is used at several places of the way would be reached from all of them again.
        torch.autograd.backward(edges, gradients, inputs=[*graph.reached, *shared], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return weights


class _Graph:
    """What autograd has recorded between outputs and inputs.

    Attributes:
        way: The nodes from which an input can be reached.
        reached: The inputs that can be reached.
        branches: For each node on the way, the parameters behind those of its edges that leave the way.
        behind_roots: The parameters that are reached from outputs without touching the way.
        shared: The parameters that are in more than one of these places.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        leaves = {torch.autograd.graph.get_gradient_edge(leaf).node: leaf for leaf in inputs}
        order = _children_first(roots)
        self.way: set[Node] = set()
        for node in order:
            if node in leaves or any(child in self.way for child in _children(node)):
                self.way.add(node)
        self.reached = [leaf for node, leaf in leaves.items() if node in self.way]
        places: list[tuple[Node | None, set[Node]]] = [
            (node, _leaves_below([child for child in _children(node) if child not in self.way]))
            for node in order
            if node in self.way
        ]
        places.append((None, _leaves_below([root for root in roots if root not in self.way])))
        seen: dict[Node, int] = {}
        for _, found in places:
            for leaf_node in found:
                seen[leaf_node] = seen.get(leaf_node, 0) + 1
        self.shared = [_variable(leaf_node) for leaf_node, count in seen.items() if count > 1]
        own = [(node, [_variable(n) for n in found if seen[n] == 1]) for node, found in places]
        self.branches = {node: found for node, found in own if node is not None and found}
        self.behind_roots = next(found for node, found in own if node is None)
        if not self.way:  # there is no first half: all is left to the second
            self.behind_roots += self.shared
            self.shared = []


def _children(node: Node) -> Iterable[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes below the roots, each after those it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node)]
    return order


def _leaves_below(nodes: Sequence[Node]) -> set[Node]:
    return {node for node in _children_first(nodes) if node.name() == _LEAF}


def _variable(leaf: Node) -> Tensor:
    node: Any = leaf
    variable: Tensor = node.variable
    return variable
