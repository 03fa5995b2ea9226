"""Where each rank of a job is at one moment: plain values, made of a page, that can be sent and kept as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..utils.processes import age
from .board import Condition, Group, Operation, RankPage

__all__ = ["RankState", "read_states", "state_of"]


@dataclass(frozen=True)
class RankState:
    """Where a rank is.

    Attributes:
        rank: Its number in the job.
        host: Name of its node.
        pid: Its process.
        number: How many operations it has begun: it grows as long as the rank goes on.
        condition: The value of its `Condition`.
        phase: What it is about, such as "forward"; empty where nothing says so.
        name: Name of the operation that its main thread is in; empty if it is outside of all.
        operation: The same with its arguments.
        group: Key of the operation's group; 0 if there is none.
        group_text: That group in words.
        group_size: How many ranks it has.
        call: Which of the group's collectives the operation is or waits for, from 1; 0 for messages.
        peer: The other rank of a message, by its number in the group.
        seconds: How long it has been in the operation, or since the latest one was over.
        latest: The operation that was over last; empty if none was.
        counts: How many collectives it has called in each group, by the group's key.
        ranks: Its number in each group, by the group's key.
        site: Where its program is, as "train.py:12 in step"; empty where its stack is not known.
    """

    rank: int
    host: str
    pid: int
    number: int
    condition: str
    phase: str = ""
    name: str = ""
    operation: str = ""
    group: int = 0
    group_text: str = ""
    group_size: int = 0
    call: int = 0
    peer: int | None = None
    seconds: float = 0.0
    latest: str = ""
    counts: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    site: str = ""

    @property
    def runs(self) -> bool:
        """Whether its process goes on, as far as anybody can say."""
        return self.condition in (Condition.LIVES.value, Condition.UNKNOWN.value)

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankState:
        """Return what `as_json` was called on."""
        by_key = {name: {int(key): value for key, value in values[name].items()} for name in ("counts", "ranks")}
        return cls(**{**values, **by_key})


def read_states(pages: Iterable[RankPage]) -> list[RankState]:
    """Return where the ranks of some pages are; local."""
    return [state_of(page) for page in pages]


def state_of(page: RankPage) -> RankState:
    """Return where the rank of a page is; local."""
    now = time.monotonic_ns()
    current = page.current()
    over = [each for each in page.operations() if each.left is not None]
    latest = max(over, key=lambda each: each.left or 0, default=None)
    if current is not None:
        seconds = (now - current.entered) / 1e9
    elif latest is not None and latest.left is not None:
        seconds = (now - latest.left) / 1e9
    else:
        seconds = age(page.identity["started"])
    groups = page.groups
    return RankState(
        rank=page.rank,
        host=page.host,
        pid=page.pid,
        number=page.latest,
        condition=page.condition().value,
        phase=page.phase.name.lower().replace("_", " ") if page.phase else "",
        seconds=max(0.0, seconds),
        latest="" if latest is None else str(latest),
        counts={group.key: group.count for group in groups},
        ranks={group.key: group.rank for group in groups},
        **({} if current is None else _of(current, groups)),
    )


def _of(operation: Operation, groups: Sequence[Group]) -> dict[str, Any]:
    group = operation.group
    place: dict[str, Any] = {}
    if group is not None:
        place = {"group": group.key, "group_text": _text_of(group, groups), "group_size": group.size}
    is_message = operation.call == 0 and operation.peer is not None
    return {
        "name": operation.name,
        "operation": str(operation),
        "call": operation.call,
        "peer": operation.peer if is_message else None,
        **place,
    }


def _text_of(group: Group, groups: Sequence[Group]) -> str:
    """Return a group in words, which tell it from others of the same ranks: all made them in one order."""
    alike = [each.key for each in groups if str(each) == str(group)]
    return str(group) if len(alike) < 2 else f"{group}, number {alike.index(group.key) + 1} of {len(alike)} such"
