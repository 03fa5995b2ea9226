"""The ends of a pipeline in one step: inputs and targets, outputs and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..agreement import Mode
from ..batches import as_scalar
from ..randomness import RandomStream
from .payload import pack, unpack

__all__ = ["Step"]


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        mode: What the step does.
        inputs: The input of each micro-batch, on the first stage's rank.
        targets: Their targets, on the last stage's rank.
        weights: Their shares in the loss, there as well.
        loss_fn: Returns the mean loss of a micro-batch.
        seed: The seed and the number of the step; None leaves random numbers to the process.
        is_lent: Says whether a tensor lies in memory that others will write to.
        losses: The losses of micro-batches, on the last stage's rank.
        outputs: The last stage's outputs by micro-batch, if outputs are wanted.
    """

    mode: Mode
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    loss_fn: Callable[[Any, Any], Tensor] | None
    seed: tuple[int, int] | None
    is_lent: Callable[[Tensor], bool]
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.mode is Mode.TRAIN

    @property
    def loss(self) -> Tensor | None:
        """[] the mean of the micro-batches' losses, each with its weight; None where there are none."""
        if not self.losses:
            return None
        losses = torch.stack(list(self.losses.values()))
        weights = [self.weights[micro_batch] for micro_batch in self.losses]
        mean = losses.double() @ torch.tensor(weights, dtype=torch.float64, device=losses.device)
        return mean.to(losses.dtype)

    def begin_random(self, micro_batch: int) -> RandomStream:
        """Return the micro-batch's random numbers: the process's without a seed or without training."""
        if self.seed is None or not self.trains:
            return RandomStream(None)
        return RandomStream.begin(*self.seed, micro_batch)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Take the last stage's output; return its loss, if it is wanted."""
        if self.mode is Mode.PREDICT:
            skeleton, tensors = pack(output)
            self.outputs[micro_batch] = unpack(skeleton, [t.clone() if self.is_lent(t) else t for t in tensors])
            return None
        assert self.loss_fn is not None
        loss = as_scalar(self.loss_fn(output, self.targets[micro_batch]))
        self.losses[micro_batch] = loss.detach()
        return loss
