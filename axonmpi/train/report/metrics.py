"""Figures of each step, by which other files report a run, and the lines of `metrics.jsonl` that hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean over the global batch, before the step's update, in nats per byte.
        learning_rate: Of this step's update.
        gradient_norm: Norm of the whole averaged gradient before clipping.
        tokens_per_second: Bytes trained on a second, over all ranks, averaged over the last 20 steps.
        communication: Share (0 to 1) of this rank's time in communication, waiting included, over the same steps;
            with GPUs the time of the CPU, which only starts their work, outside of backward. 0 on mock ranks.
        seconds: Since training began, held-out evaluations included.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    communication: float
    seconds: float


@dataclass(frozen=True)
class HeldOutMetrics:
    """One evaluation on held-out text.

    Attributes:
        step: Steps made before it.
        held_out_loss: Mean over the scored bytes, in nats per byte.
        seconds: Since training began.
    """

    step: int
    held_out_loss: float
    seconds: float


def throughput(steps: Sequence[tuple[float, float]], tokens: int) -> tuple[float, float]:
    """Return tokens a second, and the share of communication, over some steps; zeros without any; local.

    Args:
        steps: Seconds of each step, and its seconds in communication.
        tokens: Bytes trained on in a step, over all ranks.
    """
    seconds = max(sum(step for step, _ in steps), 1e-9)
    communication = sum(communicating for _, communicating in steps)
    return len(steps) * tokens / seconds, min(1.0, communication / seconds)


# ---- the file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """The steps of a run up to a checkpoint.

    Attributes:
        steps: The steps.
        held_out: The evaluations on held-out text.
        lines: Both as lines of the file, in their order there.
    """

    steps: list[StepMetrics] = field(default_factory=list)
    held_out: list[HeldOutMetrics] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def read_history(path: Path, last: int) -> History:
    """Read the metrics up to a step; a run that was killed may have left more lines, or half a line; local.

    Args:
        path: The file; a missing one has no lines.
        last: Number of the last step.

    Raises:
        OSError: The file is there and cannot be read.
    """
    history = History()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        metrics = _parsed(line)
        if metrics is None or metrics.step > last:
            break
        history.lines.append(line)
        if isinstance(metrics, StepMetrics):
            history.steps.append(metrics)
        else:
            history.held_out.append(metrics)
    return history


def _parsed(line: str) -> StepMetrics | HeldOutMetrics | None:
    try:
        values: dict[str, Any] = json.loads(line)
        return StepMetrics(**values) if "loss" in values else HeldOutMetrics(**values)
    except (ValueError, TypeError):
        return None


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a file of lines atomically; local.

    Raises:
        OSError: It cannot be written.
    """
    fresh = path.with_name(f"{path.name}.partial")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
