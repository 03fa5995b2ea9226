"""Who waits for whom, and who waits in vain.

A rank that is in a collective waits for the ranks of the group that have not called it yet; one that is at its end
waits for all that are not. It waits in vain if one of these never comes: because its process has ended or is
stopped, because it has closed the group, or because it waits in vain itself. So

    in vain := all ranks that wait
    again and again: leave out of it those that wait for nobody who is gone, stopped, out of the group, or in it

What is left cannot go on, whatever the others do (the knot of Chandy, Misra and Haas 1983). Ranks that compute,
ranks of other nodes, and a collective that all have called, however long its data takes, are never part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..record.reader import Condition, Operation, RankRecord
from ..record.writer import OPERATIONS, Phase

_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")


@dataclass(frozen=True)
class RankState:
    """State of a rank at one moment.

    Attributes:
        record: OwnRecord of the rank.
        condition: State of its process.
        phase: Phase of its program.
        latest: Number of its latest operation.
        operation: Operation of the record's `thread`; None outside of operations.
    """

    record: RankRecord
    condition: Condition
    phase: Phase
    latest: int
    operation: Operation | None

    @property
    def is_lost(self) -> bool:
        """Whether it does nothing any more."""
        return self.condition in (Condition.GONE, Condition.STOPPED)

    @property
    def is_ending(self) -> bool:
        """Whether its program has come to its end."""
        return self.phase is Phase.ENDING

    @property
    def waits(self) -> bool:
        """Whether it is in an operation, or at its end, and lives."""
        return not self.is_lost and (self.operation is not None or self.is_ending)

    def __str__(self) -> str:
        doing = "at the end of its program" if self.is_ending else "outside of all operations"
        if self.operation is not None and not self.is_ending:
            doing = f"in {self.operation.which}"
        elif self.phase not in (Phase.OTHER, Phase.ENDING):
            doing += f", in {self.phase.name.lower()}"
        return f"{self.condition.value}, {doing}" if self.condition is not Condition.LIVES else doing


def states_of(records: Iterable[RankRecord]) -> dict[int, RankState]:
    """Say where ranks are at this moment, by rank; local."""
    found = (
        RankState(record, record.condition(), record.phase, record.latest, record.current()) for record in records
    )
    return {state.record.rank: state for state in found}


def stuck_ranks(states: Mapping[int, RankState]) -> dict[int, set[int]]:
    """Return the ranks that wait in vain, and for whom each of them does; local.

    Args:
        states: Of the ranks of this node.
    """
    lost = {rank for rank, state in states.items() if state.is_lost}
    waits = {rank: awaited_by(rank, states) for rank, state in states.items() if state.waits}
    closed = {rank: closed_by(states[rank], states) for rank in waits}
    while True:
        never_come = lost | waits.keys()
        found = {rank: awaited & (never_come | closed[rank]) for rank, awaited in waits.items()}
        left = {rank: awaited for rank, awaited in found.items() if awaited}
        if len(left) == len(waits):
            return left
        waits = {rank: waits[rank] for rank in left}


def closed_by(own: RankState, states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks of this node that have closed the group in which a rank waits; local."""
    if own.operation is None or own.operation.group is None:
        return set()
    key = own.operation.group.key
    return {rank for rank, other in states.items() if (group := other.record.group(key)) and group.is_closed}


def awaited_by(rank: int, states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks of this node that a waiting rank waits for, and that have not come yet; local."""
    own = states[rank]
    if own.is_ending:
        return {other for other, state in states.items() if not state.is_ending}
    operation = own.operation
    if operation is None or operation.group is None or operation.group.gives_up:
        return set()
    return awaited_in(operation, own.record, states)


def awaited_in(operation: Operation, own: RankRecord, states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks of this node that have not done their part of an operation of a rank yet; local."""
    if operation.group is None:
        return set()
    if operation.call:
        return {other for other, state in states.items() if _keeps_waiting(operation, state)}
    peer = None if operation.peer is None else operation.group.world_rank(operation.peer)
    if peer is None or peer == own.rank or peer not in states or _is_met(operation, own, states[peer].record):
        return set()
    return {peer}


def _keeps_waiting(operation: Operation, other: RankState) -> bool:
    """Say whether a rank has not called a collective, or was lost in the middle of it."""
    assert operation.group is not None
    group = other.record.group(operation.group.key)
    if group is None:
        return False
    return group.count < operation.call or (group.count == operation.call and other.is_lost)


def _is_met(operation: Operation, own: RankRecord, other: RankRecord) -> bool:
    """Say whether the other end of a message has done its part, or may have: the records go back only so far."""
    if operation.name.startswith("stage"):
        return False  # counters in shared memory: if the other rank had come, this one would not wait
    mine, theirs = (_RECEIVES, _SENDS) if operation.name.endswith("recv") else (_SENDS, _RECEIVES)
    if max(own.latest, other.latest) >= OPERATIONS:
        return True
    return _messages(other, operation, theirs, own.rank) >= _messages(own, operation, mine, other.rank)


def _messages(record: RankRecord, like: Operation, names: Sequence[str], peer: int) -> int:
    """Count what a rank has sent to a peer, or received from it, with the group and the tag of an operation."""
    assert like.group is not None
    return sum(
        each.name in names
        and each.tag == like.tag
        and each.group is not None
        and each.group.key == like.group.key
        and each.peer is not None
        and each.group.world_rank(each.peer) == peer
        for each in record.operations()
    )
