"""Start and end times of all actions of a pipeline, simulated or measured in a real run (without torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .actions import Action, ActionKind

_FREES = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Span:
    """An action with its start and end.

    Attributes:
        action: The action.
        start: Start time, in the unit of the costs, or in seconds if measured.
        end: End time, in the same unit.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The computing actions of all ranks with their times.

    Attributes:
        name: For titles.
        spans: [ranks] the actions that compute, in the order of the rank.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def start(self) -> float:
        """Start of the first action."""
        return min((span.start for spans in self.spans for span in spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """End of the last action."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return self.end - self.start

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank does not compute, from 0 to 1."""
        whole = self.makespan
        return tuple(
            1 - math.fsum(s.end - s.start for s in spans) / whole if whole else 0.0 for spans in self.spans
        )

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute, from 0 to 1."""
        return math.fsum(self.bubbles) / len(self.spans) if self.spans else 0.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most micro-batches whose activations each rank holds at a time, counted for each of its stages.

        A rank holds them from the forward to the end of the backward, or of the gradient of weights if the backward
        is divided.
        """
        return tuple(_peak(spans) for spans in self.spans)

    def from_zero(self) -> Timeline:
        """Return the same timeline with the first action beginning at 0."""
        first = self.start
        moved = (tuple(Span(s.action, s.start - first, s.end - first) for s in spans) for spans in self.spans)
        return Timeline(self.name, tuple(moved))


def _peak(spans: Sequence[Span]) -> int:
    live = peak = 0
    for span in spans:
        live += span.action.kind is ActionKind.FORWARD
        peak = max(peak, live)
        live -= span.action.kind in _FREES
    return peak
