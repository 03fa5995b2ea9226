"""Where messages go in a schedule: sends after what they carry, receives ahead of it (without torch).

    rank 0   F0.0 SF0.0>1 F0.1 SF0.1>1 RB0.0<1 RB0.1<1 B0.0 F0.2 SF0.2>1 RB0.2<1 B0.1 ...
    rank 1   RF1.0<0 RF1.1<0 F1.0 B1.0 SB1.0>0 RF1.2<0 F1.1 B1.1 SB1.1>0 RF1.3<0 F1.2 ...

A send directly follows the action that made its data. A receive is only *posted* at its place in the list, and
waits for nothing: the action that needs the data does. If each action took one step and no message took time (the
*ideal steps*), every action would have a step at which it ends. A receive stands in front of the first action of
its rank

* that ends, in ideal steps, no earlier than the action that makes the data, or
* that uses the previous message of the same edge and direction,

whichever comes first. By the first rule no schedule can deadlock, even if every send blocks until its receive is
posted: taking all actions in the order of ideal steps, each rank has posted what a send needs before it goes on to
its own next action. By the second one a message that comes early finds its receive. So at most two receives are
posted and not yet used for each edge and direction, or one more than there are messages that have been made and are
not used yet: over a skip connection, and where a rank does one of its stages for many micro-batches in a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from .actions import Action, ActionKind, Datum, Links

__all__ = ["with_transfers"]


def with_transfers(
    placement: Sequence[int], compute_lists: Iterable[Iterable[Action]], edges: Iterable[tuple[int, int]]
) -> tuple[tuple[Action, ...], ...]:
    """Put sends and receives into lists of actions that compute. Edges within a rank need none.

    Args:
        placement: [stages] the rank of each stage.
        compute_lists: [ranks] what each rank computes, in order.
        edges: Pairs of stages, the lower one first, between which activations go forward and gradients back.

    Returns:
        [ranks] the same actions in the same order, with transfers between them.

    Raises:
        ValueError: Some actions can never begin, as they wait for each other or for one that is missing.
    """
    lists = [list(actions) for actions in compute_lists]
    links = Links(len(placement), edges)
    made, ends = _ideal_steps(lists, links)
    result = []
    for rank, actions in enumerate(lists):
        posts = _receives(actions, ends[rank], made, placement, links)
        result.append(tuple(_merged(actions, posts, placement, links)))
    return tuple(result)


def _ideal_steps(lists: Sequence[Sequence[Action]], links: Links) -> tuple[dict[Datum, int], list[list[int]]]:
    """Return the step at which each datum is made, and those at which each rank's actions end."""
    made: dict[Datum, int] = {}
    ends: list[list[int]] = [[] for _ in lists]
    for step in count():
        heads = [
            (own, actions[len(own)]) for own, actions in zip(ends, lists, strict=True) if len(own) < len(actions)
        ]
        if not heads:
            break
        ready = [(own, head) for own, head in heads if all(datum in made for datum in links.needs(head))]
        if not ready:
            stuck = ", ".join(str(head) for _, head in heads)
            raise ValueError(
                f"compute_lists: expected that every action can begin at some time, got stuck at {stuck}"
            )
        for own, head in ready:
            own.append(step)
            if head.makes is not None:
                made[head.makes] = step
    return made, ends


def _receives(
    actions: Sequence[Action], ends: Sequence[int], made: dict[Datum, int], placement: Sequence[int], links: Links
) -> list[list[Action]]:
    """Return the receives to post before each action of a rank."""
    posts: list[list[Action]] = [[] for _ in actions]
    used: dict[tuple[bool, int, int], int] = {}
    for position, action in enumerate(actions):
        for forward, maker, micro_batch in links.needs(action):
            if placement[maker] == placement[action.stage]:
                continue
            edge = forward, maker, action.stage
            ahead = bisect_left(ends, made[forward, maker, micro_batch])
            kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
            posts[min(position, ahead, used.get(edge, position))].append(
                Action(kind, action.stage, micro_batch, maker)
            )
            used[edge] = position
    return posts


def _merged(
    actions: Sequence[Action], posts: Sequence[Sequence[Action]], placement: Sequence[int], links: Links
) -> Iterator[Action]:
    """Yield the actions of a rank, each after the receives before it and followed by the sends of what it makes."""
    for action, receives in zip(actions, posts, strict=True):
        yield from receives
        yield action
        kind = ActionKind.SEND_FORWARD if action.kind is ActionKind.FORWARD else ActionKind.SEND_BACKWARD
        for receiver in links.receivers(action):
            if placement[receiver] != placement[action.stage]:
                yield Action(kind, action.stage, action.micro_batch, receiver)
