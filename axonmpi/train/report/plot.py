"""The picture of a run: the training loss, the held-out loss, and the entropy that both must get below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .metrics import HeldOutMetrics, StepMetrics

__all__ = ["plot_losses"]


def plot_losses(
    path: Path,
    steps: Sequence[StepMetrics],
    held_out: Sequence[HeldOutMetrics],
    unigram_entropy: float,
    title: str,
) -> None:
    """Draw the loss curves as a PNG; replaces an existing file. Local.

    Args:
        path: The file to write.
        steps: Every step of the run.
        held_out: Every evaluation.
        unigram_entropy: Nats per byte, drawn as a level line.
        title: Text above.
    """
    # not pyplot: its state is shared by the threads of a process, and it looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([m.step for m in steps], [m.loss for m in steps], linewidth=0.8, label="training")
    axes.plot([m.step for m in held_out], [m.held_out_loss for m in held_out], marker="o", label="held out")
    level = f"unigram entropy of the held-out bytes ({unigram_entropy:.2f})"
    axes.axhline(unigram_entropy, color="grey", linestyle="--", label=level)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
