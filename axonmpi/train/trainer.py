"""Training a small GPT on several ranks.

    each step:   own part of the global batch ─► forward, backward ─► average gradients ─► clip ─► AdamW
    at times:    own part of the held-out sequences ─► forward ─► sum over ranks ─► held-out loss
    at the end:  held-out loss, a sample of text, a picture of the losses

The global batch of a step depends on the seed and the step only, so the number of ranks changes who computes what
and not what is computed: loss curves of 1, 2 and 4 ranks agree to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..group import World
from ..types import ReduceOp
from .batches import BatchPlan, HeldOutPlan, Stream, seeded_generator
from .config import Config, OptimizerConfig
from .corpus import Corpus, load_corpus
from .metrics import CommunicationClock, HeldOutMetrics, Speedometer, StepMetrics
from .model import GPT, generate
from .parallel import ParallelModel, parallelize
from .recorder import SilentRecorder, Summary, count_of_ranks, open_recorder, printable
from .schedule import learning_rate

__all__ = ["Trainer"]

_HELD_OUT_BATCH = 16
_MAY_DIFFER = ("data", "out", "progress")  # between ranks; the text itself is compared


class Trainer:
    """Trains the model of a configuration on all ranks of a world.

    Construction is collective, and so is `run`.

    Args:
        config: All settings, the same on every rank.
        world: The ranks.
        corpus: The text; None means what `config.text` says.

    Raises:
        ValueError: The text cannot be used, the global batch does not divide by ranks x accumulation (both before
            anything is sent), or settings or text differ between ranks. Raised on every rank.

    Attributes:
        model: This rank's model, without the wrapper.
        corpus: The text.
        optimizer: Updates this rank's parameters.
    """

    def __init__(self, config: Config, world: World, *, corpus: Corpus | None = None) -> None:
        length, run = config.model.sequence_length, config.run
        self._config = config
        self._group = world.default_group
        self._plan = BatchPlan(run.global_batch, length, run.accumulation, world.rank, world.size, run.seed)
        self._held_out = HeldOutPlan(run.held_out_sequences, length, _HELD_OUT_BATCH, world.rank, world.size)
        self.corpus = load_corpus(config.text, length) if corpus is None else corpus
        self._check_same_on_all_ranks()
        self.model = GPT(config.model, generator=seeded_generator(run.seed, Stream.WEIGHTS))
        self._parameters = self.model.num_parameters()
        matrices = {name for name, parameter in self.model.named_parameters() if parameter.dim() >= 2}
        self._parallel = parallelize(self.model, run, self._group)
        self.optimizer = _make_optimizer(self._parallel, matrices, config.optimizer)
        self._speed = Speedometer(run.global_batch * length)
        self._recorder = SilentRecorder()

    @property
    def steps(self) -> list[StepMetrics]:
        """The steps made so far, on every rank; speed and communication are this rank's own."""
        return self._recorder.steps

    @property
    def held_out(self) -> list[HeldOutMetrics]:
        """The held-out evaluations made so far, on every rank."""
        return self._recorder.held_out

    def _check_same_on_all_ranks(self) -> None:
        settings = {name: value for name, value in self._config.flat().items() if name not in _MAY_DIFFER}
        described = self._group.all_gather_object({**settings, "text": self.corpus.digest})
        for rank, other in enumerate(described):
            differing = [name for name, value in described[0].items() if other[name] != value]
            if differing:
                raise ValueError(
                    f"ranks 0 and {rank} differ in {', '.join(differing)}: start all ranks with the same settings, "
                    "and give them the same text"
                )

    def run(self) -> Summary:
        """Train to the end; collective.

        Returns:
            The run in a few numbers, the same on every rank.

        Raises:
            ValueError: Rank 0 cannot write to the run's folder; raised on every rank.
            FloatingPointError: The loss is no longer a number; raised on every rank.
        """
        self._recorder = open_recorder(self._config, self._group)
        summary = None
        try:
            with CommunicationClock(self._group.backend) as clock:
                self._recorder.note(self._opening())
                seconds = self._train(clock)
            with self._parallel.whole():
                if self._group.rank == 0:
                    summary = self._summarize(seconds)
                    self._recorder.finish(summary)
        finally:
            self._recorder.close()
        agreed: Summary = self._group.broadcast_object(summary)
        return agreed

    def _train(self, clock: CommunicationClock) -> float:
        """Make all steps and return the seconds they and the evaluations took."""
        run = self._config.run
        begin = time.perf_counter()
        self._evaluate(0, begin)
        for step in range(1, run.steps + 1):
            self._recorder.add_step(self._timed_step(step, begin, clock))
            if step == run.steps or (run.evaluate_every and step % run.evaluate_every == 0):
                self._evaluate(step, begin)
        return time.perf_counter() - begin

    def _evaluate(self, step: int, begin: float) -> None:
        loss = self.held_out_loss()
        self._recorder.add_held_out(HeldOutMetrics(step, loss, time.perf_counter() - begin))

    def _timed_step(self, step: int, begin: float, clock: CommunicationClock) -> StepMetrics:
        started, communicated = time.perf_counter(), clock.seconds
        rate = learning_rate(step - 1, self._config.run.steps, self._config.optimizer)
        loss, norm = self._step(step, rate)
        now = time.perf_counter()
        self._speed.add(now - started, clock.seconds - communicated)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {step} is {loss}: training has diverged; try a smaller lr (now "
                f"{self._config.optimizer.lr:g}), more warmup_steps or a smaller gradient_clip"
            )
        return StepMetrics(step, loss, rate, norm, *self._speed.recent(), now - begin)

    def _step(self, step: int, rate: float) -> tuple[float, float]:
        """Update the weights; return the loss of the global batch and the norm of its gradient."""
        loss = self._backward(step)
        self._parallel.sync_gradients()
        norm = self._parallel.clip(self._config.optimizer.gradient_clip)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._group.all_reduce(loss, ReduceOp.AVERAGE)
        return loss.item(), norm

    def _backward(self, step: int) -> Tensor:
        """Accumulate the gradient of this rank's part; return the part's mean loss, float64 and 0-d."""
        parts = self._config.run.accumulation
        total = torch.zeros((), dtype=torch.float64)
        for part, (inputs, targets) in enumerate(self._plan.micro_batches(step, self.corpus.train), 1):
            with nullcontext() if part == parts else self._parallel.no_sync():
                loss = _cross_entropy(self._parallel(inputs), targets, "mean") / parts
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on held-out text, in nats per byte; collective, each rank scores its part."""
        totals = torch.zeros(2, dtype=torch.float64)  # of the loss, of the bytes
        for inputs, targets in self._held_out.batches(self.corpus.held_out):
            loss = _cross_entropy(self._parallel(inputs), targets, "sum")
            totals += torch.tensor([loss.item(), targets.numel()], dtype=torch.float64)
        self._group.all_reduce(totals)
        return float(totals[0] / totals[1])

    def sample(self) -> str:
        """Return the configured prompt and what the model makes of it; local."""
        run = self._config.run
        if not run.sample_length:
            return ""
        prompt, generator = run.prompt.encode(), seeded_generator(run.seed, Stream.SAMPLE)
        text = generate(self.model, prompt, run.sample_length, generator=generator, temperature=run.temperature)
        return printable(prompt + text)

    def _opening(self) -> str:
        run, length = self._config.run, self._config.model.sequence_length
        return (
            f"a byte-level GPT of {self._parameters:,} parameters on "
            f"{count_of_ranks(self._group.size)}, "
            f"{run.steps} steps of {run.global_batch} x {length} bytes\n"
            f"text: {len(self.corpus.train):,} bytes to train on, {len(self.corpus.held_out):,} held out, from "
            f"{self.corpus.source}"
        )

    def _summarize(self, seconds: float) -> Summary:
        speed, communication = self._speed.overall()
        run = self._config.run
        return Summary(
            ranks=self._group.size,
            steps=run.steps,
            parameters=self._parameters,
            tokens=run.steps * run.global_batch * self._config.model.sequence_length,
            first_loss=self.steps[0].loss,
            last_loss=self.steps[-1].loss,
            first_held_out_loss=self.held_out[0].held_out_loss,
            held_out_loss=self.held_out[-1].held_out_loss,
            unigram_entropy=self.corpus.unigram_entropy,
            seconds=seconds,
            tokens_per_second=speed,
            communication=communication,
            sample=self.sample(),
            folder=str(run.folder),
        )


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def _make_optimizer(
    model: ParallelModel, matrices: Collection[str], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Make AdamW, with weight decay for matrices only."""
    parameters = dict(model.named_parameters())
    plain = {name.removeprefix("module."): parameter for name, parameter in parameters.items()}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in plain.items() if name in matrices], "weight_decay": config.weight_decay},
        {"params": [p for name, p in plain.items() if name not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
