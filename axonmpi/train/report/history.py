"""Metrics of the steps before a checkpoint, read back from `metrics.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .metrics import HeldOutMetrics, StepMetrics

METRICS = "metrics.jsonl"


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
