"""Measurements of a run: losses, speed and the share of communication."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW = 20  # steps over which a speed is averaged


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


class Speedometer:
    """Tokens a second and the share of communication, from the times of steps.

    Args:
        tokens: Bytes trained on in a step, over all ranks.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._steps: list[tuple[float, float]] = []

    def add(self, seconds: float, communication_seconds: float) -> None:
        """Add a step: its time, and its time in communication."""
        self._steps.append((seconds, communication_seconds))

    def recent(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over the last 20 steps."""
        return self._rates(self._steps[-_WINDOW:])

    def overall(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over all steps; zeros without any."""
        return self._rates(self._steps)

    def _rates(self, steps: list[tuple[float, float]]) -> tuple[float, float]:
        seconds, communication = (sum(step[column] for step in steps) for column in (0, 1))
        seconds = max(seconds, 1e-9)
        return len(steps) * self._tokens / seconds, min(1.0, communication / seconds)
