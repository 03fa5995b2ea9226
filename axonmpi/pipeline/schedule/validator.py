"""Whether a schedule is right: complete, in order, and free of deadlock (without torch).

    complete    each stage does F and B, or F, I and W, once for each micro-batch, on its own rank, and each message
                between two ranks has one send and one receive
    in order    F before B or I, I before W, a send after what it sends, a receive before what needs it
    deadlock    every rank comes to the end of its list, whether sends wait for their receives or never do

Whoever writes a schedule of their own finds out here, before any rank hangs.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, ActionKind, Datum, Links, Schedule
from .grid import ScheduleError, fault
from .timeline import execute

__all__ = ["ScheduleError", "validate"]

_WHOLE, _HALVES = ActionKind.BACKWARD, (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def validate(schedule: Schedule) -> None:
    """Check a schedule; local.

    Raises:
        ScheduleError: Something is wrong. The message names rank, step, stage and micro-batch and shows the place.
        ValueError: The numbers of the schedule do not fit together: its ranks, stages, micro-batches or edges.
    """
    _check_numbers(schedule)
    places = _check_places(schedule)
    _check_complete(schedule, places)
    _check_order(schedule, places)
    try:
        execute(schedule, _one_step, 0.0, rendezvous=True)
    except ScheduleError:
        # what comes to its end where sends wait does so where they do not, too; else it is said which of them fails
        execute(schedule, _one_step, 0.0, rendezvous=False)
        raise


def _one_step(_: Action) -> float:
    return 1.0


def _check_numbers(schedule: Schedule) -> None:
    stages, ranks, micro_batches = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    if micro_batches < 1 or stages < 1:
        raise ValueError(f"expected at least 1 stage and 1 micro-batch, got {stages} and {micro_batches}")
    if set(schedule.placement) != set(range(ranks)):
        raise ValueError(f"placement: expected stages on all of {ranks} ranks, got {schedule.placement}")
    for edge in schedule.edges:
        if not 0 <= edge[0] < edge[1] < stages or schedule.edges.count(edge) > 1:
            raise ValueError(
                f"edges: expected different pairs of stages from 0 to {stages - 1}, the lower one first, "
                f"got {edge} in {schedule.edges}"
            )


def _check_places(schedule: Schedule) -> dict[Action, int]:
    """Check each action by itself: that it belongs to the schedule and to its rank. Return the step of each."""
    places: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            problem = _misplaced(schedule, rank, action)
            if action in places and not problem:
                problem = f"{action} is there twice, at step {places[action]} already"
            if problem:
                raise fault(schedule, rank, step, action, problem)
            places[action] = step
    return places


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    """Say why an action does not belong to a rank; empty if it does."""
    if not 0 <= action.stage < schedule.num_stages:
        return f"{action}: expected a stage from 0 to {schedule.num_stages - 1}"
    if not 0 <= action.micro_batch < schedule.num_microbatches:
        return f"{action}: expected a micro-batch from 0 to {schedule.num_microbatches - 1}"
    home = schedule.placement[action.stage]
    if home != rank:
        return f"{action} belongs to rank {home}, where stage {action.stage} lives"
    if action.kind.is_compute == (action.peer is None):
        return "" if action.kind.is_compute else _needless(schedule, action)
    return f"{action}: expected a peer for a transfer, and none for an action that computes"


def _needless(schedule: Schedule, action: Action) -> str:
    """Say why there is no message for a transfer to move; empty if there is one."""
    forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
    ends = (action.stage, action.peer) if forward else (action.peer, action.stage)
    if ends not in schedule.edges:
        return f"{action}: there is no edge between stages {action.stage} and {action.peer} in this direction"
    if len({schedule.placement[stage] for stage in ends if stage is not None}) == 1:
        return f"{action}: stages {action.stage} and {action.peer} live on one rank and need no message"
    return ""


def _check_complete(schedule: Schedule, places: dict[Action, int]) -> None:
    """Check that nothing is missing, and that no backward is both whole and divided."""
    for action in _expected(schedule, places):
        if action not in places:
            rank = schedule.placement[action.stage]
            raise fault(schedule, rank, len(schedule.actions[rank]), action, f"{action} is missing")
    for action, step in places.items():
        if action.kind in _HALVES and Action(_WHOLE, action.stage, action.micro_batch) in places:
            rank = schedule.placement[action.stage]
            raise fault(schedule, rank, step, action, f"{action}: the backward is there as a whole, too")


def _expected(schedule: Schedule, places: dict[Action, int]) -> Iterator[Action]:
    """Yield every action that has to be there."""
    for micro_batch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            yield Action(ActionKind.FORWARD, stage, micro_batch)
            halves = [Action(kind, stage, micro_batch) for kind in _HALVES]
            yield from halves if any(half in places for half in halves) else [Action(_WHOLE, stage, micro_batch)]
        for source, target in schedule.edges:
            if schedule.placement[source] != schedule.placement[target]:
                there = Action(ActionKind.SEND_FORWARD, source, micro_batch, target)
                back = Action(ActionKind.SEND_BACKWARD, target, micro_batch, source)
                yield from (there, there.counterpart(), back, back.counterpart())


def _check_order(schedule: Schedule, places: dict[Action, int]) -> None:
    """Check that each action comes after those of its own rank that it needs."""
    links = Links(schedule.num_stages, schedule.edges)
    makers = {action.makes: action for action in places}
    for action, step in places.items():
        for needed in _needed(schedule, links, makers, action):
            if places[needed] > step:
                rank = schedule.placement[action.stage]
                problem = f"{action} needs {needed} before it, which is at step {places[needed]}"
                raise fault(schedule, rank, step, action, problem)


def _needed(
    schedule: Schedule, links: Links, makers: dict[Datum | None, Action], action: Action
) -> Iterator[Action]:
    """Yield the actions of the same rank that have to come before an action."""
    if action.kind.is_send:
        yield makers[action.carries]
    elif action.kind.is_compute:
        for datum in links.needs(action):
            forward, maker, micro_batch = datum
            if schedule.placement[maker] == schedule.placement[action.stage]:
                yield makers[datum]
            else:
                kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
                yield Action(kind, action.stage, micro_batch, maker)
