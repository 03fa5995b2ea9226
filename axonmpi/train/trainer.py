"""The training loop of a small GPT: a step, a held-out evaluation, a checkpoint.

    each step:   slice of the global batch ─► forward, backward ─► average gradients ─► clip ─► AdamW
    sometimes:   slice of the held-out sequences ─► forward ─► sum over ranks ─► held-out loss
                 a checkpoint, from which another run goes on
    at the end:  held-out loss, a checkpoint, a sample of text, a picture of the losses

The ranks of a replica share a model and a slice of the batch: each has some layers (pp), a shard of every layer
(tp), or both; or a block of every sequence (cp). The global batch of a step depends on the seed and the step only.
So the loss curve is the same, to rounding, for any number of ranks and any layout.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import same_on_all_ranks
from ..checkpoint.preemption import PreemptionGuard
from ..groups.world import World
from ..mesh import DeviceMesh
from ..pipeline.schedule.trace import TIMES_NAME
from ..record import Phase, own_record, phase
from ..utils.device import Device, device_at
from ..utils.text import counted
from .batches import Batch, BatchPlan, Stream, held_out_batches, seeded_generator
from .checkpoints import RunCheckpoints
from .config import Config
from .corpus import Corpus, load_corpus
from .model import GPT, generate
from .optimizer import learning_rate, make_optimizer
from .parallel_model import FullModel, ParallelModel
from .pipelined_model import PipelinedModel
from .rank_grid import RankGrid, check_nodes, plan_schedule
from .report.memory_table import memory_table, rank_memory
from .report.metrics import HeldOutMetrics, StepMetrics, throughput
from .report.progress import make_progress
from .report.recorder import Recorder, Summary, open_recorder, printable
from .tensor_parallel import shard_layers

_HELD_OUT_BATCH = 16
_SPEED_STEPS = 20
_MAY_DIFFER = ("data", "progress")  # between ranks; the text itself is compared


class Trainer:
    """Trains the model of a configuration on all ranks of a world.

    Construction is collective, and so is `run`.

    Args:
        config: All settings, the same on every rank.
        world: The ranks. The model computes on its device, or with the setting `cpu` on the CPU.
        corpus: The text; None means the text of `config.text`.
        guard: Decides when to stop early; None means near the time limit, and by no signal.

    Raises:
        ValueError: The text cannot be used (before anything is sent); settings or text differ between ranks, the
            ranks are not as many as dp x cp x tp x pp, the global batch cannot be divided among the replicas, or
            GPUs are wanted and this is no world of GPUs, raised on every rank.

    Attributes:
        model: This rank's model, or its shard, without the wrapper; in a pipeline the list of its stages.
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
        grid = self._grid = RankGrid.of(config, world.size, world.rank)
        unit = "replicas" if grid.cp * grid.tp > 1 else "pipelines" if grid.pp > 1 else "ranks"
        self._plan = BatchPlan(run.global_batch, length, run.accumulation, grid.replica, grid.dp, run.seed, unit)
        schedule = plan_schedule(config, grid) if config.pipeline.is_wanted else None
        mesh = DeviceMesh(grid.shape, world)
        if run.fsdp == "hybrid":
            check_nodes(grid, self._group.all_gather_object(min(self._group.backend.control.node_ranks)))
        full = GPT(config.model, generator=seeded_generator(run.seed, Stream.WEIGHTS))
        full.to(self._device.place)
        self.model: nn.Module = full
        self._parameters = full.num_parameters()
        matrices = {name for name, p in full.named_parameters(remove_duplicate=False) if p.dim() >= 2}
        shard_layers(full, mesh.group("tp"), sequence_parallel=config.mesh.sequence_parallel)
        self._pipelined: PipelinedModel | None = None
        self._trace = None if run.trace is None else world.trace(run.trace)
        self._parallel: ParallelModel
        if schedule is None:
            self._parallel = FullModel(full, config, mesh, self._device)
        else:
            self._parallel = self._pipelined = PipelinedModel(full, config, schedule, mesh, self._device)
            self.model = nn.ModuleList(self._pipelined.stages)
        self.optimizer = make_optimizer(self._parallel, matrices, config.optimizer)
        memory = self._group.all_gather_object(rank_memory(config, grid, schedule, self._parallel))
        self._table = memory_table(config, grid, schedule, memory)
        self._tokens = run.global_batch * length
        self._times: list[tuple[float, float]] = []  # of each step and its communication
        self.steps: list[StepMetrics] = []
        self.held_out: list[HeldOutMetrics] = []

    def _check_same_on_all_ranks(self) -> None:
        settings = {**self._config.flat(), "text": f"with digest {self.corpus.digest}"}
        same_on_all_ranks(
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
            return self._report_finished(finished)
        start = checkpoints.load(path, self._parallel.saved, self.optimizer)
        self.steps, self.held_out = list(start.history.steps), list(start.history.held_out)
        recorder = open_recorder(self._config, self._group, start.history.lines)
        summary = None
        try:
            recorder.note(self.opening)
            if start.path is not None:
                recorder.note(f"going on after step {start.step}, from {start.path}")
            self._recorder, self._checkpoints = recorder, checkpoints
            self._begin = time.perf_counter() - start.seconds
            with self._trace or nullcontext():
                stopped = self._train(0 if start.path is None else start.step + 1)
            seconds = self._seconds()
            sample = "" if stopped else self.sample()
            if self._group.rank == 0:
                summary = self._summary(seconds, sample, complete=not stopped)
                if not stopped:
                    self._finish(summary, recorder)
        finally:
            recorder.close()
        agreed: Summary = self._group.broadcast_object(summary)
        return agreed

    def _report_finished(self, content: dict[str, Any]) -> Summary:
        """Print that the run was finished before, and return the summary in its `summary.json`."""
        summary = Summary(**{name: value for name, value in content.items() if name != "config"})
        if self._group.rank == 0:
            progress = make_progress(self._config.run.progress, self._config.run.steps)
            progress.note(f"all {summary.steps} steps were made before: see {self._config.run.folder}")
            progress.close()
        return summary

    def _seconds(self) -> float:
        """Return the seconds of training so far, without the break before a run went on."""
        return time.perf_counter() - self._begin

    def _train(self, first: int) -> bool:
        """Make the steps from `first` on; step 0 only evaluates. Return True if the run was told to stop."""
        steps, every = self._config.run.steps, self._config.run.evaluate_every
        stops = False
        for step in range(first, steps + 1):
            if step:
                with self._traced() if step == steps else nullcontext():
                    stops = self._timed_step(step)
            if step in (0, steps) or (every and step % every == 0):
                self.held_out.append(HeldOutMetrics(step, self.held_out_loss(), self._seconds()))
                self._recorder.add(self.held_out[-1])
            stops = stops and step < steps
            if step:
                self._save_if_due(step, stops=stops)
            if stops:
                break
        return stops

    def _save_if_due(self, step: int, *, stops: bool) -> None:
        """Save a checkpoint: the last while the ranks wait, others beside the next steps."""
        steps, every = self._config.run.steps, self._config.checkpoint.checkpoint_every
        is_last = stops or step == steps
        if not (is_last or (every and step % every == 0)):
            return
        self._complete_save()
        self._recorder.sync()
        model = self._parallel.saved
        path = self._checkpoints.save(step, self._seconds(), model, self.optimizer, blocking=is_last)
        if stops:
            self._recorder.note(
                f"stopped after step {step} of {steps}, saved {path}: --resume auto goes on from it"
            )

    def _complete_save(self) -> None:
        """Wait for a save beside the steps, if there is one, and show its error; collective."""
        if problem := self._checkpoints.settle():
            self._recorder.note(f"{problem}\ntraining goes on without it")

    def _traced(self) -> AbstractContextManager[None]:
        """Keep the times of the pipeline's actions in the block, if the settings ask for a trace; collective."""
        trace = self._config.run.trace
        return nullcontext() if self._pipelined is None or trace is None else self._pipelined.traced(trace)

    def _timed_step(self, step: int) -> bool:
        """Make a step and record it; return True to stop after it."""
        started, record = time.perf_counter(), own_record()
        before = record.latest
        rate = learning_rate(step - 1, self._config.run.steps, self._config.optimizer)
        loss, norm, votes, saved = self._step(step, rate)
        now = time.perf_counter()
        self._times.append((now - started, record.seconds_in_operations(before)))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {step} is {loss}: training has diverged; try a smaller lr (now "
                f"{self._config.optimizer.lr:g}), more warmup_steps or a smaller gradient_clip"
            )
        speed = throughput(self._times[-_SPEED_STEPS:], self._tokens)
        self.steps.append(StepMetrics(step, loss, rate, norm, *speed, self._seconds()))
        self._recorder.add(self.steps[-1])
        if saved:
            self._complete_save()
        return self._guard.decide(votes)

    def _step(self, step: int, rate: float) -> tuple[float, float, float, bool]:
        """Update the weights.

        Args:
            step: Number of the step.
            rate: The learning rate.

        Returns:
            The loss of the global batch, the norm of its gradient, the votes of all ranks to stop, and True if all
            ranks have completed a save beside the steps.
        """
        with phase(Phase.DATA):
            batches = [self._moved(batch) for batch in self._plan.batches(step, self.corpus.train)]
        loss = self._parallel.backward(batches)
        norm = self._parallel.clip(self._config.optimizer.gradient_clip or math.inf)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        with phase(Phase.OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()
        own = [self._guard.vote(), self._checkpoints.has_saved()]
        sums = torch.stack([loss, *loss.new_tensor(own)])  # one message for all three
        self._group.all_reduce(sums)
        total, votes, completed = sums.tolist()
        return total, norm.item(), votes, completed == self._group.size

    def _moved(self, batch: Batch) -> Batch:
        """Return a batch, which is on the CPU, on the device."""
        inputs, targets = batch
        return self._device.moved(inputs), self._device.moved(targets)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on held-out text, in nats per byte; collective, each replica scores its slice."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device.place)  # the loss, the number of bytes
        batches = held_out_batches(
            self.corpus.held_out,
            self._config.model.sequence_length,
            most=self._config.run.held_out_sequences,
            batch=_HELD_OUT_BATCH,
            replica=self._grid.replica,
            replicas=self._grid.dp,
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
        """The text at the start of a run: the model, the training text, and the ranks' shards and memory."""
        run, length = self._config.run, self._config.model.sequence_length
        return (
            f"a byte-level GPT of {self._parameters:,} parameters on {counted(self._group.size, 'rank')}, "
            f"{run.steps} steps of {run.global_batch} x {length} bytes, on {self._device.name}\n"
            f"text: {len(self.corpus.train):,} bytes to train on, {len(self.corpus.held_out):,} held out, from "
            f"{self.corpus.source}\n{self._table}{self._parallel.opening}"
        )

    def _summary(self, seconds: float, sample: str, *, complete: bool) -> Summary:
        speed, communication = throughput(self._times, self._tokens)
        run = self._config.run
        steps = self.steps[-1].step if self.steps else run.steps
        return Summary(
            complete=complete,
            ranks=self._group.size,
            steps=steps,
            parameters=self._parameters,
            tokens=steps * self._tokens,
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
        if self._trace is not None and self._trace.summary is not None:
            recorder.note(f"{self._trace.summary.cause}\nsee: axonmpi trace {self._trace.folder}")
            times = self._trace.folder / TIMES_NAME
            if self._pipelined is not None and times.exists():
                recorder.add_pipeline(*self._pipelined.timelines(times), times)
        recorder.finish(summary, self.steps, self.held_out)


def _chosen_device(wanted: str, world: World) -> Device:
    """Return the device that the model computes on; local.

    Raises:
        ValueError: GPUs are wanted, and the world has none.
    """
    if wanted == "cuda" and world.device.type != "cuda":
        raise ValueError(
            f"device: 'cuda' needs a world of GPUs, as init_process_group('nccl') makes, got one on the "
            f"{world.device.type}; axonmpi train makes it by itself"
        )
    return device_at(torch.device("cpu") if wanted == "cpu" else world.device)
