"""The model on several ranks: replicas, sharded or not, of the whole model or of its stages.

    trainer ──► ParallelModel ─┬─ FullModel        a rank has all layers
                               └─ PipelinedModel    a rank has stages, see `pipelined_model.py`
                each module in ┬─ Replica           gradients are averaged over the dp axis
                               └─ FSDP              parameters are sharded along it, too

With tp a rank's modules are its part of each layer, see `tensor_parallel.py`. The trainer uses only the methods of
`ParallelModel`, so another wrapper needs a case here and no change elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends import Backend
from ..collectives.gradient_norm import clip_grad_norm
from ..ddp import DistributedDataParallel
from ..fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from ..groups.mesh import DeviceMesh
from ..groups.process_group import ProcessGroup
from ..types import GradSyncStrategy
from ..utils.device import Device
from .batches import IGNORED, Batch
from .config import Config, RunConfig
from .model import GPT, Block, GPTStage, Predictor
from .tensor_parallel import joined_logits, replicated_copies, summed_loss

_ADAM_STATES = 2
_FLOAT = 4


@dataclass(frozen=True)
class ModelMemory:
    """A rank's part of the model.

    Attributes:
        parameters: Numbers that its optimizer updates.
        values: Bytes of the parameters and of the buffers that they are gathered in.
        gradients: Bytes of the gradients.
        state: Bytes of the optimizer's state.
    """

    parameters: int
    values: int
    gradients: int
    state: int

    @property
    def together(self) -> int:
        """Bytes of all three."""
        return self.values + self.gradients + self.state


class Replica(DistributedDataParallel):
    """A replica of a module, computed in the chosen dtype.

    Args:
        module: The same on all ranks of the group.
        config: The dtype, and when gradients are averaged.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, config: RunConfig, group: ProcessGroup) -> None:
        # the model has no buffers that change, so none need a broadcast before each forward
        super().__init__(module, group, sync_strategy=GradSyncStrategy(config.strategy), broadcast_buffers=False)
        self._dtype = getattr(torch, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the chosen dtype."""
        with torch.autocast(x.device.type, self._dtype, enabled=self._dtype != torch.float32):
            output: Tensor = super().forward(x)
        return output


Wrapped = Replica | FullyShardedDataParallel


def wrap(module: nn.Module, config: RunConfig, group: ProcessGroup, alone: Sequence[str] = ()) -> Wrapped:
    """Wrap a module for data parallel training, sharded or not; collective.

    Args:
        module: The same on all ranks of the group.
        config: The kind of data parallelism.
        group: The ranks along the dp axis.
        alone: Names of submodules that become FSDP units of their own.
    """
    if config.fsdp == "none":
        return Replica(module, config, group)
    offload = CPUOffload(config.cpu_offload)
    return FullyShardedDataParallel(
        module,
        group,
        sharding_strategy=ShardingStrategy(config.fsdp),
        cpu_offload=offload,
        mixed_precision=MixedPrecision(None if config.dtype == "float32" else getattr(torch, config.dtype)),
        units=[Block, *alone],
        offload_folder=None if offload is CPUOffload.NONE else config.folder / "offload",
    )


class ParallelModel(ABC):
    """A model on several ranks, as the trainer sees it.

    Args:
        modules: This rank's modules.
        wrapped: The same modules, wrapped to share their gradients with the replicas.
        mesh: The ranks, with the axes dp, pp and tp.
        device: What the modules are on.
        length: Bytes that the model sees at once.
        accumulates: Whether whole gradients, also of sharded parameters, are added up before they are averaged.

    Attributes:
        stages: This rank's stages of a pipeline; None where a rank has all layers.
        opening: A line about the pipeline, shown when a run begins.
    """

    stages: list[GPTStage] | None = None
    opening: str = ""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        wrapped: Sequence[Wrapped],
        mesh: DeviceMesh,
        device: Device,
        *,
        length: int,
        accumulates: bool,
    ) -> None:
        self._accumulates = accumulates
        self._length = length
        self._modules = list(modules)
        self._wrapped = list(wrapped)
        self._mesh = mesh
        self._device = device
        self._is_sharded = any(isinstance(one, FullyShardedDataParallel) for one in wrapped)
        # replicas have the same gradients; with shards each has a part of them, and all have to be asked
        self._norm_group = mesh.group() if self._is_sharded else mesh.group("pp", "tp")
        self._copies = {
            id(parameter): copies.get(name, 1) * _replicas(one)
            for module, one in zip(modules, wrapped, strict=True)
            for copies in [replicated_copies(module, mesh.group("tp"))]
            for name, parameter in module.named_parameters()
        }

    @property
    def backends(self) -> list[Backend]:
        """The backends that it uses besides that of all ranks; some may come twice."""
        groups = [self._norm_group, self._mesh.group("tp")]
        groups += [group for one in self._wrapped for group in _groups(one)]
        return [group.backend for group in groups]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank's optimizer updates, each once, with their names in the model."""
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self._modules:
            for name, parameter in module.named_parameters():
                first.setdefault(id(parameter), (name, parameter))
        return list(first.values())

    def clip(self, largest: float) -> Tensor:
        """Scale the gradients down to a norm of at most `largest`; collective. Returns the norm before, [].

        Args:
            largest: Norm of the whole gradient, each parameter counted once; 0 only measures.
        """
        return self._clip(largest or math.inf)

    def _copies_of(self, parameter: Tensor) -> int:
        """Return how many ranks of the norm's group have the gradient of a parameter."""
        return self._copies[id(parameter)]

    def held(self) -> ModelMemory:
        """Return the size of this rank's part; local."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        numel = sum(parameter.numel() for parameter in parameters)
        sharded = [one.memory_estimate() for one in self._wrapped if isinstance(one, FullyShardedDataParallel)]
        if not sharded:
            nbytes = sum(parameter.nbytes for parameter in parameters)
            return ModelMemory(numel, nbytes, nbytes, _ADAM_STATES * nbytes)
        whole = sum(stats.total_params for stats in sharded) * _FLOAT if self._accumulates else 0
        return ModelMemory(
            numel,
            sum(stats.param_memory_bytes for stats in sharded),
            sum(stats.grad_memory_bytes for stats in sharded) + whole,
            sum(stats.optim_memory_bytes for stats in sharded),
        )

    @contextmanager
    def predictor(self) -> Iterator[Predictor | None]:
        """Give the first replica a predictor, and other ranks None; collective at both ends of the block.

        Rank 0 belongs to the first replica, all of whose ranks have to generate the same text.
        """
        with ExitStack() as stack:
            for one in self._wrapped:
                if isinstance(one, FullyShardedDataParallel):
                    stack.enter_context(one.full_parameters(writeback=False))
            yield None if self._mesh.rank("dp") else self

    def next_logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits of the byte after `text`, [256]; collective over the ranks of the first replica."""
        window = text[-self._length :]
        # always of one length, which stages know and tp ranks can divide; no byte sees the padding after it
        padded = F.pad(torch.tensor([window], device="cpu"), (0, self._length - len(window)))
        return self._logits_at(self._device.moved(padded), len(window) - 1)

    def _share(self, known: Tensor) -> Tensor:
        """Return a value on the first of the tp ranks, which all have the same one, and zeros on the others."""
        return known if self._mesh.rank("tp") == 0 else torch.zeros_like(known)

    @property
    @abstractmethod
    def saved(self) -> nn.Module:
        """What a checkpoint is saved from, and loaded into."""

    @abstractmethod
    def backward(self, parts: Sequence[Batch]) -> Tensor:
        """Compute the gradient of the mean loss over the global batch; collective.

        Args:
            parts: This replica's sequences, part by part.

        Returns:
            [] float64, this rank's share of that loss: the sum over all ranks is the loss.
        """

    @abstractmethod
    def _clip(self, largest: float) -> Tensor:
        """Scale the gradients to a norm of at most `largest`, and return the norm before; collective."""

    @abstractmethod
    def score(self, batch: Batch) -> Tensor:
        """Compute the loss of a replica's batch; collective over its ranks.

        Returns:
            [2] float64, this rank's share of the summed loss, and of the number of bytes.
        """

    @abstractmethod
    def _logits_at(self, tokens: Tensor, position: int) -> Tensor:
        """Return the logits at one position of `tokens`, [1, T]; collective over the ranks of the first replica."""


class FullModel(ParallelModel):
    """Every rank has all layers, or its part of each, for a part of the batch.

    Args:
        model: The same on the ranks along the dp axis.
        config: All settings.
        mesh: The ranks.
        device: What the model is on.
    """

    def __init__(self, model: GPT, config: Config, mesh: DeviceMesh, device: Device) -> None:
        self._model = model
        self._replica = wrap(model, config.run, mesh.group("dp"))
        length, accumulates = config.model.sequence_length, config.run.accumulation > 1
        super().__init__([model], [self._replica], mesh, device, length=length, accumulates=accumulates)

    @property
    def saved(self) -> nn.Module:
        """The wrapped model."""
        return self._replica

    def backward(self, parts: Sequence[Batch]) -> Tensor:
        """Add up the gradients of the parts, then average over the replicas."""
        total = torch.zeros((), dtype=torch.float64, device=self._device.place)
        for number, (inputs, targets) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self._replica.no_sync():
                summed = summed_loss(self._replica(inputs), targets, self._mesh.group("tp"))
                loss = summed / (targets.numel() * len(parts))
                loss.backward()
            total += loss.detach()
        self._replica.sync_gradients()
        return self._share(total / self._mesh.size("dp"))

    def _clip(self, largest: float) -> Tensor:
        parameters = [parameter for _, parameter in self.named_parameters()]
        return clip_grad_norm(parameters, largest, group=self._norm_group, copies=self._copies_of)

    def score(self, batch: Batch) -> Tensor:
        """Compute the loss."""
        inputs, targets = batch
        loss = summed_loss(self._replica(inputs), targets, self._mesh.group("tp"))
        return self._share(torch.stack((loss, (targets != IGNORED).sum())).double())

    def _logits_at(self, tokens: Tensor, position: int) -> Tensor:
        return joined_logits(self._model(tokens)[0, position], self._mesh.group("tp"))


def _groups(wrapped: Wrapped) -> list[ProcessGroup]:
    """Return the groups that a wrapped module communicates in."""
    others = [wrapped.replicate_group] if isinstance(wrapped, FullyShardedDataParallel) else []
    return [wrapped.process_group, *(group for group in others if group is not None)]


def _replicas(wrapped: Wrapped) -> int:
    """Return how many ranks have the same shard of a module's gradients; 1 without shards."""
    if isinstance(wrapped, FullyShardedDataParallel) and wrapped.replicate_group is not None:
        return wrapped.replicate_group.size
    return 1
