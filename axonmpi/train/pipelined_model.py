"""The trainer's model as a `Pipeline`, or as several side by side.

    global batch ──┬── replica 0    stage 0 ══► stage 1      micro-batches of its slice pass the stages
                   └── replica 1    stage 0 ══► stage 1
                                       │           │
                                   gradients of a stage are averaged over the replicas

Every rank builds the full model from the same seed and keeps its stages, so that training begins with the same
values as on one rank. With tp each rank of a pipeline has its shard of every layer, and the ranks with the other
shards are further pipelines, which run in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ..mesh import DeviceMesh
from ..pipeline import Pipeline, PipelineSchedule, Schedule, Timeline, simulate
from ..pipeline.schedule.chart import describe
from ..pipeline.schedule.simulator import measured_costs
from ..pipeline.schedule.trace import TIMES_NAME, last_step, read_trace
from ..utils.device import Device
from ..utils.text import counted
from .batches import IGNORED, Batch
from .config import Config
from .model import GPT, VOCABULARY_SIZE, GPTStage, split_stages
from .parallel_model import ParallelModel, Wrapped, wrap
from .tensor_parallel import full_logits, summed_loss

_TIED = ("embedding", "head")


class PipelinedModel(ParallelModel):
    """A model whose stages are on different ranks; made collectively over all ranks.

    Args:
        model: The same on every rank, or its shard of all layers; the stages of other ranks are dropped.
        config: All settings.
        schedule: The actions of the ranks of a pipeline in a step.
        mesh: The ranks.
        device: The device of the model.
    """

    def __init__(self, model: GPT, config: Config, schedule: Schedule, mesh: DeviceMesh, device: Device) -> None:
        self._accumulation = config.run.accumulation
        self._schedule = schedule
        group = mesh.group("pp")
        stages = split_stages(model, schedule.num_stages)
        sharded = config.run.fsdp != "none"
        ties = _ties(config, len(stages))
        if ties and sharded:  # sharding a stage frees the memory of its parameters
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        self.opening = "\n" + _describe(config, mesh.size("dp"), schedule)
        self.stages = []
        wrapped: list[Wrapped | None] = [None] * len(stages)
        for number, stage in enumerate(stages):
            if schedule.placement[number] == group.rank:
                self.stages.append(stage)
                wrapped[number] = wrap(stage, config.run, mesh.group("dp"), _tied_modules(stage) if ties else ())
        self._pipeline = Pipeline.from_modules(
            wrapped,
            group,
            schedule=PipelineSchedule(config.pipeline.schedule),
            ties=ties,
            num_microbatches=schedule.num_microbatches,
            loss_fn=self._loss,
        )
        super().__init__([stage for stage in wrapped if stage is not None], config, mesh, device)

    @property
    def saved(self) -> nn.Module:
        """The pipeline of wrapped stages."""
        return self._pipeline

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets, self._mesh.group("tp")) / (targets.numel() * self._accumulation)

    def backward(self, batches: Sequence[Batch]) -> Tensor:
        """Send the batches through the pipeline; gradients are averaged at the end of the last one."""
        total = torch.zeros((), dtype=torch.float64, device=self._device.place)
        for number, (inputs, targets) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self._pipeline.no_sync():
                loss = self._pipeline.train_step(inputs, targets)
            if loss is not None:
                total += loss
        return self._counted_once(total / self._mesh.size("dp"))

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradient, over the stages and the ranks that their parameters are sharded on."""
        return self._pipeline.clip_grad_norm(max_norm)

    def score(self, batch: Batch) -> Tensor:
        """Compute the loss, on the ranks of the last stage."""
        inputs, targets = batch
        loss = self._pipeline.eval_step(inputs, targets)
        if loss is None:
            return torch.zeros(2, dtype=torch.float64, device=self._device.place)
        summed = loss.double() * self._accumulation * targets.numel()
        return self._counted_once(torch.stack((summed, (targets != IGNORED).sum())))

    def _logits_at(self, tokens: Tensor, position: int) -> Tensor:
        output = self._pipeline(tokens)
        logits = torch.empty(VOCABULARY_SIZE, device=self._device.place)
        if output is not None:
            logits.copy_(full_logits(output[0, position], self._mesh.group("tp")))
        self._pipeline.process_group.broadcast(logits, self._schedule.placement[-1])
        return logits

    @contextmanager
    def traced(self, folder: Path) -> Iterator[None]:
        """Write the times of the first pipeline's ranks in the block into a folder; collective over them."""
        if self._mesh.rank("dp", "tp"):
            yield
            return
        self._pipeline.record_times()
        yield
        self._pipeline.write_trace(folder / TIMES_NAME)
        self._pipeline.record_times(False)

    def timelines(self, path: Path) -> tuple[Timeline, Timeline]:
        """Return the last step of a trace, and the same step without waiting for messages; local."""
        measured = last_step(read_trace(path), self._schedule)
        return measured, simulate(self._schedule, measured_costs(measured))


def _tied_modules(stage: GPTStage) -> list[str]:
    """Return the names of a stage's modules that have the tied weight."""
    return [name for name in _TIED if getattr(stage, name) is not None]


def _ties(config: Config, stages: int) -> list[list[tuple[int, str]]]:
    """Return the stages and names of a tied weight that two stages use; empty without one."""
    if not config.model.tied_embeddings or stages == 1:
        return []
    return [[(0, "embedding.weight"), (stages - 1, "head.weight")]]


def _describe(config: Config, replicas: int, schedule: Schedule) -> str:
    count = schedule.num_microbatches
    size, rest = divmod(config.run.global_batch // replicas // config.run.accumulation, count)
    sequences = f"{size} or {size + 1} sequences" if rest else counted(size, "sequence")
    pipelines = "a pipeline:" if replicas == 1 else f"{replicas} pipelines, each"
    batches = counted(count, "micro-batch", "micro-batches")
    return f"{pipelines} {describe(simulate(schedule))}; {batches} of {sequences}"
