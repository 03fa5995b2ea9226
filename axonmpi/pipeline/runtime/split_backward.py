"""Backward in two halves: first the gradients of inputs, later those of parameters.

The stage before waits for the gradient of this stage's input; no rank waits for the gradients of its parameters
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). In the graph that autograd has recorded,

    output ── AddmmBackward ── GeluBackward ── AddmmBackward ── input
                   │                                │
                 weight                           weight

the nodes between output and input are the *path*; the edge from a node of the path to a weight is a *branch*. The
first half runs the path, and keeps the gradients that arrive at nodes with branches. The second half computes the
weights' gradients from them: by a matrix multiplication for linear layers (`linear_weights.py`), for any other node
by running it again for the weight only.

Some gradients are cheaper in the first half: of parameters of one dimension (biases, norms), which cost next to
nothing there and a whole node later; of parameters with branches at several nodes, each of which would run again;
and of nodes whose saved tensors have to be computed again, under activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ...utils.torch_internals import needs_torch
from .linear_weights import (
    Leaf,
    LinearWeight,
    add_weight_gradients,
    find_linear_weight,
    has_saved_hooks,
    is_of_python,
)


class WeightGradients:
    """The second half of a backward.

    Args:
        roots: Outputs with their gradients.
        behind_roots: Parameters below the outputs and beside the path; None means that there was no first half.
        branches: For each node that has to run again, its parameters.
        linear_weights: The weights of linear layers.
    """

    def __init__(
        self,
        roots: tuple[list[GradientEdge], list[Tensor]],
        behind_roots: list[Tensor] | None,
        branches: Mapping[Node, list[Tensor]],
        linear_weights: Sequence[LinearWeight],
    ) -> None:
        needs_graph = behind_roots != [] or any(map(is_of_python, branches))
        self._roots = roots if needs_graph else ([], [])
        self._behind_roots = behind_roots
        self._branches = branches
        self._linear_weights = linear_weights
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def keep(self, node: Node) -> Any:
        """Keep the gradients that arrive at a node; return the hook's handle."""

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = gradients

        return node.register_prehook(hook)

    def compute(self) -> None:
        """Add the gradients of the parameters to their `grad`, once, and drop the graph."""
        add_weight_gradients(self._linear_weights)
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
        self._roots, self._behind_roots, self._branches, self._linear_weights = ([], []), [], {}, []


def input_gradients(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightGradients:
    """Add the gradients of a stage's inputs to their `grad`, and prepare those of its parameters; local.

    Args:
        edges: The gradient edges of the outputs.
        gradients: The gradient of each output.
        inputs: Leaves that require grad.

    Returns:
        The second half.

    Raises:
        RuntimeError: torch is older than 2.11, and does not show whether a saved tensor has hooks.
    """
    needs_torch("2.11", "a backward in halves, as in PipelineSchedule.ZERO_BUBBLE,")
    roots = list(edges), list(gradients)
    graph = _Graph([edge.node for edge in edges], inputs) if inputs else None
    if graph is None or not graph.reached:
        return WeightGradients(roots, None, {}, [])
    weights = WeightGradients(roots, graph.behind_roots, graph.branches, list(graph.linear_weights.values()))
    for node, linear_weight in graph.linear_weights.items():
        node.register_prehook(linear_weight.take)  # never removed: the graph is dropped with the hook
    handles = [weights.keep(node) for node in graph.branches]
    runs_again = bool(graph.branches or graph.behind_roots)
    try:
        torch.autograd.backward(edges, gradients, inputs=[*graph.reached, *graph.at_once], retain_graph=runs_again)
    finally:
        for handle in handles:
            handle.remove()
    return weights


class _Graph:
    """The graph of autograd between outputs and inputs.

    Attributes:
        reached: The inputs below the outputs.
        linear_weights: The weights of linear layers, by the layers' nodes on the path.
        branches: For each other node of the path with a branch, its parameters.
        behind_roots: The parameters below the outputs and beside the path.
        at_once: The other parameters; the first half computes their gradients.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Tensor]) -> None:
        self._nodes = _Nodes(roots)
        leaves = {torch.autograd.graph.get_gradient_edge(leaf).node: leaf for leaf in inputs}
        self.reached = [leaf for node, leaf in leaves.items() if node in self._nodes]
        self.linear_weights: dict[Node, LinearWeight] = {}
        self.branches: dict[Node, list[Tensor]] = {}
        self.behind_roots: list[Tensor] = []
        self.at_once: list[Tensor] = []
        path = self._nodes.above(leaves)
        for leaf in self._nodes.leaves:
            if leaf not in path:
                self._assign(leaf, path)

    def _assign(self, leaf: Any, path: set[Node]) -> None:
        """Add a leaf's parameter to one of the four collections."""
        variable: Tensor = leaf.variable
        branches = self._nodes.branches_to(leaf, path) if variable.dim() > 1 else []
        if len(set(branches)) != 1:
            self.at_once.append(variable)
            return
        node = branches[0]
        if node is None:
            self.behind_roots.append(variable)
            return
        linear_weight = find_linear_weight(node, leaf, variable) if len(branches) == 1 else None
        if linear_weight is not None:
            self.linear_weights[node] = linear_weight
        elif has_saved_hooks(node):
            self.at_once.append(variable)
        else:
            self.branches.setdefault(node, []).append(variable)


class _Nodes:
    """The nodes of a graph, and their parents.

    Attributes:
        leaves: The nodes of parameters and inputs.
    """

    def __init__(self, roots: Sequence[Node]) -> None:
        # Nearly all nodes have one parent: lists for all would take twice the time.
        self._parent: dict[Node, Node | None] = dict.fromkeys(roots)
        self._others: dict[Node, list[Node]] = {}
        self._roots = set(roots)
        self.leaves = [root for root in self._roots if type(root) is Leaf]
        order = [root for root in self._parent if type(root) is not Leaf]
        for node in order:  # it grows
            for child, _ in node.next_functions:
                if child in self._parent:
                    self._others.setdefault(child, []).append(node)
                elif child is not None:
                    self._parent[child] = node
                    (self.leaves if type(child) is Leaf else order).append(child)

    def __contains__(self, node: Node) -> bool:
        return node in self._parent

    def _parents(self, node: Node) -> list[Node]:
        """Return the parents of a node, each as often as it has an edge to it."""
        parent, others = self._parent[node], self._others.get(node, [])
        return others if parent is None else [parent, *others]

    def above(self, leaves: Iterable[Node]) -> set[Node]:
        """Return the path: the leaves, and all nodes above them."""
        order = [leaf for leaf in leaves if leaf in self]
        path = set(order)
        for node in order:  # it grows
            for parent in self._parents(node):
                if parent not in path:
                    path.add(parent)
                    order.append(parent)
        return path

    def branches_to(self, leaf: Node, path: set[Node]) -> list[Node | None]:
        """Return the node of each branch from the path to a leaf, and None for each root beside the path."""
        found: list[Node | None] = []
        order, seen = [leaf], {leaf}
        for node in order:  # it grows
            if node in self._roots:
                found.append(None)
            for parent in self._parents(node):
                if parent in path:
                    found.append(parent)
                elif parent not in seen:
                    seen.add(parent)
                    order.append(parent)
        return found
