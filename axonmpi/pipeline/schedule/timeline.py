"""A schedule run in thought: when each action begins and ends, or where all ranks wait for ever.

Each rank goes through its list. Posting a receive takes no time. An action that computes waits for its data: what
another stage of the rank has made, or a message. A send hands its message over and takes no time either. Under
*rendezvous* it first waits until its receive is posted, as large messages of MPI may do; with *eager* messages it
never waits. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .actions import Action, Datum, Links, Schedule
from .grid import ScheduleError, grid

__all__ = ["Span", "execute"]


@dataclass(frozen=True)
class Span:
    """An action that computes, and when.

    Attributes:
        action: What is done.
        start: When it begins.
        end: When it ends, in the unit of the costs, or in seconds where it was measured.
    """

    action: Action
    start: float
    end: float


def execute(
    schedule: Schedule, duration: Callable[[Action], float], transfer: float, rendezvous: bool
) -> tuple[tuple[Span, ...], ...]:
    """Run a schedule in thought.

    Args:
        schedule: What to run; nothing is checked but that it comes to an end.
        duration: How long an action that computes takes.
        transfer: How long a message takes, from its send until its data can be used.
        rendezvous: Whether a send waits until its receive is posted.

    Returns:
        [ranks] when each action that computes begins and ends, in the order of the rank.

    Raises:
        ScheduleError: Ranks wait for each other, or for something that nobody does.
    """
    ranks = [_Rank(rank, actions) for rank, actions in enumerate(schedule.actions)]
    state = _State(schedule, duration, transfer, rendezvous)
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while rank.step < len(rank.actions) and state.advance(rank):
                rank.step += 1
                progress = True
    stuck = [rank for rank in ranks if rank.step < len(rank.actions)]
    if stuck:
        raise _deadlock(schedule, stuck, rendezvous)
    return tuple(tuple(rank.spans) for rank in ranks)


class _Rank:
    """How far a rank is: its next step, its clock, and what it has computed."""

    def __init__(self, number: int, actions: tuple[Action, ...]) -> None:
        self.number = number
        self.actions = actions
        self.step = 0
        self.clock = 0.0
        self.spans: list[Span] = []


class _State:
    """What has been made, posted and sent so far, and when."""

    def __init__(
        self, schedule: Schedule, duration: Callable[[Action], float], transfer: float, rendezvous: bool
    ) -> None:
        self._placement = schedule.placement
        self._links = Links(schedule.num_stages, schedule.edges)
        self._duration = duration
        self._transfer = transfer
        self._rendezvous = rendezvous
        self._made: dict[Datum, float] = {}
        self._posted: dict[tuple[Datum | None, int | None], float] = {}
        self._arrived: dict[tuple[Datum | None, int | None], float] = {}

    def advance(self, rank: _Rank) -> bool:
        """Do a rank's next action, if it can begin at some time."""
        action = rank.actions[rank.step]
        if action.kind.is_compute:
            return self._compute(rank, action)
        if action.kind.is_receive:
            self._posted[action.carries, action.stage] = rank.clock
            return True
        return self._send(rank, action)

    def _compute(self, rank: _Rank, action: Action) -> bool:
        start = rank.clock
        for datum in self._links.needs(action):
            local = self._placement[datum[1]] == rank.number
            message = datum, action.stage
            ready = self._made.get(datum) if local else self._arrived.get(message)
            if ready is None or not (local or message in self._posted):
                return False
            start = max(start, ready)
        rank.clock = start + self._duration(action)
        if action.makes is not None:
            self._made[action.makes] = rank.clock
        rank.spans.append(Span(action, start, rank.clock))
        return True

    def _send(self, rank: _Rank, action: Action) -> bool:
        message = action.carries, action.peer
        if action.carries not in self._made:
            return False
        if self._rendezvous:
            if message not in self._posted:
                return False
            rank.clock = max(rank.clock, self._posted[message])
        self._arrived[message] = rank.clock + self._transfer
        return True


def _deadlock(schedule: Schedule, stuck: list[_Rank], rendezvous: bool) -> ScheduleError:
    first = stuck[0]
    action = first.actions[first.step]
    waiting = ", ".join(f"rank {rank.number} at step {rank.step}, {rank.actions[rank.step]}" for rank in stuck)
    messages = "sends wait for their receives (rendezvous)" if rendezvous else "sends never wait (eager)"
    marks = {(rank.number, rank.step): f"[{rank.actions[rank.step]}]" for rank in stuck}
    return ScheduleError(
        f"{schedule.name}, rank {first.number}, step {first.step}, stage {action.stage}, "
        f"micro-batch {action.micro_batch}: deadlock where {messages}: these wait for ever: {waiting}\n"
        f"{grid(schedule, marks, first.step)}",
        first.number,
        first.step,
    )
