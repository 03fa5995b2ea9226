"""What a run leaves behind and shows: done by rank 0, silently left out by the others.

axonmpi-runs/NAME/
  metrics.jsonl   a line for each step and each held-out evaluation
  loss.png        the loss curves
  pipeline.png    the last step of a pipeline beside the ideal, with --trace
  sample.txt      text that the trained model wrote
  summary.json    the run in a few numbers, with all its settings
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...groups.world import ProcessGroup
from ...pipeline import Timeline
from ...pipeline.schedule.chart import describe, draw_chart
from ..config import Config
from .metrics import HeldOutMetrics, MetricsFile, StepMetrics
from .plot import plot_losses
from .progress import ProgressLine, SilentProgress, make_progress
from .wording import counted

__all__ = ["Recorder", "SilentRecorder", "Summary", "open_recorder"]


@dataclass(frozen=True)
class Summary:
    """A finished run; the same on every rank. Losses and the entropy are in nats per byte.

    Attributes:
        ranks: Number of ranks.
        steps: Updates of the weights.
        parameters: Trainable numbers of the model.
        tokens: Bytes trained on, over all ranks.
        first_loss: Training loss of the first step.
        last_loss: Training loss of the last step.
        first_held_out_loss: Held-out loss before training.
        held_out_loss: Held-out loss after training.
        unigram_entropy: What the held-out bytes cost a model that knows only how frequent each byte is.
        seconds: Time from the first step to the last held-out loss.
        tokens_per_second: Bytes trained on a second, over all ranks, held-out evaluations not counted.
        communication: Share (0 to 1) of rank 0's time of training spent in communication, waiting included.
        sample: The generated text.
        folder: Where the run wrote.
    """

    ranks: int
    steps: int
    parameters: int
    tokens: int
    first_loss: float
    last_loss: float
    first_held_out_loss: float
    held_out_loss: float
    unigram_entropy: float
    seconds: float
    tokens_per_second: float
    communication: float
    sample: str
    folder: str


class SilentRecorder:
    """Keeps what was measured, and neither writes nor shows it.

    Attributes:
        steps: Every step so far.
        held_out: Every held-out evaluation so far.
    """

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.held_out: list[HeldOutMetrics] = []
        self._progress: ProgressLine = SilentProgress()

    def note(self, text: str) -> None:
        """Show a text."""
        self._progress.note(text)

    def add_step(self, metrics: StepMetrics) -> None:
        """Take in one step."""
        self.steps.append(metrics)
        self._progress.update(metrics)

    def add_held_out(self, metrics: HeldOutMetrics) -> None:
        """Take in one held-out evaluation."""
        self.held_out.append(metrics)
        self.note(f"step {metrics.step}: held-out loss {metrics.held_out_loss:.4f} nats per byte")

    def add_pipeline(self, measured: Timeline, ideal: Timeline) -> None:
        """Take in when the ranks of a pipeline computed, and when they would have without waiting for messages."""

    def finish(self, summary: Summary) -> None:
        """Take in the end of the run."""

    def close(self) -> None:
        """Stop showing progress; may be called twice."""
        self._progress.close()


class Recorder(SilentRecorder):
    """Writes the run's files and shows its progress; makes the folder.

    Args:
        config: The run's settings.

    Raises:
        OSError: The folder or a file in it cannot be written.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._folder = config.run.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("loss.png", "pipeline.png", "sample.txt", "summary.json"):
            (self._folder / name).unlink(missing_ok=True)  # or an interrupted run would show another's result
        self._plots = config.run.plot and find_spec("matplotlib") is not None
        self._file = MetricsFile(self._folder / "metrics.jsonl")
        self._progress = make_progress(config.run.progress, config.run.steps)

    def add_step(self, metrics: StepMetrics) -> None:
        """Write and show one step."""
        self._file.write(metrics)
        super().add_step(metrics)

    def add_held_out(self, metrics: HeldOutMetrics) -> None:
        """Write and show one held-out evaluation."""
        self._file.write(metrics)
        super().add_held_out(metrics)

    def add_pipeline(self, measured: Timeline, ideal: Timeline) -> None:
        """Draw both, and show what they are."""
        if self._plots:
            draw_chart(ideal, self._folder / "pipeline.png", measured)
        trace = self._config.pipeline.trace
        self.note(f"last step: {describe(measured)}; without waiting for messages {ideal.bubble:.1%}; see {trace}")

    def finish(self, summary: Summary) -> None:
        """Write the summary, the sample and the picture, and show the result."""
        self.close()
        self._write_json("summary.json", {**dataclasses.asdict(summary), "config": self._config.flat()})
        if summary.sample:
            (self._folder / "sample.txt").write_text(summary.sample + "\n", encoding="utf-8")
        if self._plots:
            title = f"{self._config.run.name}: {summary.parameters:,} parameters, {counted(summary.ranks, 'rank')}"
            plot_losses(self._folder / "loss.png", self.steps, self.held_out, summary.unigram_entropy, title)
        self.note(_report(summary))

    def close(self) -> None:
        """Stop showing progress and close the metrics; may be called twice."""
        super().close()
        self._file.close()

    def _write_json(self, name: str, content: dict[str, object]) -> None:
        text = json.dumps(content, indent=2)
        (self._folder / name).write_text(text + "\n", encoding="utf-8")


def open_recorder(config: Config, group: ProcessGroup) -> SilentRecorder:
    """Make the recorder of this rank; collective.

    Args:
        config: The run's settings.
        group: All ranks of the run; rank 0 gets the one that writes.

    Raises:
        ValueError: Rank 0 cannot write to the folder, or where the trace should go; raised on every rank.
    """
    recorder, problem = SilentRecorder(), None
    if group.rank == 0:
        place = f"--trace {config.pipeline.trace}"
        try:
            _make_way(config.pipeline.trace)
            place = f"--out {config.run.folder}"
            recorder = Recorder(config)
        except OSError as error:
            problem = f"{place}: cannot write there: {error.strerror or error}"
    problem = group.broadcast_object(problem)
    if problem is not None:
        raise ValueError(problem)
    return recorder


def _make_way(file: Path | None) -> None:
    """Take away an earlier run's trace, and see that a new one can be written; at the end of the run it is late."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.unlink()


def printable(text: bytes) -> str:
    """Decode UTF-8 and replace what is not text, so that it can be shown on a terminal."""
    decoded = text.decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in decoded)


def _report(summary: Summary) -> str:
    held_out, entropy = f"{summary.held_out_loss:.4f}", f"{summary.unigram_entropy:.4f}"
    work = f"{summary.steps} steps in {summary.seconds:.1f} s on {counted(summary.ranks, 'rank')}"
    share = f"{100 * summary.communication:.0f} % of the time in communication"
    lines = [
        "",
        f"held-out loss {held_out} nats per byte (unigram entropy of the held-out bytes: {entropy})",
        f"{work}: {summary.tokens_per_second:,.0f} tokens/s, {share}",
        f"written to {Path(summary.folder)}",
    ]
    if summary.sample:
        lines += ["", "a sample of what it writes:", *("    " + line for line in summary.sample.splitlines())]
    return "\n".join(lines)
