"""What a schedule costs, without running it: time, waiting and memory (without torch).

    timeline = simulate(make_schedule(PipelineSchedule.ONE_F_ONE_B, num_ranks=4, num_microbatches=8))
    timeline.makespan            33.0               with forward 1 and backward 2
    timeline.bubble              0.2727...          3 / (8 + 3) of the ranks' time is waiting
    timeline.peak_activations    (4, 3, 2, 1)       micro-batches whose activations a rank holds

A `Timeline` is the same for a real run: its times are measured then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from ...utils.arguments import check_flags
from .actions import Action, ActionKind, Schedule
from .timeline import Span, execute

__all__ = ["Costs", "Span", "Timeline", "measured_costs", "simulate"]

Cost = float | Sequence[float]
"""One time for all stages, or one for each."""

_FREES = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Costs:
    """How long things take, in any unit; for all stages, or [stages] for each.

    Attributes:
        forward: The forward of one micro-batch through one stage.
        backward: Its backward, whole.
        backward_input: The gradient of its input alone.
        backward_weight: The gradient of its weights alone.
        transfer: A message between two ranks, from its send until its data can be used.

    Raises:
        ValueError: A time is negative or not finite.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            times = value if isinstance(value, Sequence) else (value,)
            if not all(math.isfinite(time) and time >= 0 for time in times):
                raise ValueError(f"{field.name}: expected times of at least 0, got {value}")

    def of(self, action: Action) -> float:
        """Return how long an action that computes takes.

        Raises:
            ValueError: Times are given for each stage, and this one has none.
        """
        cost = {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[action.kind]
        if not isinstance(cost, Sequence):
            return cost
        if action.stage >= len(cost):
            raise ValueError(f"expected a time for each stage, got {len(cost)} times, but there is {action}")
        return cost[action.stage]


@dataclass(frozen=True)
class Timeline:
    """When each rank does what.

    Attributes:
        name: For titles.
        spans: [ranks] the actions that compute, in the order of the rank.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def start(self) -> float:
        """When the first action begins."""
        return min((span.start for spans in self.spans for span in spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action ends."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the first begin to the last end."""
        return self.end - self.start

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan that each rank does not compute in, from 0 to 1."""
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

        They are held from the forward to the end of the backward, or of the gradient of weights where that is
        apart.
        """
        return tuple(_peak(spans) for spans in self.spans)


def measured_costs(timeline: Timeline) -> Costs:
    """Return how long things took in a real run: for each stage the median over its micro-batches. Local.

    Simulated with them, a schedule shows what the run would have been if no rank had waited for messages.
    """
    times: dict[tuple[ActionKind, int], list[float]] = {}
    for span in (span for spans in timeline.spans for span in spans):
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    stages = range(1 + max((stage for _, stage in times), default=0))

    def of(kind: ActionKind) -> tuple[float, ...]:
        return tuple(statistics.median(times.get((kind, stage), [0.0])) for stage in stages)

    return Costs(
        forward=of(ActionKind.FORWARD),
        backward=of(ActionKind.BACKWARD),
        backward_input=of(ActionKind.BACKWARD_INPUT),
        backward_weight=of(ActionKind.BACKWARD_WEIGHT),
    )


def _peak(spans: Sequence[Span]) -> int:
    live = peak = 0
    for span in spans:
        live += span.action.kind is ActionKind.FORWARD
        peak = max(peak, live)
        live -= span.action.kind in _FREES
    return peak


def simulate(schedule: Schedule, costs: Costs | None = None, rendezvous: bool = False) -> Timeline:
    """Compute when each action of a schedule begins and ends; local.

    Args:
        schedule: What the ranks do.
        costs: How long things take; None means forward 1, backward 2 or twice 1, messages 0.
        rendezvous: Whether a send waits until its receive is posted, as large messages may do.

    Raises:
        ScheduleError: Ranks would wait for ever.
        ValueError: Costs are given for each stage, but not for every one.
    """
    costs = costs or Costs()
    check_flags(rendezvous=rendezvous)
    return Timeline(schedule.name, execute(schedule, costs.of, costs.transfer, rendezvous))
