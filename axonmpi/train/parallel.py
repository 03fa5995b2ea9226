"""How the model is spread over the ranks: the one place to choose between kinds of parallelism.

The trainer uses nothing of the result but what `ParallelModel` lists, so another wrapper needs a case here and no
change elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..ddp import DistributedDataParallel
from ..fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from ..group import ProcessGroup
from ..types import GradSyncStrategy
from .config import RunConfig

__all__ = ["ParallelModel", "parallelize"]


class ParallelModel(Protocol):
    """What the trainer needs of a model that lives on several ranks."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of this rank's part of the batch."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, with the names in the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unaveraged for a while."""

    def sync_gradients(self) -> None:
        """Average the gradients, unless backward has done so; collective."""

    def clip(self, largest: float) -> float:
        """Scale the averaged gradients down to a norm of at most `largest`; collective. Returns the norm before.

        Args:
            largest: Norm of the whole gradient; 0 only measures.
        """

    def whole(self) -> AbstractContextManager[None]:
        """Let the model be used by a rank alone, for a while; collective at both ends."""


class _DataParallel(DistributedDataParallel):
    """Every rank has the whole model."""

    def __init__(self, model: nn.Module, config: RunConfig, group: ProcessGroup) -> None:
        # the model has no buffers that change, so none need to be sent before each forward
        super().__init__(model, group, sync_strategy=GradSyncStrategy(config.strategy), broadcast_buffers=False)
        self._dtype = getattr(torch, config.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, computed in the chosen dtype."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            logits: Tensor = super().forward(tokens)
        return logits

    def clip(self, largest: float) -> float:
        """Scale the gradients; local, since every rank has the whole gradient."""
        return float(nn.utils.clip_grad_norm_(self.parameters(), largest or math.inf))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Nothing has to be done."""
        yield


class _FullySharded(FullyShardedDataParallel):
    """Every rank has a part of the model."""

    def __init__(self, model: nn.Module, config: RunConfig, group: ProcessGroup) -> None:
        offload = CPUOffload(config.cpu_offload)
        super().__init__(
            model,
            group,
            sharding_strategy=ShardingStrategy(config.fsdp),
            cpu_offload=offload,
            mixed_precision=MixedPrecision(None if config.dtype == "float32" else getattr(torch, config.dtype)),
            offload_folder=None if offload is CPUOffload.NONE else config.folder / "offload",
        )

    def clip(self, largest: float) -> float:
        """Scale the gradients; collective."""
        return float(self.clip_grad_norm(largest or math.inf))

    def whole(self) -> AbstractContextManager[None]:
        """Give every rank whole parameters."""
        return self.full_parameters(writeback=False)


def parallelize(model: nn.Module, config: RunConfig, group: ProcessGroup) -> ParallelModel:
    """Spread a model over the ranks of a group; collective.

    Args:
        model: The same model on every rank.
        config: Chooses how.
        group: The ranks.

    Returns:
        The model to train.
    """
    if config.fsdp == "none":
        return _DataParallel(model, config, group)
    return _FullySharded(model, config, group)
