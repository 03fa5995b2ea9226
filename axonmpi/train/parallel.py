"""How the model is spread over the ranks: the one place to choose between kinds of parallelism.

The trainer uses nothing of the result but what `ParallelModel` lists, so another wrapper needs a case here and no
change elsewhere. Where ranks have stages of the model, see `pipelined.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends.base import Backend
from ..ddp import DistributedDataParallel
from ..fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from ..group import ProcessGroup
from ..types import GradSyncStrategy
from .batches import Batch
from .config import RunConfig
from .model import GPT, Predictor

__all__ = ["ParallelModel", "Replica", "cross_entropy", "parallelize"]


class ParallelModel(Protocol):
    """What the trainer needs of a model that lives on several ranks."""

    @property
    def backends(self) -> Sequence[Backend]:
        """The communicators that it uses besides that of all ranks."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, with the names in the model."""

    def backward(self, parts: Sequence[Batch]) -> Tensor:
        """Make the gradient of the mean loss over the global batch; collective.

        Args:
            parts: This replica's sequences, gone through part by part.

        Returns:
            [] float64, this rank's share of that loss, which is the sum over all ranks.
        """

    def clip(self, largest: float) -> float:
        """Scale the gradients down to a norm of at most `largest`; collective. Returns the norm before.

        Args:
            largest: Norm of the whole gradient; 0 only measures.
        """

    def score(self, batch: Batch) -> tuple[float, int]:
        """Return this rank's share of the summed loss of a replica's batch, and of its bytes; collective there."""

    def predictor(self) -> AbstractContextManager[Predictor | None]:
        """Have text generated in the block by the ranks that get something to do it with; collective at both ends.

        Rank 0 is one of them, and all of them have to generate the same text.
        """


class Replica(DistributedDataParallel):
    """A model, or a part of one, that several ranks have, computed in the chosen dtype.

    Args:
        module: The same on all ranks of the group.
        config: The dtype, and when gradients are averaged.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, config: RunConfig, group: ProcessGroup) -> None:
        # the model has no buffers that change, so none need to be sent before each forward
        super().__init__(module, group, sync_strategy=GradSyncStrategy(config.strategy), broadcast_buffers=False)
        self._dtype = getattr(torch, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the chosen dtype."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            output: Tensor = super().forward(x)
        return output


class _WholeModel(ABC):
    """Every rank computes with the whole model, each a part of the batch."""

    def __init__(self, model: GPT, wrapped: Replica | FullyShardedDataParallel, group: ProcessGroup) -> None:
        self._model = model
        self._wrapped = wrapped
        self._group = group

    @property
    def backends(self) -> Sequence[Backend]:
        """None: gradients are averaged over all ranks."""
        return ()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates."""
        for name, parameter in self._wrapped.named_parameters():
            yield name.removeprefix("module."), parameter

    def backward(self, parts: Sequence[Batch]) -> Tensor:
        """Add up the gradients of the parts, then average."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self._wrapped.no_sync():
                loss = cross_entropy(self._wrapped(inputs), targets, "mean") / len(parts)
                loss.backward()
            total += loss.detach()
        self._wrapped.sync_gradients()
        return total / self._group.size

    @abstractmethod
    def clip(self, largest: float) -> float:
        """Scale the gradients."""

    def score(self, batch: Batch) -> tuple[float, int]:
        """Compute the loss."""
        inputs, targets = batch
        return cross_entropy(self._wrapped(inputs), targets, "sum").item(), targets.numel()

    def predictor(self) -> AbstractContextManager[Predictor | None]:
        """Have rank 0 generate."""
        return nullcontext(self._model if self._group.rank == 0 else None)


class _DataParallel(_WholeModel):
    """Every rank has the whole model."""

    def __init__(self, model: GPT, config: RunConfig, group: ProcessGroup) -> None:
        super().__init__(model, Replica(model, config, group), group)

    def clip(self, largest: float) -> float:
        """Scale the gradients; local, since every rank has the whole gradient."""
        return float(nn.utils.clip_grad_norm_(self._model.parameters(), largest or math.inf))


class _FullySharded(_WholeModel):
    """Every rank has a part of the model."""

    def __init__(self, model: GPT, config: RunConfig, group: ProcessGroup) -> None:
        offload = CPUOffload(config.cpu_offload)
        self._sharded = FullyShardedDataParallel(
            model,
            group,
            sharding_strategy=ShardingStrategy(config.fsdp),
            cpu_offload=offload,
            mixed_precision=MixedPrecision(None if config.dtype == "float32" else getattr(torch, config.dtype)),
            offload_folder=None if offload is CPUOffload.NONE else config.folder / "offload",
        )
        super().__init__(model, self._sharded, group)

    def clip(self, largest: float) -> float:
        """Scale the gradients; collective."""
        return float(self._sharded.clip_grad_norm(largest or math.inf))

    @contextmanager
    def predictor(self) -> Iterator[Predictor | None]:
        """Give every rank whole parameters, and have rank 0 generate."""
        with self._sharded.full_parameters(writeback=False), super().predictor() as predictor:
            yield predictor


def parallelize(model: GPT, config: RunConfig, group: ProcessGroup) -> ParallelModel:
    """Spread a model over the ranks of a group, all of which compute with all of it; collective.

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


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return the loss, in nats per byte.

    Args:
        logits: [B, T, 256]; they may be in half precision, the loss is not.
        targets: [B, T] bytes.
        reduction: `"mean"` or `"sum"`, over all bytes.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
