"""A stage: its module, and its records of micro-batches between forward and backward.

    forward         inputs become leaves ── module ── outputs: keep(m) stores the edges of their gradients
    backward(m)     gradients of the outputs ── autograd ── gradients of the leaves, and of the parameters
    or in halves    backward(m, divided=True), later backward_weight(m)

Backward drops them, and with them the activations that autograd has kept. `backward_weight` drops the
activations that the gradients of parameters need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...groups.process_group import ProcessGroup
from ...utils.arguments import integer
from .linear_weights import is_of_python
from .split_backward import WeightGradients, input_gradients


@runtime_checkable
class Synchronized(Protocol):
    """A stage's module that averages its gradients with other ranks, as DDP and FSDP do.

    Within `no_sync()` backward only adds up gradients; `sync_gradients()` averages them afterwards.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up this rank's gradients only, within the block."""

    def sync_gradients(self) -> None:
        """Average the gradients; collective over the ranks with the same stage."""


class PipelineStage:
    """A part of a model, and its rank.

    Args:
        module: The part. Other ranks may give None, or a module that is dropped.
        stage_id: Its number in the order of data, from 0.
        device_rank: Its rank in the pipeline's group.

    Raises:
        TypeError: `module` is neither a module nor None, or a number is no integer.
        ValueError: A number is negative.
    """

    def __init__(self, module: nn.Module | None, stage_id: int, device_rank: int) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module or None, got {type(module).__name__}")
        self.module = module
        self.stage_id = integer("stage_id", stage_id, minimum=0)
        self.device_rank = integer("device_rank", device_rank, minimum=0)

    def __repr__(self) -> str:
        return (
            f"PipelineStage({type(self.module).__name__}, stage_id={self.stage_id}, device_rank={self.device_rank})"
        )


@dataclass
class PendingBackward:
    """The inputs and outputs of a stage that a micro-batch's backward needs.

    Attributes:
        leaves: By source stage, the received tensors that require gradients.
        edges: By target stage, the gradient edges of the sent tensors that require gradients.
        loss: The gradient edge of the loss, and its gradient, on the last stage.
    """

    leaves: dict[int, list[Tensor]]
    edges: dict[int, list[GradientEdge]]
    loss: tuple[GradientEdge, Tensor] | None


class StageRun:
    """One stage of this rank, with its micro-batches between forward and backward.

    Args:
        module: The stage's module.

    Attributes:
        module: The stage's module.
        communicates: Whether its computation may wait for other ranks, as in FSDP or in tensor-parallel layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._pending: dict[int, PendingBackward] = {}
        self._weights: dict[int, WeightGradients] = {}
        groups = [getattr(part, "process_group", None) for part in module.modules()]
        self._synchronized = module if isinstance(module, Synchronized) else None
        has_group = any(isinstance(group, ProcessGroup) for group in groups)
        self.communicates = self._synchronized is not None or has_group

    def without_sync(self) -> AbstractContextManager[None]:
        """Return the module's `no_sync()`, if it has one."""
        return nullcontext() if self._synchronized is None else self._synchronized.no_sync()

    def sync_gradients(self) -> None:
        """Average gradients with the ranks that have the same stage, if there are any."""
        if self._synchronized is not None:
            self._synchronized.sync_gradients()

    def keep(
        self,
        micro_batch: int,
        arrived: Mapping[int, Sequence[Tensor]],
        sent: Mapping[int, Sequence[Tensor]],
        loss: Tensor | None,
        weight: float,
    ) -> None:
        """Keep a forward's inputs and outputs for backward.

        Args:
            micro_batch: The micro-batch.
            arrived: Its tensors from other stages, by stage.
            sent: Its tensors to other stages, by stage.
            loss: Its loss, on the last stage.
            weight: Its weight in the loss of the batch.
        """
        leaves = {source: [t for t in tensors if t.requires_grad] for source, tensors in arrived.items()}
        edges = {target: [_owning_edge(t) for t in tensors if t.requires_grad] for target, tensors in sent.items()}
        root = None
        if loss is not None and loss.requires_grad:
            root = _owning_edge(loss), torch.full_like(loss, weight)
        self._pending[micro_batch] = PendingBackward(leaves, edges, root)

    def backward(
        self, micro_batch: int, gradients: Mapping[int, Sequence[Tensor]], *, divided: bool
    ) -> dict[int, list[Tensor]]:
        """Compute the gradients of the stage's inputs; return them by source stage.

        Args:
            micro_batch: The micro-batch.
            gradients: By target stage, the gradients of the sent tensors that require one.
            divided: Whether to leave the gradients of parameters to `backward_weight`; a module with
                `needs_whole_backward` computes them here all the same.
        """
        pending = self._pending.pop(micro_batch)
        edges, given = ([pending.loss[0]], [pending.loss[1]]) if pending.loss else ([], [])
        for target, of_target in pending.edges.items():
            edges += of_target
            given += gradients[target]
        if edges and divided and not getattr(self.module, "needs_whole_backward", False):
            leaves = [leaf for leaves in pending.leaves.values() for leaf in leaves]
            self._weights[micro_batch] = input_gradients(edges, given, leaves)
        elif edges:
            torch.autograd.backward(edges, given)
        return {source: [_taken_gradient(leaf) for leaf in leaves] for source, leaves in pending.leaves.items()}

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients of the parameters that `backward` has left."""
        if micro_batch in self._weights:
            self._weights.pop(micro_batch).compute()


def _owning_edge(tensor: Tensor) -> GradientEdge:
    """Return a tensor's gradient edge, which keeps its graph alive.

    Only the graph keeps the node of a Python function, and before torch 2.9 an edge to it keeps nothing. A view's
    node keeps both.
    """
    edge = get_gradient_edge(tensor)
    return get_gradient_edge(tensor.view_as(tensor)) if is_of_python(edge.node) else edge


def _taken_gradient(leaf: Tensor) -> Tensor:
    """Take a leaf's gradient away from it; zeros if it was not used."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient
