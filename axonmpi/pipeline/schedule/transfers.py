"""Sends and receives of a schedule: sends after what they carry, receives ahead of it (without torch).

    rank 0   F0.0 SF0.0>1 F0.1 SF0.1>1 RB0.0<1 RB0.1<1 B0.0 F0.2 SF0.2>1 RB0.2<1 B0.1 ...
    rank 1   RF1.0<0 RF1.1<0 F1.0 B1.0 SB1.0>0 RF1.2<0 F1.1 B1.1 SB1.1>0 RF1.3<0 F1.2 ...

A send directly follows the action that makes its data. A receive is only *posted* at its position in the list, and
waits for nothing: the action that needs the data does. If each action took one unit of time and messages took none,
every action would end at some *tick*. A receive is posted before the first action of its rank

* that ends no earlier than the tick at which the data are made, or
* that uses the previous message of the same edge and direction,

the earlier of the two. By the first rule no schedule can deadlock, even if every send blocks until its receive is
posted: in the order of ticks, each rank has posted the receive of every send before its own next action. By the
second rule the receive of an early message is posted. So at most two receives are posted and unused for each edge
and direction, or one more than the number of unused messages: over a skip connection, and if a rank runs one of its
stages for many micro-batches in a row.

Messages between two GPUs have no tags: a rank receives the messages of another rank in the order of the sends. If a
rank would post receives in another order, as with several stages on a rank, the receive of an earlier send is
posted together with the later one, ahead of its position. That only makes receives earlier, so no deadlock can
follow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .actions import Action, Datum, Schedule
from .simulator import Costs, simulate
from .timeline import Span

_ONE_TICK_EACH = Costs(forward=1, backward=1, backward_input=1, backward_weight=1)


def with_transfers(schedule: Schedule) -> Schedule:
    """Put sends and receives into a schedule that has none. Edges within a rank need none.

    Args:
        schedule: Its actions all compute.

    Returns:
        The same actions in the same order, with transfers between them; receives in the order of their sends.

    Raises:
        ScheduleError: Some actions can never begin, as they wait for each other or for a missing action.
    """
    without_messages = replace(schedule, placement=(0,) * schedule.num_stages)
    ticks = simulate(without_messages, _ONE_TICK_EACH).spans
    made = {span.action.makes: span.end for spans in ticks for span in spans}
    return in_order_of_sends(
        replace(schedule, actions=tuple(tuple(_merged(schedule, spans, made)) for spans in ticks))
    )


def _merged(schedule: Schedule, spans: Sequence[Span], made: Mapping[Datum | None, float]) -> Iterator[Action]:
    """Yield the actions of a rank, each after the receives before it and followed by its sends."""
    ends = [span.end for span in spans]
    posts: list[list[Action]] = [[] for _ in spans]
    used: dict[tuple[int, int], int] = {}
    for index, span in enumerate(spans):
        for receive in schedule.receives(span.action):
            ahead = bisect_left(ends, made[receive.carries])
            posts[min(index, ahead, used.get(receive.line, index))].append(receive)
            used[receive.line] = index
    for span, receives in zip(spans, posts, strict=True):
        yield from receives
        yield span.action
        yield from schedule.sends(span.action)


def in_order_of_sends(schedule: Schedule) -> Schedule:
    """Return a schedule whose receives from each rank are in the order of that rank's sends.

    Args:
        schedule: Each send has its receive.

    Returns:
        The schedule with some receives at earlier positions.
    """
    return replace(schedule, actions=tuple(tuple(_in_order(schedule, rank)) for rank in range(schedule.num_ranks)))


def _in_order(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield the actions of a rank, with receives from each rank in the order of its sends."""
    placement = schedule.placement
    left: defaultdict[int, deque[Action]] = defaultdict(deque)
    for source, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind.is_send and placement[action.line[1]] == rank:
                left[source].append(action.counterpart())
    posted = set[Action]()
    for action in schedule.actions[rank]:
        if not action.kind.is_receive:
            yield action
            continue
        arrivals = left[placement[action.line[0]]]
        while action not in posted:
            posted.add(arrivals[0])
            yield arrivals.popleft()
