"""What is measured during a run: losses, speed, and time in communication."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ...backends import Backend
from ...types import Observer

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
            with GPUs the time of the CPU, which only tells them what to do, outside of backward.
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


class CommunicationClock:
    """Adds up the time that one thread spends in operations of some backends, within a `with` block.

    It is an observer of the backends (see `axonmpi.Observer`). Operations of another thread do not count: they
    overlap with computation and cost this thread nothing but its waiting, which counts. An operation inside another
    one, of any of the backends, counts once. Earlier observers still hear everything, and come back at the end.

    Args:
        *backends: The backends to observe, each once.

    Attributes:
        seconds: Time in operations so far.
    """

    def __init__(self, *backends: Backend) -> None:
        self.seconds = 0.0
        self._earlier: list[tuple[Backend, Observer | None]] = [(each, None) for each in backends]
        self._thread = 0
        self._depth = 0
        self._entered = 0.0

    def __enter__(self) -> CommunicationClock:
        """Begin to count, for the calling thread."""
        self._thread = threading.get_ident()
        self._earlier = [(backend, backend.observer) for backend, _ in self._earlier]
        for backend, observer in self._earlier:
            backend.observer = self if observer is None else _Both(observer, self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop to count."""
        for backend, observer in self._earlier:
            backend.observer = observer

    def enter(self, operation: str, nbytes: int) -> None:
        """An operation begins."""
        if threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._entered = time.perf_counter()

    def leave(self, operation: str) -> None:
        """An operation has ended."""
        if threading.get_ident() == self._thread:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - self._entered


class _Both:
    """Tells two observers; the clock counts the operation alone, not the other observer."""

    def __init__(self, earlier: Observer, clock: CommunicationClock) -> None:
        self._earlier = earlier
        self._clock = clock

    def enter(self, operation: str, nbytes: int) -> None:
        self._earlier.enter(operation, nbytes)
        self._clock.enter(operation, nbytes)

    def leave(self, operation: str) -> None:
        self._clock.leave(operation)
        self._earlier.leave(operation)


class Speedometer:
    """Turns step times into tokens a second and the share of communication, averaged over the last 20 steps.

    Args:
        tokens: Bytes trained on in a step, over all ranks.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._steps: list[tuple[float, float]] = []

    def add(self, seconds: float, communication_seconds: float) -> None:
        """Count one step: its whole time and the part of it in communication."""
        self._steps.append((seconds, communication_seconds))

    def recent(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over the last steps."""
        return self._rates(self._steps[-_WINDOW:])

    def overall(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over all steps; zeros without any."""
        return self._rates(self._steps)

    def _rates(self, steps: list[tuple[float, float]]) -> tuple[float, float]:
        seconds, communication = (sum(step[column] for step in steps) for column in (0, 1))
        seconds = max(seconds, 1e-9)
        return len(steps) * self._tokens / seconds, min(1.0, communication / seconds)
