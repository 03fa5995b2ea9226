"""The folder of a run, written by rank 0: figures, curves, a sample of text and the summary.

axonmpi-runs/NAME/
  metrics.jsonl   a JSON object a line: the fields of `StepMetrics` for each step, which have `loss`,
                  and those of `HeldOutMetrics` for each held-out evaluation, which have `held_out_loss`
  loss.png        the loss curves
  pipeline.png    the last step of a pipeline beside the ideal, with --trace
  sample.txt      text that the trained model wrote
  summary.json    the run in a few numbers, with all its settings
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...across_ranks.comparison import raised_on_all
from ...groups.process_group import ProcessGroup
from ...pipeline import Timeline
from ...pipeline.schedule.chart import describe, draw_chart
from ...utils.pictures import import_matplotlib
from ...utils.text import counted, name_ranks
from ..config import Config
from .metrics import METRICS, HeldOutMetrics, StepMetrics, write_lines
from .progress import make_progress


@dataclass(frozen=True)
class Summary:
    """The results of a run; the same on every rank. Losses and the entropy are in nats per byte.

    Attributes:
        complete: Whether the run is finished; else it has stopped early, and can go on from its checkpoint.
        ranks: Number of ranks.
        steps: Updates of the weights, with those before the run went on.
        parameters: Trainable numbers of the model.
        tokens: Bytes trained on, over all ranks.
        first_loss: Training loss of the first step.
        last_loss: Training loss of the last step.
        first_held_out_loss: Held-out loss before training.
        held_out_loss: Held-out loss after training.
        unigram_entropy: Held-out loss of a model that knows only the frequency of each byte.
        seconds: Time from the first step to the last held-out loss.
        tokens_per_second: Bytes trained on a second, over all ranks, held-out evaluations not counted; since the
            run began or went on.
        communication: Share (0 to 1) of rank 0's time of training spent in communication, waiting included; of the
            same time. 0 on mock ranks.
        sample: The generated text.
        folder: Folder of the run's files.
        device: Device of rank 0: the CPU, or the name of its GPU.
    """

    complete: bool
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
    device: str


class Recorder:
    """The writer of a run's files and of its progress.

    Args:
        config: The run's settings.
        earlier: The lines of metrics of the steps before, if the run goes on.
        writes: False on ranks other than 0, which write and show nothing.

    Raises:
        OSError: The folder or a file in it cannot be written.
    """

    def __init__(self, config: Config, earlier: Sequence[str] = (), *, writes: bool) -> None:
        self._config = config
        self._writes = writes
        self._folder = config.run.folder
        if writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            # else a run that is interrupted would seem to have the results of an earlier one
            for name in ("loss.png", "pipeline.png", "sample.txt", "summary.json"):
                (self._folder / name).unlink(missing_ok=True)
            write_lines(self._folder / METRICS, earlier)
        path = self._folder / METRICS if writes else os.devnull
        self._metrics = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - stays open until `close`
        self._progress = make_progress(config.run.progress if writes else "off", config.run.steps)

    def note(self, text: str) -> None:
        """Show a text."""
        self._progress.note(text)

    def add(self, metrics: StepMetrics | HeldOutMetrics) -> None:
        """Write and show a step, or an evaluation on held-out text."""
        self._metrics.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
        if isinstance(metrics, StepMetrics):
            self._progress.update(metrics)
        else:
            self.note(f"step {metrics.step}: held-out loss {metrics.held_out_loss:.4f} nats per byte")

    def sync(self) -> None:
        """Write the metrics to the disk, as a checkpoint is: a run that goes on needs both."""
        if self._writes:
            os.fsync(self._metrics.fileno())

    def add_pipeline(self, measured: Timeline, ideal: Timeline, trace: Path) -> None:
        """Draw and describe the times of a pipeline's step, beside the same step without waiting; on rank 0."""
        if self._config.run.plot:
            draw_chart(ideal, self._folder / "pipeline.png", measured)
        self.note(f"last step: {describe(measured)}; without waiting for messages {ideal.bubble:.1%}; see {trace}")

    def finish(self, summary: Summary, steps: Sequence[StepMetrics], held_out: Sequence[HeldOutMetrics]) -> None:
        """Write the summary, the sample and the picture, and show the result; on rank 0."""
        self.close()
        content = json.dumps({**dataclasses.asdict(summary), "config": self._config.flat()}, indent=2)
        if summary.sample:
            (self._folder / "sample.txt").write_text(summary.sample + "\n", encoding="utf-8")
        if self._config.run.plot:
            title = f"{self._config.run.name}: {summary.parameters:,} parameters, {counted(summary.ranks, 'rank')}"
            _plot_losses(self._folder / "loss.png", steps, held_out, summary.unigram_entropy, title)
        # the last file: its existence marks a finished run
        write_lines(self._folder / "summary.json", [content])
        self.note(_report(summary))

    def close(self) -> None:
        """Stop showing progress and close the metrics; may be called twice."""
        self._progress.close()
        self._metrics.close()


def open_recorder(config: Config, group: ProcessGroup, earlier: Sequence[str] = ()) -> Recorder:
    """Make the recorder of this rank; collective.

    Args:
        config: The run's settings.
        group: All ranks of the run; rank 0 writes.
        earlier: The lines of metrics of the steps before, if the run goes on; on rank 0.

    Raises:
        ValueError: Rank 0 cannot write to the folder or to that of the trace, or a rank does not see the folder;
            raised on every rank.
    """
    trace, folder = config.run.trace, config.run.folder
    recorder = None
    with raised_on_all(group.backend):
        if group.rank == 0 and config.run.plot and find_spec("matplotlib") is None:
            raise ValueError("--plot: matplotlib is not installed: pip install 'axonmpi[train]', or use --no-plot")
        if group.rank == 0 and trace is not None:  # at the end of the run it would be too late to find out
            with _writing(f"--trace {trace}"):
                trace.mkdir(parents=True, exist_ok=True)
        if group.rank == 0:
            with _writing(f"--out {folder}"):
                recorder = Recorder(config, earlier, writes=True)
    if blind := [rank for rank, sees in enumerate(group.all_gather_object(folder.is_dir())) if not sees]:
        raise ValueError(
            f"--out {folder}: {name_ranks(blind)} cannot see this folder, which rank 0 has made: take one on a "
            "file system of all nodes, since all ranks write checkpoints"
        )
    return recorder or Recorder(config, writes=False)


@contextmanager
def _writing(option: str) -> Iterator[None]:
    """Turn an OSError of the block into a ValueError that names the option; local."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: cannot write there: {error.strerror or error}") from error


def printable(text: bytes) -> str:
    """Decode UTF-8, and replace characters that a terminal obeys or cannot show."""
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


def _plot_losses(
    path: Path,
    steps: Sequence[StepMetrics],
    held_out: Sequence[HeldOutMetrics],
    unigram_entropy: float,
    title: str,
) -> None:
    """Draw the training loss, the held-out loss, and the entropy that both have to fall below, as a PNG; local.

    Args:
        path: The file to write.
        steps: Every step of the run.
        held_out: Every evaluation.
        unigram_entropy: Nats per byte, drawn as a level line.
        title: Heading.
    """
    import_matplotlib()
    # not pyplot: the threads of a process share its state, and it looks for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([m.step for m in steps], [m.loss for m in steps], linewidth=0.8, label="training")
    axes.plot([m.step for m in held_out], [m.held_out_loss for m in held_out], marker="o", label="held out")
    level = f"unigram entropy of the held-out bytes ({unigram_entropy:.2f})"
    axes.axhline(unigram_entropy, color="grey", linestyle="--", label=level)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
