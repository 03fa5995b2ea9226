"""What goes into a step at the ends of a pipeline, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..agreement import Mode
from ..batches import as_scalar
from ..randomness import RandomStream
from .payload import pack, unpack

__all__ = ["Step"]


class Step:
    """One step of one rank.

    Args:
        mode: What it does.
        inputs: The input of each micro-batch, on the first stage's rank.
        targets: Their targets, on the last stage's rank.
        weights: Their shares in the loss, there as well.
        loss_fn: Returns the mean loss of a micro-batch.
        random: The seed and the number of the step; None leaves random numbers to the process.
        is_lent: Says whether a tensor lies in memory that others will write to.

    Attributes:
        outputs: The last stage's output for each micro-batch, if outputs are wanted.
        loss: The mean loss over the micro-batches so far, on the last stage's rank.
    """

    def __init__(
        self,
        mode: Mode,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        random: tuple[int, int] | None,
        is_lent: Callable[[Tensor], bool],
    ) -> None:
        self._mode = mode
        self._inputs = inputs
        self._targets = targets
        self._weights = weights
        self._loss_fn = loss_fn
        self._random = random
        self._is_lent = is_lent
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    @property
    def outputs(self) -> list[Any]:
        """The last stage's outputs, in order."""
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def loss(self) -> Tensor | None:
        """[] the mean of the micro-batches' losses, each with its weight; None where there are none."""
        if not self._losses:
            return None
        losses = torch.stack(list(self._losses.values()))
        weights = [self._weights[micro_batch] for micro_batch in self._losses]
        mean = losses.double() @ torch.tensor(weights, dtype=torch.float64, device=losses.device)
        return mean.to(losses.dtype)

    @property
    def draws(self) -> bool:
        """Whether micro-batches have random numbers of their own."""
        return self._random is not None and self._mode is Mode.TRAIN

    def input(self, micro_batch: int) -> Any:
        """Return the first stage's input."""
        return self._inputs[micro_batch]

    def begin_random(self, micro_batch: int) -> RandomStream | None:
        """Return the micro-batch's random numbers, None without a seed or without training."""
        if self._random is None or not self.draws:
            return None
        return RandomStream.begin(*self._random, micro_batch)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Take the last stage's output; return its loss, if it is wanted."""
        if self._mode is Mode.PREDICT:
            skeleton, tensors = pack(output)
            self._outputs[micro_batch] = unpack(skeleton, [t.clone() if self._is_lent(t) else t for t in tensors])
            return None
        assert self._loss_fn is not None
        loss = as_scalar(self._loss_fn(output, self._targets[micro_batch]))
        self._losses[micro_batch] = loss.detach()
        return loss

    def loss_gradient(self, micro_batch: int) -> Tensor:
        """Return the share of a micro-batch in the loss."""
        return torch.full_like(self._losses[micro_batch], self._weights[micro_batch])
