"""Checks that a schedule is complete, in order, and free of deadlock (without torch).

    complete    each stage does F and B, or F, I and W, once for each micro-batch, on its own rank, and each message
                between two ranks has one send and one receive
    in order    F before B or I, I before W, a send after what it sends, a receive before what needs it
    deadlock    every rank reaches the end of its list, with sends that wait for their receives, and with sends
                that never wait

The author of a schedule sees mistakes here, before any rank hangs.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, ActionKind, Datum, Schedule, check_edges
from .schedule_error import ScheduleError, fault
from .simulator import simulate

_WHOLE, _HALVES = ActionKind.BACKWARD, (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
Positions = dict[Action, tuple[int, int]]
"""The rank and the step of each action."""


def validate(schedule: Schedule) -> None:
    """Check a schedule; local.

    Raises:
        ScheduleError: Something is wrong. The message names rank, step, stage and micro-batch, with a picture.
        ValueError: The numbers of the schedule do not fit together: its ranks, stages, micro-batches or edges.
    """
    _check_numbers(schedule)
    positions = _checked_positions(schedule)
    _check_complete(schedule, positions)
    _check_order(schedule, positions)
    try:
        simulate(schedule, rendezvous=True)
    except ScheduleError:
        # A schedule that ends under rendezvous also ends with eager sends; of two deadlocks report the eager one.
        simulate(schedule)
        raise


def _check_numbers(schedule: Schedule) -> None:
    stages, ranks, micro_batches = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    if micro_batches < 1 or stages < 1:
        raise ValueError(f"expected at least 1 stage and 1 micro-batch, got {stages} and {micro_batches}")
    if set(schedule.placement) != set(range(ranks)):
        raise ValueError(f"placement: expected stages on all of {ranks} ranks, got {schedule.placement}")
    check_edges(schedule.edges, stages)


def _checked_positions(schedule: Schedule) -> Positions:
    """Check that each action belongs to the schedule and to its rank; return the position of each action."""
    positions: Positions = {}
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            problem = _misplaced(schedule, rank, action)
            if action in positions and not problem:
                problem = f"{action} is there twice, at step {positions[action][1]} already"
            if problem:
                raise fault(schedule, {(rank, step): action}, problem)
            positions[action] = rank, step
    return positions


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    """Return the reason that an action does not belong to a rank; empty if it does."""
    if not 0 <= action.stage < schedule.num_stages:
        return f"{action}: expected a stage from 0 to {schedule.num_stages - 1}"
    if not 0 <= action.micro_batch < schedule.num_microbatches:
        return f"{action}: expected a micro-batch from 0 to {schedule.num_microbatches - 1}"
    home = schedule.placement[action.stage]
    if home != rank:
        return f"{action} belongs to rank {home}, where stage {action.stage} lives"
    if action.kind.is_compute != (action.peer is None):
        return f"{action}: expected a peer for a transfer, and none for an action that computes"
    if action.peer is None:
        return ""
    forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
    edge = (action.stage, action.peer) if forward else (action.peer, action.stage)
    if edge not in schedule.edges:
        return f"{action}: there is no edge between stages {action.stage} and {action.peer} in this direction"
    if schedule.is_local(*edge):
        return f"{action}: stages {action.stage} and {action.peer} live on one rank and need no message"
    return ""


def _check_complete(schedule: Schedule, positions: Positions) -> None:
    """Check that nothing is missing, and that no backward is both whole and divided."""
    for action in _expected(schedule, positions):
        if action not in positions:
            rank = schedule.placement[action.stage]
            end = rank, len(schedule.actions[rank])
            raise fault(schedule, {end: action}, f"{action} is missing")
    for action, position in positions.items():
        if action.kind in _HALVES and Action(_WHOLE, action.stage, action.micro_batch) in positions:
            raise fault(schedule, {position: action}, f"{action}: the backward is there as a whole, too")


def _expected(schedule: Schedule, positions: Positions) -> Iterator[Action]:
    """Yield every action of a complete schedule."""
    for micro_batch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            halves = [Action(kind, stage, micro_batch) for kind in _HALVES]
            divided = any(half in positions for half in halves)
            backward = halves if divided else [Action(_WHOLE, stage, micro_batch)]
            for action in (Action(ActionKind.FORWARD, stage, micro_batch), *backward):
                yield action
                for send in schedule.sends(action):
                    yield from (send, send.counterpart())


def _check_order(schedule: Schedule, positions: Positions) -> None:
    """Check that each action follows the actions of its own rank that it needs."""
    makers = {action.makes: action for action in positions}
    for action, (rank, step) in positions.items():
        for needed in _needed(schedule, makers, action):
            if positions[needed][1] > step:
                problem = f"{action} needs {needed} before it, which is at step {positions[needed][1]}"
                raise fault(schedule, {(rank, step): action}, problem)


def _needed(schedule: Schedule, makers: dict[Datum | None, Action], action: Action) -> list[Action]:
    """Return the actions of the same rank that have to come before an action."""
    if action.kind.is_compute:
        return [*(makers[datum] for datum in schedule.needs(action)), *schedule.receives(action)]
    return [makers[action.carries]] if action.kind.is_send else []
