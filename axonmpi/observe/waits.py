"""The state of each rank at one moment, the ranks that each waits for, and those that can never go on.

A rank in a collective waits for the ranks of the group that have not called it yet; a rank at the end of its
program waits for all that are not. It is stuck if one of these never comes: because its process has ended or is
stopped, because it has closed the group, or because it is stuck itself. So

    stuck := all ranks that wait
    repeat: remove the ranks that wait for no rank that has ended, is stopped, has closed the group, or is in
    `stuck`

The remaining ranks cannot go on, whatever the others do (the knot of Chandy, Misra and Haas 1983). Ranks that
compute, ranks of other nodes, and a collective that all ranks have called, however long its data takes, never make
a rank stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..record.layout import OPERATIONS, Phase
from ..record.reader import RECEIVES, SENDS, Condition, Operation, RankRecord


@dataclass(frozen=True)
class RankState:
    """State of a rank at one moment.

    Attributes:
        record: The rank's record.
        condition: State of its process.
        phase: Phase of its program.
        latest: Number of its latest operation.
        operation: The operation that it is in; None outside of operations.
    """

    record: RankRecord
    condition: Condition
    phase: Phase
    latest: int
    operation: Operation | None

    @classmethod
    def of(cls, record: RankRecord, condition: Condition | None = None) -> RankState:
        """Return the present state of a rank; local.

        Args:
            record: The rank's record.
            condition: State of its process; None asks the system.
        """
        return cls(record, condition or record.condition(), record.phase, record.latest, record.current())

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended or is stopped."""
        return self.condition in (Condition.GONE, Condition.STOPPED)

    @property
    def is_ending(self) -> bool:
        """Whether its program has ended."""
        return self.phase is Phase.ENDING

    @property
    def waits(self) -> bool:
        """Whether it is in an operation or at the end of its program, and not lost."""
        return not self.is_lost and (self.operation is not None or self.is_ending)

    def __str__(self) -> str:
        doing = "at the end of its program" if self.is_ending else "outside of all operations"
        if self.operation is not None and not self.is_ending:
            doing = f"in {self.operation.in_group}"
        elif self.phase not in (Phase.OTHER, Phase.ENDING):
            doing += f", in {self.phase.name.lower()}"
        return f"{self.condition.value}, {doing}" if self.condition is not Condition.LIVES else doing


def states_of(records: Iterable[RankRecord]) -> dict[int, RankState]:
    """Return the present states of ranks, by rank; local."""
    return {record.rank: RankState.of(record) for record in records}


def stuck_ranks(states: Mapping[int, RankState]) -> dict[int, set[int]]:
    """Return the stuck ranks, each with the ranks that never come; local.

    Args:
        states: States of the ranks of this node.
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
    """Return the ranks of this node that a waiting rank waits for; local."""
    own = states[rank]
    if own.is_ending:
        return {other for other, state in states.items() if not state.is_ending}
    operation = own.operation
    if operation is None or operation.group is None or operation.group.gives_up:
        return set()
    return awaited_in(operation, own.record, states)


def awaited_in(operation: Operation, own: RankRecord, states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks of this node that have not called their part of a rank's operation; local."""
    if operation.group is None:
        return set()
    if operation.call:
        return {other for other, state in states.items() if _is_missing(operation, state)}
    peer = None if operation.peer is None else operation.group.world_rank(operation.peer)
    if peer is None or peer == own.rank or peer not in states or _is_met(operation, own, states[peer].record):
        return set()
    return {peer}


def _is_missing(operation: Operation, other: RankState) -> bool:
    """Return True if a rank has not called a collective, or is lost in the middle of it."""
    assert operation.group is not None
    group = other.record.group(operation.group.key)
    if group is None:
        return False
    return group.count < operation.call or (group.count == operation.call and other.is_lost)


def _is_met(operation: Operation, own: RankRecord, other: RankRecord) -> bool:
    """Return True if the peer of a message has called its part, or may have, before its record begins."""
    if operation.name.startswith("stage"):
        return False  # stages wait on shared counters, which the peer has not advanced yet
    mine, theirs = (RECEIVES, SENDS) if operation.name.endswith("recv") else (SENDS, RECEIVES)
    if max(own.latest, other.latest) >= OPERATIONS:
        return True
    return _count_messages(other, operation, theirs, own.rank) >= _count_messages(own, operation, mine, other.rank)


def _count_messages(record: RankRecord, like: Operation, names: Sequence[str], peer: int) -> int:
    """Count a rank's sends to a peer, or receives from it, with the group and tag of an operation."""
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
