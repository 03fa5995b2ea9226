"""The model on several ranks: replicas, sharded or not, of the full model or of its stages.

    trainer ──► ParallelModel ─┬─ FullModel         a rank has all layers
                               └─ PipelinedModel    a rank has stages, see `pipelined_model.py`
                each module in ┬─ Replica           gradients are averaged over the dp axis
                               └─ FSDP              parameters are sharded along it, too

With tp a rank's modules are its shard of each layer, see `tensor_parallel.py`. With cp ranks have blocks of the
same sequences and compute each layer together. The trainer uses only the methods of `ParallelModel`, so another
wrapper needs a case here and no change elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..across_ranks.gradient_norm import clip_grad_norm
from ..ddp import DistributedDataParallel
from ..domain import Domain
from ..fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from ..groups.process_group import ProcessGroup
from ..mesh import DeviceMesh
from ..types import GradSyncStrategy
from ..utils.device import Device
from .batches import IGNORED, Batch
from .config import Config, RunConfig
from .model import GPT, Block, GPTStage, Predictor
from .tensor_parallel import full_logits, summed_loss

_ADAM_STATES = 2
_FLOAT = 4


@dataclass(frozen=True)
class ModelMemory:
    """Memory that a rank needs for its parameters, gradients and optimizer state.

    Attributes:
        numel: Elements of the parameters that the rank's optimizer updates.
        parameters: Bytes of the parameters, and of the buffers that they are gathered in.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's state.
    """

    numel: int
    parameters: int
    gradients: int
    optimizer: int


class Replica(DistributedDataParallel):
    """A replica of a module that computes in the configured dtype.

    Args:
        module: The same on all ranks of the group.
        config: The settings `dtype` and `strategy`.
        group: The ranks along the dp axis.
    """

    def __init__(self, module: nn.Module, config: RunConfig, group: ProcessGroup) -> None:
        # the model has no buffers that change, so none need a broadcast before each forward
        super().__init__(module, group, sync_strategy=GradSyncStrategy(config.strategy), broadcast_buffers=False)
        self._dtype = getattr(torch, config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the configured dtype."""
        with torch.autocast(x.device.type, self._dtype, enabled=self._dtype != torch.float32):
            output: Tensor = super().forward(x)
        return output


Wrapped = Replica | FullyShardedDataParallel


def wrap(module: nn.Module, config: RunConfig, group: ProcessGroup, units: Sequence[str] = ()) -> Wrapped:
    """Wrap a module for data parallel training, sharded or not; collective.

    Args:
        module: The same on all ranks of the group.
        config: The settings `fsdp`, `cpu_offload`, `dtype` and `strategy`.
        group: The ranks along the dp axis.
        units: Names of submodules that become FSDP units beside the blocks.
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
        units=[Block, *units],
        offload_folder=None if offload is CPUOffload.NONE else config.folder / "offload",
    )


class ParallelModel(ABC):
    """A model on several ranks, as the trainer uses it.

    Args:
        wrapped: This rank's modules, wrapped to average their gradients over the replicas.
        config: All settings.
        mesh: The ranks, with the axes dp, pp, cp and tp.
        device: The device of the modules.

    Attributes:
        stages: This rank's stages of a pipeline; None where a rank has all layers.
        opening: A line about the pipeline, shown when a run begins.
    """

    stages: list[GPTStage] | None = None
    opening: str = ""

    def __init__(self, wrapped: Sequence[Wrapped], config: Config, mesh: DeviceMesh, device: Device) -> None:
        # full gradients are added up before they are averaged, also of sharded parameters
        self._accumulates = config.run.accumulation > 1 or config.pipeline.is_wanted
        self._length = config.model.sequence_length
        self._wrapped = list(wrapped)
        self._mesh = mesh
        self._device = device

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank's optimizer updates, each once, with their names in the model."""
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for wrapped in self._wrapped:
            for name, parameter in wrapped.module.named_parameters():
                first.setdefault(id(parameter), (name, parameter))
        return list(first.values())

    def memory(self) -> ModelMemory:
        """Return the memory that this rank is expected to need; local."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        numel = sum(parameter.numel() for parameter in parameters)
        sharded = [one.memory_estimate() for one in self._wrapped if isinstance(one, FullyShardedDataParallel)]
        if not sharded:
            nbytes = sum(parameter.nbytes for parameter in parameters)
            return ModelMemory(numel, nbytes, nbytes, _ADAM_STATES * nbytes)
        full_gradients = sum(stats.total_params for stats in sharded) * _FLOAT if self._accumulates else 0
        return ModelMemory(
            numel,
            sum(stats.param_memory_bytes for stats in sharded),
            sum(stats.grad_memory_bytes for stats in sharded) + full_gradients,
            sum(stats.optim_memory_bytes for stats in sharded),
        )

    @contextmanager
    def predictor(self) -> Iterator[Predictor | None]:
        """Give the first replica a predictor, and other ranks None; collective at both ends of the block.

        Rank 0 belongs to the first replica, all of whose ranks have to generate the same text.
        """
        with ExitStack() as stack:
            for wrapped in self._wrapped:
                if isinstance(wrapped, FullyShardedDataParallel):
                    stack.enter_context(wrapped.full_parameters(writeback=False))
            yield None if self._mesh.rank("dp") else self

    def next_logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits of the byte after `text`, [256]; collective over the ranks of the first replica."""
        window = text[-self._length :]
        # always of one length, which stages know and tp ranks can divide; no byte sees the padding after it
        padded = F.pad(torch.tensor([window], device="cpu"), (0, self._length - len(window)))
        return self._logits_at(self._device.moved(padded), len(window) - 1)

    def _counted_once(self, value: Tensor) -> Tensor:
        """Return a value that all cp and tp ranks have on the first of them, and zeros on the others."""
        return value if self._mesh.rank("cp", "tp") == 0 else torch.zeros_like(value)

    @property
    @abstractmethod
    def saved(self) -> nn.Module:
        """The module that checkpoints are saved from and loaded into."""

    @abstractmethod
    def backward(self, batches: Sequence[Batch]) -> Tensor:
        """Compute the gradient of the mean loss over the global batch; collective.

        Args:
            batches: This replica's batches of the step.

        Returns:
            [] float64, this rank's summand of that loss.
        """

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradient down to a norm of at most `max_norm`; collective.

        Returns:
            [] the norm of the full gradient before, each parameter counted once.
        """

    @abstractmethod
    def score(self, batch: Batch) -> Tensor:
        """Compute the loss of a replica's batch; collective over its ranks.

        Returns:
            [2] float64, this rank's summands of the summed loss and of the number of bytes.
        """

    @abstractmethod
    def _logits_at(self, tokens: Tensor, position: int) -> Tensor:
        """Return the logits at one position of `tokens`, [1, T]; collective over the ranks of the first replica."""


class FullModel(ParallelModel):
    """A model of which every rank has all layers, or its shard of each, for its slice of the batch.

    Args:
        model: The same on the ranks along the dp and cp axes.
        config: All settings.
        mesh: The ranks.
        device: The device of the model.
    """

    def __init__(self, model: GPT, config: Config, mesh: DeviceMesh, device: Device) -> None:
        self._model = model
        # with cp each gradient is complete on each rank, so the average over these ranks leaves it as it is
        self._replica = wrap(model, config.run, mesh.group("dp", "cp"))
        self._domain = Domain(mesh, {"cp": 1}) if mesh.size("cp") > 1 else None
        super().__init__([self._replica], config, mesh, device)

    @property
    def saved(self) -> nn.Module:
        """The wrapped model."""
        return self._replica

    def backward(self, batches: Sequence[Batch]) -> Tensor:
        """Add up the gradients of the batches, then average over the replicas."""
        total = torch.zeros((), dtype=torch.float64, device=self._device.place)
        for number, (inputs, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self._replica.no_sync():
                loss = self._summed_loss(inputs, targets) / (targets.numel() * len(batches))
                loss.backward()
            total += loss.detach()
        self._replica.sync_gradients()
        return self._counted_once(total / self._mesh.size("dp"))

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradient, over the ranks that its parameters are sharded on."""
        return clip_grad_norm([parameter for _, parameter in self.named_parameters()], max_norm)

    def score(self, batch: Batch) -> Tensor:
        """Compute the loss."""
        inputs, targets = batch
        loss = self._summed_loss(inputs, targets)
        return self._counted_once(torch.stack((loss, (targets != IGNORED).sum())).double())

    def _logits_at(self, tokens: Tensor, position: int) -> Tensor:
        return full_logits(self._model(self._cut(tokens))[0, position], self._mesh.group("tp"))

    def _summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(self._replica(self._cut(inputs)), targets, self._mesh.group("tp"))

    def _cut(self, tokens: Tensor) -> Tensor:
        """Return sequences cut over the ranks along the cp axis."""
        return tokens if self._domain is None else self._domain.shard(tokens)
