"""Backward in two halves: first the gradients of inputs, later those of parameters (layer 5).

The stage before waits for the gradient of this stage's input; nobody waits for the gradients of its parameters
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). In the graph that autograd has recorded,

    output ── AddmmBackward ── GeluBackward ── AddmmBackward ── input
                   │                                │
                 weight                           weight

the nodes between output and input lie on the *way*. The first half runs along it, and keeps the gradients that
arrive at the nodes where a branch to a weight leaves it. The second half runs each of those nodes again with what
was kept, this time for the weight only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
        behind_roots: Those parameters; None means all that backward leads to, as there was no first half.
    """

    def __init__(
        self,
        branches: dict[Node, list[Tensor]],
        roots: tuple[list[GradientEdge], list[Tensor]],
        behind_roots: list[Tensor] | None,
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
        if self._behind_roots is None:
            torch.autograd.backward(edges_of_roots, gradients_of_roots)
        elif self._behind_roots:
            torch.autograd.backward(edges_of_roots, gradients_of_roots, inputs=self._behind_roots)
        self._branches, self._roots, self._behind_roots = {}, ([], []), []


def input_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightGradients:
    """Add the gradients of a stage's inputs to their `grad`, and prepare those of its parameters; local.

    Parameters of one dimension (biases, norms) and those that are used at several places get theirs at once: the
    former cost next to nothing here and as much as a whole node later, the latter would be reached from each of the
    places again.

    Args:
        edges: Where backward begins: the gradient edges of the outputs.
        gradients: What comes back for each output.
        inputs: Leaves that require grad.

    Returns:
        The second half.
    """
    roots = list(edges), list(gradients)
    if not inputs:
        return WeightGradients({}, roots, None)
    graph = _Graph([edge.node for edge in edges], inputs)
    if not graph.reached:
        return WeightGradients({}, roots, None)
    weights = WeightGradients(graph.branches, roots, graph.behind_roots)
    handles = [weights.keep(node) for node in graph.branches]
    try:
        torch.autograd.backward(edges, gradients, inputs=[*graph.reached, *graph.at_once], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return weights


class _Graph:
    """What autograd has recorded between outputs and inputs.

    Attributes:
        reached: The inputs that can be reached.
        branches: For each node on the way, the parameters behind those of its edges that leave the way.
        behind_roots: The parameters that are reached from outputs without touching the way.
        at_once: The parameters of which neither holds, as their gradients are computed with those of the inputs.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        leaves = {torch.autograd.graph.get_gradient_edge(leaf).node: leaf for leaf in inputs}
        children = _children_first(roots)
        way: set[Node] = set()
        for node, below in children.items():
            if node in leaves or not way.isdisjoint(below):
                way.add(node)
        self.reached = [leaf for node, leaf in leaves.items() if node in way]
        places: list[tuple[Node | None, set[Node]]] = []
        for node, below in children.items():
            beside = [child for child in below if child not in way] if node in way else []
            if beside:
                places.append((node, _leaves_below(beside, children)))
        places.append((None, _leaves_below([root for root in roots if root not in way], children)))
        uses = Counter(leaf for _, found in places for leaf in found)
        variables = {leaf: _variable(leaf) for leaf in uses}
        later = {leaf: variable for leaf, variable in variables.items() if uses[leaf] == 1 and variable.dim() > 1}
        self.at_once = [variable for leaf, variable in variables.items() if leaf not in later]
        own = [(node, [later[leaf] for leaf in found if leaf in later]) for node, found in places]
        self.branches = {node: found for node, found in own if node is not None and found}
        self.behind_roots = own[-1][1]


def _children_first(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return all nodes below the roots with those they lead to, each after these."""
    order: dict[Node, list[Node]] = {}
    seen: dict[Node, list[Node]] = {}
    stack: list[Node] = list(roots)
    while stack:
        node = stack[-1]
        if node not in seen:
            seen[node] = below = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in below if child not in seen]
        else:
            stack.pop()
            order.setdefault(node, seen[node])
    return order


def _leaves_below(nodes: Sequence[Node], children: Mapping[Node, Sequence[Node]]) -> set[Node]:
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        below = children[node]
        if below:
            stack += below
        elif node.name() == _LEAF:
            found.add(node)
    return found


def _variable(leaf: Node) -> Tensor:
    node: Any = leaf
    variable: Tensor = node.variable
    return variable
