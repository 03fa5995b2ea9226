"""How the model is spread over the ranks: the one place to choose between kinds of parallelism.

The trainer uses nothing of the result but what `ParallelModel` lists, so another wrapper needs a case here and no
change elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from ..ddp import DistributedDataParallel
from ..group import ProcessGroup
from ..types import GradSyncStrategy
from .config import RunConfig

__all__ = ["ParallelModel", "clip_gradients", "parallelize"]


class ParallelModel(Protocol):
    """What the trainer needs of a model that lives on several ranks."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of this rank's part of the batch."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what this rank's optimizer updates."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unaveraged for a while."""

    def sync_gradients(self) -> None:
        """Average the gradients, unless backward has done so; collective."""


def parallelize(model: nn.Module, config: RunConfig, group: ProcessGroup) -> ParallelModel:
    """Spread a model over the ranks of a group; collective.

    Args:
        model: The same model on every rank.
        config: Chooses how.
        group: The ranks.

    Returns:
        The model to train.
    """
    # the model has no buffers that change, so none need to be sent before each forward
    return DistributedDataParallel(
        model, group, sync_strategy=GradSyncStrategy(config.strategy), broadcast_buffers=False
    )


def clip_gradients(model: ParallelModel, largest: float) -> float:
    """Scale the averaged gradients down to a norm of at most `largest`, in place.

    Local, since every rank has the whole gradient.

    Args:
        model: The model, after its gradients were averaged.
        largest: Norm of the whole gradient; 0 only measures.

    Returns:
        The norm before.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest or math.inf)
    return float(norm)
