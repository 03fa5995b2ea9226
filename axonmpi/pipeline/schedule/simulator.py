"""A simulation of schedules: time, waiting and memory of each rank (without torch).

    timeline = simulate(make_schedule(PipelineSchedule.ONE_F_ONE_B, num_ranks=4, num_microbatches=8))
    timeline.makespan            33.0               with forward 1 and backward 2
    timeline.bubble              0.2727...          3 / (8 + 3) of the ranks' time is waiting
    timeline.peak_activations    (4, 3, 2, 1)       micro-batches whose activations a rank holds

Each simulated rank performs its list in order. Posting a receive takes no time. An action that computes waits for
its data: outputs of other stages of the rank, and messages. A send takes no time either. Under *rendezvous* it
first waits until its receive is posted, as large messages of MPI may do; *eager* messages never wait.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...utils.arguments import check_flags
from .actions import Action, ActionKind, Datum, Schedule
from .schedule_error import fault
from .timeline import Span, Timeline

Cost = float | Sequence[float]
"""One time for all stages, or one for each."""


@dataclass(frozen=True)
class Costs:
    """The times of actions and messages, in any unit; for all stages, or [stages] for each.

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

    @classmethod
    def by_stage(cls, times: Mapping[tuple[ActionKind, int], float]) -> Costs:
        """Return costs from the time of each kind of action at each stage; 0 for times that are not given."""
        stages = range(1 + max((stage for _, stage in times), default=0))
        kinds = [kind for kind in ActionKind if kind.is_compute]
        costs: dict[str, Any] = {
            kind.name.lower(): tuple(times.get((kind, stage), 0.0) for stage in stages) for kind in kinds
        }
        return cls(**costs)

    def of(self, action: Action) -> float:
        """Return the time of an action that computes.

        Raises:
            ValueError: Times are given for each stage, and this one has none.
        """
        cost: Cost = getattr(self, action.kind.name.lower())
        if not isinstance(cost, Sequence):
            return cost
        if action.stage >= len(cost):
            raise ValueError(f"expected a time for each stage, got {len(cost)} times, but there is {action}")
        return cost[action.stage]


def measured_costs(timeline: Timeline) -> Costs:
    """Return the times of a real run: for each stage the median over its micro-batches. Local.

    A simulation with them shows the run without waiting for messages.
    """
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for span in (span for spans in timeline.spans for span in spans):
        times[span.action.kind, span.action.stage].append(span.end - span.start)
    return Costs.by_stage({key: statistics.median(measured) for key, measured in times.items()})


def simulate(schedule: Schedule, costs: Costs | None = None, rendezvous: bool = False) -> Timeline:
    """Compute the start and the end of each action of a schedule; local.

    Args:
        schedule: The schedule; the only check is that all ranks reach the end of their lists.
        costs: The times; None means forward 1, backward 2 or twice 1, messages 0.
        rendezvous: Whether a send waits until its receive is posted, as large messages may do.

    Raises:
        ScheduleError: Ranks wait for each other, or for an action that is missing.
        ValueError: Costs are given for each stage, but not for every one.
    """
    check_flags(rendezvous=rendezvous)
    simulation = _Simulation(schedule, costs or Costs(), rendezvous)
    ranks = range(schedule.num_ranks)
    while sum(simulation.advance(rank) for rank in ranks):
        pass
    simulation.check_ended()
    return Timeline(schedule.name, tuple(map(tuple, simulation.spans)))


class _Simulation:
    """The state of all ranks: their next steps, their clocks, and the times of their past actions.

    Attributes:
        spans: [ranks] the actions that each rank has computed.
    """

    def __init__(self, schedule: Schedule, costs: Costs, rendezvous: bool) -> None:
        self.spans: list[list[Span]] = [[] for _ in schedule.actions]
        self._schedule = schedule
        self._costs = costs
        self._rendezvous = rendezvous
        self._steps = [0] * schedule.num_ranks
        self._clocks = [0.0] * schedule.num_ranks
        self._made: dict[Datum | None, float] = {}
        self._posted: dict[Action, float] = {}
        self._arrived: dict[Action, float] = {}

    def advance(self, rank: int) -> bool:
        """Perform a rank's next actions up to one that cannot begin yet; return True if there were any."""
        actions, first = self._schedule.actions[rank], self._steps[rank]
        while self._steps[rank] < len(actions) and self._perform(rank, actions[self._steps[rank]]):
            self._steps[rank] += 1
        return self._steps[rank] > first

    def _perform(self, rank: int, action: Action) -> bool:
        start = max([self._clocks[rank], *self._conditions(action)])
        if start == math.inf:
            return False
        self._clocks[rank] = start
        if action.kind.is_compute:
            self._clocks[rank] = self._made[action.makes] = start + self._costs.of(action)
            self.spans[rank].append(Span(action, start, self._clocks[rank]))
        elif action.kind.is_receive:
            self._posted[action] = start
        else:
            self._arrived[action.counterpart()] = start + self._costs.transfer
        return True

    def _conditions(self, action: Action) -> Iterator[float]:
        """Yield the times before which an action cannot begin, infinity if it waits for a later action."""
        if action.kind.is_send:
            yield self._made.get(action.carries, math.inf)
            if self._rendezvous:
                yield self._posted.get(action.counterpart(), math.inf)
        elif action.kind.is_compute:
            for datum in self._schedule.needs(action):
                yield self._made.get(datum, math.inf)
            for receive in self._schedule.receives(action):
                yield self._posted.get(receive, math.inf)
                yield self._arrived.get(receive, math.inf)

    def check_ended(self) -> None:
        """Raise unless all ranks have reached the end of their lists.

        Raises:
            ScheduleError: Naming the ranks that wait for ever.
        """
        lists = enumerate(self._schedule.actions)
        stuck = {(rank, step): own[step] for rank, own in lists if (step := self._steps[rank]) < len(own)}
        if stuck:
            waiting = ", ".join(f"rank {rank} at step {step}, {action}" for (rank, step), action in stuck.items())
            messages = (
                "sends wait for their receives (rendezvous)" if self._rendezvous else "sends never wait (eager)"
            )
            raise fault(self._schedule, stuck, f"deadlock if {messages}: these wait for ever: {waiting}")
