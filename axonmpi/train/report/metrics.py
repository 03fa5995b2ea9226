"""What is measured during a run, and the file that keeps it.

`metrics.jsonl` has one JSON object a line. A line of a step has the fields of `StepMetrics`; a line of a held-out
evaluation has those of `HeldOutMetrics`; a line can be told by which loss it has.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ...backends import Backend
from ...types import Observer

__all__ = ["CommunicationClock", "HeldOutMetrics", "MetricsFile", "Speedometer", "StepMetrics"]

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
        communication: Share (0 to 1) of this rank's time in communication, waiting included, over the same steps.
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


class MetricsFile:
    """Writes metrics as JSON lines, each flushed when it is complete; replaces an existing file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._stream: TextIO = path.open("w", encoding="utf-8")

    def write(self, metrics: StepMetrics | HeldOutMetrics) -> None:
        """Append one line."""
        self._stream.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._stream.close()


class CommunicationClock:
    """Adds up the time that one thread spends in operations of some backends.

    An observer of the backends (see `axonmpi.Observer`), inside the `with` block. Operations that another thread
    runs meanwhile do not count: overlapped with computation they cost this thread nothing; only its waiting does.
    An operation that runs inside another one, of whichever backend, counts once. Observers that were there before
    are told everything as before, and are put back at the end.

    Args:
        *backends: The communicators to observe, each once.

    Attributes:
        seconds: Time in operations so far.
    """

    def __init__(self, *backends: Backend) -> None:
        self.seconds = 0.0
        self._backends = backends
        self._before: list[Observer | None] = []
        self._thread = 0
        self._depth = 0
        self._entered = 0.0

    def __enter__(self) -> CommunicationClock:
        """Begin to count, for the calling thread."""
        self._thread = threading.get_ident()
        self._before = [backend.observer for backend in self._backends]
        for backend, before in zip(self._backends, self._before, strict=True):
            backend.observer = self if before is None else _Both(before, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop to count."""
        for backend, before in zip(self._backends, self._before, strict=True):
            backend.observer = before

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
    """Tells two observers, and the clock only of the operation itself."""

    def __init__(self, before: Observer, clock: CommunicationClock) -> None:
        self._before = before
        self._clock = clock

    def enter(self, operation: str, nbytes: int) -> None:
        self._before.enter(operation, nbytes)
        self._clock.enter(operation, nbytes)

    def leave(self, operation: str) -> None:
        self._clock.leave(operation)
        self._before.leave(operation)


class Speedometer:
    """Turns step times into tokens a second and the share of communication, averaged over the last 20 steps.

    Args:
        tokens: Bytes trained on in a step, over all ranks.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.seconds = 0.0
        self.communication_seconds = 0.0
        self.steps = 0

    def add(self, seconds: float, communication_seconds: float) -> None:
        """Count one step: its whole time and the part of it in communication."""
        self._steps.append((seconds, communication_seconds))
        self.seconds += seconds
        self.communication_seconds += communication_seconds
        self.steps += 1

    def recent(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over the last steps."""
        seconds, communication = (sum(column) for column in zip(*self._steps, strict=True))
        return self._rates(len(self._steps), seconds, communication)

    def overall(self) -> tuple[float, float]:
        """Return tokens a second and the share of communication over all steps."""
        return self._rates(self.steps, self.seconds, self.communication_seconds)

    def _rates(self, steps: int, seconds: float, communication: float) -> tuple[float, float]:
        return steps * self._tokens / max(seconds, 1e-9), min(1.0, communication / max(seconds, 1e-9))
