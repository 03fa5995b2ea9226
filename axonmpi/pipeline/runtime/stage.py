"""A stage: its module, and what it keeps of each micro-batch between forward and backward.

    forward(m)      inputs become leaves ── module ── outputs: only where their gradients enter is kept
    backward(m)     gradients of the outputs ── autograd ── gradients of the leaves, and of the parameters
    or in halves    backward_input(m), later backward_weight(m)

A record ends with the last of them, and with it the activations that autograd has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...groups.world import ProcessGroup
from .split_backward import WeightGradients, input_gradients

__all__ = ["PipelineStage", "Record", "StageRun", "Synchronized"]


@runtime_checkable
class Synchronized(Protocol):
    """What a stage's module offers if it shares its gradients with other ranks, as DDP and FSDP do.

    Within `no_sync()` backward only adds up gradients; `sync_gradients()` shares them afterwards.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients to this rank within the block."""

    def sync_gradients(self) -> None:
        """Share the gradients; collective over the ranks that have the same stage."""


class PipelineStage:
    """A part of a model, and the rank that it lives on.

    Args:
        module: The part. Other ranks may give None for a stage that is not theirs, or a module that they drop.
        stage_id: Its number in the order of data, from 0.
        device_rank: The rank of the pipeline's group that it lives on.

    Raises:
        TypeError: `module` is neither a module nor None, or a number is no integer.
        ValueError: A number is negative.
    """

    def __init__(self, module: nn.Module | None, stage_id: int, device_rank: int) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module or None, got {type(module).__name__}")
        for name, number in (("stage_id", stage_id), ("device_rank", device_rank)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name}: expected an int, got {number!r}")
            if number < 0:
                raise ValueError(f"{name}: expected 0 or more, got {number}")
        self.module = module
        self.stage_id = stage_id
        self.device_rank = device_rank

    def __repr__(self) -> str:
        return (
            f"PipelineStage({type(self.module).__name__}, stage_id={self.stage_id}, device_rank={self.device_rank})"
        )


@dataclass
class Record:
    """What a stage keeps of a micro-batch.

    Attributes:
        leaves: For each stage that it has received from, the tensors for which gradients go back.
        edges: For each stage that it sends to, where the gradients of what it sends enter.
        loss_edge: Where backward begins, on the last stage.
        weights: The second half of backward, between the halves.
    """

    leaves: dict[int, list[Tensor]] = field(default_factory=dict)
    edges: dict[int, list[GradientEdge]] = field(default_factory=dict)
    loss_edge: GradientEdge | None = None
    weights: WeightGradients | None = None


class StageRun:
    """Runs one stage of this rank.

    Args:
        stage: The stage's number.
        module: Its module.

    Attributes:
        records: What is kept, by micro-batch.
        is_shared: Whether other ranks have the same stage, and the module shares gradients with them.
        communicates: Whether computing may wait for other ranks, as of a shared stage or of divided layers.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self.stage = stage
        self.module = module
        self.records: dict[int, Record] = {}
        self.is_shared = isinstance(module, Synchronized)
        groups = [getattr(part, "process_group", None) for part in module.modules()]
        self.communicates = self.is_shared or any(isinstance(group, ProcessGroup) for group in groups)

    @property
    def halves(self) -> bool:
        """Whether the module's backward may be divided: not where hooks need to see it whole."""
        return not getattr(self.module, "needs_whole_backward", False)

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a context in which the module leaves gradients to this rank."""
        module: Any = self.module
        return module.no_sync() if self.is_shared else nullcontext()

    def sync_gradients(self) -> None:
        """Share gradients with the ranks that have the same stage, if there are any."""
        module: Any = self.module
        if self.is_shared:
            module.sync_gradients()

    def open(self, micro_batch: int, arrived: dict[int, list[Tensor]]) -> None:
        """Begin a record with what has come for a micro-batch, by the stage that it comes from."""
        leaves = {source: [t for t in tensors if t.requires_grad] for source, tensors in arrived.items()}
        self.records[micro_batch] = Record(leaves)

    def keep(self, micro_batch: int, target: int, tensors: Sequence[Tensor]) -> None:
        """Keep where the gradients of what goes to another stage enter."""
        self.records[micro_batch].edges[target] = [get_gradient_edge(t) for t in tensors if t.requires_grad]

    def keep_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Keep where backward begins."""
        self.records[micro_batch].loss_edge = get_gradient_edge(loss) if loss.requires_grad else None

    def backward(
        self, micro_batch: int, gradients: dict[int, list[Tensor]], loss_gradient: Callable[[], Tensor]
    ) -> dict[int, list[Tensor]]:
        """Compute all gradients; return those that go back, by the stage they go to."""
        record = self.records.pop(micro_batch)
        edges, given = _roots(record, gradients, loss_gradient)
        if edges:
            torch.autograd.backward(edges, given)
        return _of_leaves(record)

    def backward_input(
        self, micro_batch: int, gradients: dict[int, list[Tensor]], loss_gradient: Callable[[], Tensor]
    ) -> dict[int, list[Tensor]]:
        """Compute the gradients that go back; return them by the stage they go to."""
        record = self.records[micro_batch]
        edges, given = _roots(record, gradients, loss_gradient)
        weights = None
        if edges and not self.halves:
            torch.autograd.backward(edges, given)
        elif edges:
            leaves = [leaf for leaves in record.leaves.values() for leaf in leaves]
            weights = input_gradients(edges, given, leaves)
        self.records[micro_batch] = Record(weights=weights)
        return _of_leaves(record)

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients of the parameters."""
        record = self.records.pop(micro_batch)
        if record.weights is not None:
            record.weights.compute()


def _roots(
    record: Record, gradients: dict[int, list[Tensor]], loss_gradient: Callable[[], Tensor]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return where backward begins, and with which gradients."""
    edges: list[GradientEdge] = []
    given: list[Tensor] = []
    if record.loss_edge is not None:
        edges.append(record.loss_edge)
        given.append(loss_gradient())
    for target, of_target in record.edges.items():
        edges += of_target
        given += gradients[target]
    return edges, given


def _of_leaves(record: Record) -> dict[int, list[Tensor]]:
    """Take the gradients of what was received; zeros for what was not used."""
    taken = {}
    for source, leaves in record.leaves.items():
        taken[source] = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    return taken
