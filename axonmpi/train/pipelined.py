"""Ranks that have stages of the model, and several such pipelines side by side.

    global batch ──┬── replica 0    stage 0 ══► stage 1      micro-batches of its part go through
                   └── replica 1    stage 0 ══► stage 1
                                       │           │
                                   gradients of a stage are averaged over the replicas

Every rank builds the whole model from the same seed and keeps its stages, so that training begins with the values
that it begins with on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends.base import Backend
from ..group import World
from ..pipeline import Pipeline, PipelineSchedule, Schedule, Timeline, simulate
from ..pipeline.chart import describe
from ..pipeline.simulator import measured_costs
from ..pipeline.trace import last_step, read_trace
from .batches import Batch
from .config import Config
from .layout import Layout
from .model import GPT, VOCABULARY_SIZE, GPTStage, Predictor, cut
from .parallel import Replica, cross_entropy

__all__ = ["PipelinedModel"]

_SHOWN = 8
"""How many ranks are listed before the rest is left out."""


class PipelinedModel:
    """A model whose stages live on different ranks, see `ParallelModel`; made collectively over the world.

    Args:
        model: The same model on every rank; the stages of other ranks are dropped.
        config: All settings.
        layout: Where this rank stands.
        schedule: What the ranks of a pipeline do in a step.
        world: All ranks.

    Attributes:
        stages: This rank's.
        backends: Those of the pipeline, and of the ranks that have the same stages.
        opening: The layout in words: the schedule, and what each stage has.
    """

    def __init__(self, model: GPT, config: Config, layout: Layout, schedule: Schedule, world: World) -> None:
        self._layout = layout
        self._parts = config.run.accumulation
        self._length = config.model.sequence_length
        self._schedule = schedule
        self._placement = schedule.placement
        pipelines = [world.new_group(layout.pipeline(replica)) for replica in range(layout.replicas)]
        columns = [world.new_group(layout.column(position)) for position in range(layout.pp)]
        self._group, self._column = pipelines[layout.replica], columns[layout.position]
        stages = cut(model, len(self._placement))
        ties = _ties(config, len(stages))
        self.opening = _describe(stages, config, layout, schedule)
        own = [rank == layout.position for rank in self._placement]
        self.stages = nn.ModuleList(stage for stage, mine in zip(stages, own, strict=True) if mine)
        self._pipeline = Pipeline.from_modules(
            [Replica(s, config.run, self._column) if mine else None for s, mine in zip(stages, own, strict=True)],
            self._group,
            schedule=PipelineSchedule(config.pipeline.schedule),
            ties=ties,
            num_microbatches=schedule.num_microbatches,
            loss_fn=self._loss,
        )
        # those of the pipeline's own messages, and of the ranks that have the tied embedding
        tied = sorted({self._placement[stage] for tie in ties for stage, _ in tie})
        private = [self._group.private(), self._group.private(tied) if len(tied) > 1 else None]
        self.backends: Sequence[Backend] = [self._group.backend, self._column.backend, *filter(None, private)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, with the names in the model, each once."""
        seen = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, "mean") / self._parts

    def backward(self, parts: Sequence[Batch]) -> Tensor:
        """Send the parts through the pipeline; gradients are averaged at the end of the last one."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self._pipeline.no_sync():
                loss = self._pipeline.train_step(inputs, targets)
            if loss is not None:
                total += loss
        return total / self._layout.replicas

    def clip(self, largest: float) -> float:
        """Scale the gradients of all stages."""
        return float(self._pipeline.clip_grad_norm(largest or math.inf))

    def score(self, batch: Batch) -> tuple[float, int]:
        """Compute the loss, which the last stage's rank knows."""
        inputs, targets = batch
        loss = self._pipeline.eval_step(inputs, targets)
        return (0.0, 0) if loss is None else (loss.item() * self._parts * targets.numel(), targets.numel())

    def predictor(self) -> AbstractContextManager[Predictor | None]:
        """Have the ranks of the first pipeline generate together."""
        if self._layout.replica > 0:
            return nullcontext()
        return nullcontext(_PipelinePredictor(self._pipeline, self._placement[-1], self._length))

    @contextmanager
    def traced(self, path: Path) -> Iterator[None]:
        """Write when the ranks of the first pipeline compute within the block to a trace file; collective there."""
        if self._layout.replica > 0:
            yield
            return
        self._pipeline.record_times()
        yield
        self._pipeline.write_trace(path)
        self._pipeline.record_times(False)

    def timelines(self, path: Path) -> tuple[Timeline, Timeline]:
        """Read a trace: return the last step, and what it would have been without waiting for messages; local."""
        measured = last_step(read_trace(path), self._schedule)
        return measured, simulate(self._schedule, measured_costs(measured))


class _PipelinePredictor:
    """Predicts with all ranks of a pipeline, which get the same answer.

    Args:
        pipeline: The model.
        last: The rank that has the last stage.
        length: Bytes that the model sees at once.
    """

    def __init__(self, pipeline: Pipeline, last: int, length: int) -> None:
        self._pipeline = pipeline
        self._last = last
        self._length = length

    def next_logits(self, text: Sequence[int]) -> Tensor:
        """Return the logits of the byte after `text`, [256]; collective over the pipeline."""
        window = torch.tensor([text[-self._length :]])
        # always of one length, which the stages then know; a byte sees nothing of those behind it
        output = self._pipeline(F.pad(window, (0, self._length - window.shape[1])))
        logits = torch.empty(VOCABULARY_SIZE)
        if output is not None:
            logits.copy_(output[0, window.shape[1] - 1])
        self._pipeline.process_group.broadcast(logits, self._last)
        return logits


def _ties(config: Config, stages: int) -> list[list[tuple[int, str]]]:
    """Return where the embedding is once more, as the output layer."""
    if not config.model.tied_embeddings or stages == 1:
        return []
    return [[(0, "module.embedding.weight"), (stages - 1, "module.head.weight")]]


def _describe(stages: Sequence[GPTStage], config: Config, layout: Layout, schedule: Schedule) -> str:
    count = schedule.num_microbatches
    size, rest = divmod(config.run.global_batch // layout.replicas // config.run.accumulation, count)
    sequences = f"{size} or {size + 1} sequences" if rest else _counted(size, "sequence")
    pipelines = "a pipeline:" if layout.replicas == 1 else f"{layout.replicas} pipelines, each"
    batches = _counted(count, "micro-batch", "micro-batches")
    lines = [f"{pipelines} {describe(simulate(schedule))}; {batches} of {sequences}"]
    for number, stage in enumerate(stages):
        ranks = layout.column(schedule.placement[number])
        parameters = sum(parameter.numel() for parameter in stage.parameters())
        lines.append(f"  stage {number} on {_listed(ranks)}: {stage.content}; {parameters:,} parameters")
    return "\n".join(lines)


def _counted(number: int, word: str, words: str = "") -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"


def _listed(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > _SHOWN:
        shown[_SHOWN - 1 : -1] = ["..."]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"
