"""Training a small GPT on several ranks.

    each step:   own part of the global batch ─► forward, backward ─► average gradients ─► clip ─► AdamW
    sometimes:   own part of the held-out sequences ─► forward ─► sum over ranks ─► held-out loss
                 a checkpoint, from which another run goes on
    at the end:  held-out loss, a checkpoint, a sample of text, a picture of the losses

The ranks of a replica share a model and a part of the batch: each has some layers (pp), a part of every layer
(tp), or both. The global batch of a step depends on the seed and the step only. The number of ranks and their
layout decide which rank computes what, but not the result: loss curves agree to rounding.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.preemption import PreemptionGuard
from ..collectives.agreement import check_same
from ..groups.mesh import DeviceMesh
from ..groups.world import World
from ..record import Phase, phase
from ..utils.device import Device, device_at
from ..utils.text import counted
from .batches import Batch, BatchPlan, Stream, held_out_batches, seeded_generator
from .checkpoints import RunCheckpoints
from .config import Config
from .corpus import Corpus, load_corpus
from .divided import divide
from .layout import Layout, check_nodes, plan_schedule
from .model import GPT, generate
from .optimizer import learning_rate, make_optimizer
from .parallel import ParallelModel, WholeModel
from .pipelined import PipelinedModel
from .report.metrics import CommunicationClock, HeldOutMetrics, Speedometer, StepMetrics
from .report.progress import make_progress
from .report.recorder import Recorder, Summary, open_recorder, printable
from .report.table import Share, layout_table

_HELD_OUT_BATCH = 16
_MAY_DIFFER = ("data", "progress")  # between ranks; the text itself is compared


class Trainer:
    """Trains the model of a configuration on all ranks of a world.

    Construction is collective, and so is `run`.

    Args:
        config: All settings, the same on every rank.
        world: The ranks. The model computes on its device, or with the setting `cpu` on the CPU.
        corpus: The text; None means the text of `config.text`.
        guard: Says when to stop early; None means when the time limit comes near, and no signal.

    Raises:
        ValueError: The text cannot be used (before anything is sent); settings or text differ between ranks, the
            ranks are not as many as dp x tp x pp, the global batch cannot be divided among the replicas, or GPUs
            are wanted and this is no world of GPUs, raised on every rank.

    Attributes:
        model: This rank's model, or its part of it, without the wrapper; in a pipeline the list of its stages.
        corpus: The text.
        optimizer: Updates this rank's parameters.
        steps: The steps of the last run, on every rank; speed and communication are this rank's own, or rank 0's
            for steps before the run went on.
        held_out: The held-out evaluations of the last run, on every rank.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        corpus: Corpus | None = None,
        guard: PreemptionGuard | None = None,
    ) -> None:
        length, run = config.model.sequence_length, config.run
        self._guard = guard or PreemptionGuard((), config.checkpoint.time_limit or None, group=world.default_group)
        self._config = config
        self._group = world.default_group
        self.corpus = load_corpus(config.text, length) if corpus is None else corpus
        self._check_same_on_all_ranks()
        self._device = _chosen_device(run.device, world)
        layout = self._layout = Layout.of(config, world.size, world.rank)
        unit = "replicas" if layout.tp > 1 else "pipelines" if layout.pp > 1 else "ranks"
        self._plan = BatchPlan(
            run.global_batch, length, run.accumulation, layout.replica, layout.dp, run.seed, unit
        )
        schedule = plan_schedule(config, layout) if config.pipeline.is_wanted else None
        mesh = DeviceMesh(layout.shape, world)
        if run.fsdp == "hybrid":
            check_nodes(layout, self._group.all_gather_object(min(self._group.backend.control.node_ranks)))
        whole = GPT(config.model, generator=seeded_generator(run.seed, Stream.WEIGHTS))
        whole.to(self._device.place)
        self.model: nn.Module = whole
        self._parameters = whole.num_parameters()
        matrices = {name for name, p in whole.named_parameters(remove_duplicate=False) if p.dim() >= 2}
        divide(whole, mesh.group("tp"), sequence_parallel=config.mesh.sequence_parallel)
        self._pipelined: PipelinedModel | None = None
        self._parallel: ParallelModel
        if schedule is None:
            self._parallel = WholeModel(whole, config, mesh, self._device)
        else:
            self._parallel = self._pipelined = PipelinedModel(whole, config, schedule, mesh, self._device)
            self.model = nn.ModuleList(self._pipelined.stages)
        self.optimizer = make_optimizer(self._parallel, matrices, config.optimizer)
        share = Share.of(config, layout, schedule, self._parallel.stages, self._parallel.held())
        self._table = layout_table(config, layout, schedule, self._group.all_gather_object(share))
        self._speed = Speedometer(run.global_batch * length)
        self.steps: list[StepMetrics] = []
        self.held_out: list[HeldOutMetrics] = []

    def _check_same_on_all_ranks(self) -> None:
        settings = {**self._config.flat(), "text": f"with digest {self.corpus.digest}"}
        check_same(
            self._group.backend,
            (f"{name} {value}" for name, value in settings.items() if name not in _MAY_DIFFER),
            "the settings are not the same on all ranks",
            "Start all ranks with the same settings, and give them the same text.",
        )

    def run(self) -> Summary:
        """Train to the end, or until the guard says to stop, from the beginning or a checkpoint; collective.

        Returns:
            The results, the same on every rank.

        Raises:
            ValueError: Rank 0 cannot write to the run's folder, or the run cannot go on from the checkpoint that
                the setting `resume` means; raised on every rank.
            CheckpointError: A checkpoint is damaged, or the last one cannot be written; raised on every rank.
            FloatingPointError: The loss is no longer a number; raised on every rank.
        """
        checkpoints = RunCheckpoints(self._config, self._group, self.corpus.digest)
        path = checkpoints.find()
        if (finished := checkpoints.finished(path)) is not None:
            return self._say_finished(finished)
        start = checkpoints.load(path, self._parallel.saved, self.optimizer)
        self.steps, self.held_out = list(start.history.steps), list(start.history.held_out)
        recorder = open_recorder(self._config, self._group, start.history.lines)
        summary = None
        try:
            backends = {id(backend): backend for backend in [self._group.backend, *self._parallel.backends]}
            with CommunicationClock(*backends.values()) as clock:
                recorder.note(self.opening)
                if start.path is not None:
                    recorder.note(f"going on after step {start.step}, from {start.path}")
                run = _Run(clock, recorder, checkpoints, time.perf_counter() - start.seconds)
                stopped = self._train(run, 0 if start.path is None else start.step + 1)
            seconds = run.seconds
            sample = "" if stopped else self.sample()
            if self._group.rank == 0:
                summary = self._summary(seconds, sample, complete=not stopped)
                if not stopped:
                    self._finish(summary, recorder)
        finally:
            recorder.close()
        agreed: Summary = self._group.broadcast_object(summary)
        return agreed

    def _say_finished(self, content: dict[str, Any]) -> Summary:
        """Say that the run has come to its end before, and return what its `summary.json` has."""
        summary = Summary(**{name: value for name, value in content.items() if name != "config"})
        if self._group.rank == 0:
            progress = make_progress(self._config.run.progress, self._config.run.steps)
            progress.note(f"all {summary.steps} steps were made before: see {self._config.run.folder}")
            progress.close()
        return summary

    def _train(self, run: _Run, first: int) -> bool:
        """Make the steps from `first` on, where 0 only evaluates; return whether the run was told to stop."""
        steps, every = self._config.run.steps, self._config.run.evaluate_every
        stops = False
        for step in range(first, steps + 1):
            if step:
                with self._traced() if step == steps else nullcontext():
                    stops = self._timed_step(step, run)
            if step in (0, steps) or (every and step % every == 0):
                self.held_out.append(HeldOutMetrics(step, self.held_out_loss(), run.seconds))
                run.recorder.add(self.held_out[-1])
            stops = stops and step < steps
            if step:
                self._save_if_due(step, run, stops=stops)
            if stops:
                break
        return stops

    def _save_if_due(self, step: int, run: _Run, *, stops: bool) -> None:
        """Save a checkpoint: the last one while the ranks wait, others beside the next steps."""
        steps, every = self._config.run.steps, self._config.checkpoint.checkpoint_every
        is_last = stops or step == steps
        if not (is_last or (every and step % every == 0)):
            return
        run.settle()
        run.recorder.sync()
        path = run.checkpoints.save(step, run.seconds, self._parallel.saved, self.optimizer, blocking=is_last)
        if stops:
            run.recorder.note(f"stopped after step {step} of {steps}, saved {path}: --resume auto goes on from it")

    def _traced(self) -> AbstractContextManager[None]:
        """Write the trace file, if one is wanted: when the ranks of a pipeline compute in the block; collective."""
        trace = self._config.pipeline.trace
        return nullcontext() if self._pipelined is None or trace is None else self._pipelined.traced(trace)

    def _timed_step(self, step: int, run: _Run) -> bool:
        """Make a step and record it; return whether to stop after it."""
        started, before = time.perf_counter(), run.clock.seconds
        rate = learning_rate(step - 1, self._config.run.steps, self._config.optimizer)
        loss, norm, votes, saved = self._step(step, rate, run.checkpoints.has_saved())
        now = time.perf_counter()
        self._speed.add(now - started, run.clock.seconds - before)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {step} is {loss}: training has diverged; try a smaller lr (now "
                f"{self._config.optimizer.lr:g}), more warmup_steps or a smaller gradient_clip"
            )
        self.steps.append(StepMetrics(step, loss, rate, norm, *self._speed.recent(), run.seconds))
        run.recorder.add(self.steps[-1])
        if saved:
            run.settle()
        return self._guard.decide(votes)

    def _step(self, step: int, rate: float, saved: bool) -> tuple[float, float, float, bool]:
        """Update the weights.

        Args:
            step: Number of the step.
            rate: The learning rate.
            saved: Whether this rank has completed a save beside the steps.

        Returns:
            The loss of the global batch, the norm of its gradient, the votes of all ranks to stop, and whether all
            of them have completed the save.
        """
        with phase(Phase.DATA):
            parts = [self._moved(part) for part in self._plan.parts(step, self.corpus.train)]
        loss = self._parallel.backward(parts)
        norm = self._parallel.clip(self._config.optimizer.gradient_clip)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        with phase(Phase.OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()
        told = torch.stack([loss, *loss.new_tensor([self._guard.vote(), saved])])  # one message for all three
        self._group.all_reduce(told)
        total, votes, completed = told.tolist()
        return total, norm.item(), votes, completed == self._group.size

    def _moved(self, batch: Batch) -> Batch:
        """Return a batch of the CPU on the device."""
        inputs, targets = batch
        return self._device.moved(inputs), self._device.moved(targets)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on held-out text, in nats per byte; collective, each replica scores its part."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device.place)  # of the loss, of the bytes
        batches = held_out_batches(
            self.corpus.held_out,
            self._config.model.sequence_length,
            most=self._config.run.held_out_sequences,
            batch=_HELD_OUT_BATCH,
            replica=self._layout.replica,
            replicas=self._layout.dp,
        )
        for batch in batches:
            totals += self._parallel.score(self._moved(batch))
        self._group.all_reduce(totals)
        loss: Tensor = totals[0] / totals[1]
        return loss.item()

    def sample(self) -> str:
        """Return the configured prompt and the model's continuation, on rank 0 at least; collective."""
        run = self._config.run
        if not run.sample_length:
            return ""
        prompt, generator = run.prompt.encode(), seeded_generator(run.seed, Stream.SAMPLE)
        with self._parallel.predictor() as model:
            if model is None:
                return ""
            text = generate(model, prompt, run.sample_length, generator=generator, temperature=run.temperature)
        return printable(prompt + text)

    @property
    def opening(self) -> str:
        """The text at the start of a run: the model, the training text, and the layout of the ranks."""
        run, length = self._config.run, self._config.model.sequence_length
        return (
            f"a byte-level GPT of {self._parameters:,} parameters on {counted(self._group.size, 'rank')}, "
            f"{run.steps} steps of {run.global_batch} x {length} bytes, on {self._device.name}\n"
            f"text: {len(self.corpus.train):,} bytes to train on, {len(self.corpus.held_out):,} held out, from "
            f"{self.corpus.source}\n{self._table}{self._parallel.opening}"
        )

    def _summary(self, seconds: float, sample: str, *, complete: bool) -> Summary:
        speed, communication = self._speed.overall()
        run = self._config.run
        steps = self.steps[-1].step if self.steps else run.steps
        return Summary(
            complete=complete,
            ranks=self._group.size,
            steps=steps,
            parameters=self._parameters,
            tokens=steps * run.global_batch * self._config.model.sequence_length,
            first_loss=self.steps[0].loss if self.steps else math.nan,
            last_loss=self.steps[-1].loss if self.steps else math.nan,
            first_held_out_loss=self.held_out[0].held_out_loss if self.held_out else math.nan,
            held_out_loss=self.held_out[-1].held_out_loss if self.held_out else math.nan,
            unigram_entropy=self.corpus.unigram_entropy,
            seconds=seconds,
            tokens_per_second=speed,
            communication=communication,
            sample=sample,
            folder=str(run.folder),
            device=self._device.name,
        )

    def _finish(self, summary: Summary, recorder: Recorder) -> None:
        """Write and show the results; on rank 0."""
        trace = self._config.pipeline.trace
        if self._pipelined is not None and trace is not None and trace.exists():
            recorder.add_pipeline(*self._pipelined.timelines(trace))
        recorder.finish(summary, self.steps, self.held_out)


@dataclass(frozen=True)
class _Run:
    """A call of `run`.

    Attributes:
        clock: Adds up the time in communication.
        recorder: Writes and shows what is measured.
        checkpoints: Those of the run.
        begin: When the run would have begun without a break, on the clock of `time.perf_counter`.
    """

    clock: CommunicationClock
    recorder: Recorder
    checkpoints: RunCheckpoints
    begin: float

    @property
    def seconds(self) -> float:
        """The time since then."""
        return time.perf_counter() - self.begin

    def settle(self) -> None:
        """Wait for a save beside the steps, if there is one, and show what went wrong; collective."""
        if problem := self.checkpoints.settle():
            self.recorder.note(f"{problem}\ntraining goes on without it")


def _chosen_device(wanted: str, world: World) -> Device:
    """Return the device that the model computes on; local.

    Raises:
        ValueError: GPUs are wanted, and this is no world of GPUs.
    """
    if wanted == "cuda" and world.device.type != "cuda":
        raise ValueError(
            f"device: 'cuda' needs a world of GPUs, as init_process_group('nccl') makes, got one on the "
            f"{world.device.type}; axonmpi train makes it by itself"
        )
    return device_at(torch.device("cpu") if wanted == "cpu" else world.device)
