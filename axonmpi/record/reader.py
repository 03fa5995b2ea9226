"""Reading the records of ranks: who runs on this node, and what each rank does and did.

    for record in records_of(job):          one for each rank of the job on this node, in rank order
        record.rank, record.host            who it is
        record.condition()                whether its process lives, is stopped or gone
        record.phase                      what it is about
        record.current()                  the operation that its main thread is in; None: it is outside of all
        record.operations()               the latest 2,048, the oldest first

Nothing here needs MPI, or an answer of the rank that is looked at. The layout is `launch.board`'s.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import ReduceOp
from ..utils.own_files import open_own
from ..utils.processes import namespace, process, traced_by
from .files import identity_of, record_files
from .writer import (
    GROUP_BYTES,
    GROUPS,
    GROUPS_AT,
    OPERATION_BYTES,
    OPERATIONS,
    OPERATIONS_AT,
    RECORD_BYTES,
    SHAPE_SHOWN,
    VERSION,
    Header,
    Phase,
)

_ENTRY = np.dtype(
    [
        ("number", "i8"), ("left", "i8"), ("entered", "i8"), ("started", "i8"), ("thread", "i8"), ("group", "i8"),
        ("call", "i8"), ("failed", "i8"), ("name", "S20"), ("dtype", "S12"), ("op", "i1"), ("dims", "u1"),
        ("_", "V2"), ("peer", "i4"), ("tag", "i4"), ("__", "V4"), ("nbytes", "i8"), ("shape", "i8", SHAPE_SHOWN),
        ("again", "i8"),
    ]
)  # fmt: skip
_GROUP = np.dtype(
    [(name, "i8") for name in ("key", "count", "rank", "size", "first", "step", "gives_up", "closed")]
)
assert (_ENTRY.itemsize, _GROUP.itemsize) == (OPERATION_BYTES, GROUP_BYTES)

_WITH_DIM = ("all_gather", "reduce_scatter", "all_to_all")


class Condition(Enum):
    """What has become of a rank's process."""

    LIVES = "lives"
    STOPPED = "is stopped"
    TRACED = "is in a debugger"
    GONE = "has ended"
    UNKNOWN = "is unknown"


@dataclass(frozen=True)
class Group:
    """A group that a rank is in, or was in.

    Attributes:
        key: The same on all ranks of the group, and on those of no other one.
        count: How many collectives the rank has called in it.
        rank: The rank's number in the group.
        size: How many ranks the group has.
        first: The world's number of its rank 0.
        step: The distance of the world's numbers of its ranks; 0 if they have no common one.
        gives_up: Whether its operations raise after some time, because it has a time-out.
        is_closed: Whether the rank has closed it.
    """

    key: int
    count: int
    rank: int
    size: int
    first: int
    step: int
    gives_up: bool
    is_closed: bool = False

    def world_rank(self, rank: int) -> int | None:
        """Return the world's number of a rank of the group; None where the record does not say; local."""
        return self.first + self.step * rank if self.step or not rank else None

    @property
    def members(self) -> tuple[int, ...] | None:
        """The world's numbers of its ranks, in its order; None where the record does not say."""
        return tuple(range(self.first, self.first + self.step * self.size, self.step)) if self.step else None

    def __str__(self) -> str:
        if (members := self.members) is None:
            return f"a group of {self.size} ranks"
        return f"the group of ranks {members[0]} to {members[-1]}" + (f" by {self.step}" if self.step != 1 else "")


@dataclass(frozen=True)
class Operation:
    """What a rank has entered: a collective, a message, or a wait for one of them.

    Attributes:
        number: Counts the operations of the rank, from 1.
        name: As the methods of `Backend`; or "wait" for a collective, "wait for isend", "wait for irecv", "stage
            send", "stage recv" (payloads of pipelines in shared memory), "end of program".
        group: Where; None for one of no group, or of more groups than a record has room for.
        call: Which of the group's collectives it is or waits for, from 1; 0 for messages.
        dtype: Name of the dtype, empty where there is none.
        shape: The first four sizes; -1 where ranks may differ.
        dims: How many sizes the shape has.
        op: The reduction.
        peer: Root, source or destination in the group; the dimension, of operations that have one.
        tag: Of a message; -1 if there is none.
        nbytes: Bytes of the rank's tensor.
        entered: When it was called, in nanoseconds of the node's monotonic clock.
        started: When it began, where it had been queued; 0 if it has not begun.
        left: When it was over; None if it is not.
        failed: Whether it raised.
        thread: `threading.get_ident()` of the thread that runs it, 0 while it is queued.
    """

    number: int
    name: str
    group: Group | None
    call: int
    dtype: str
    shape: tuple[int, ...]
    dims: int
    op: ReduceOp | None
    peer: int | None
    tag: int
    nbytes: int
    entered: int
    started: int
    left: int | None
    failed: bool
    thread: int

    def __str__(self) -> str:
        parts = []
        if self.dtype:
            sizes = ["*" if size < 0 else str(size) for size in self.shape]
            parts.append(f"{self.dtype} [{', '.join([*sizes, '...'][: self.dims])}]")
        if self.op is not None:
            parts.append(self.op.name)
        if self.peer is not None:
            parts.append(f"{self._peer_word}={self.peer}")
        if self.tag > 0:
            parts.append(f"tag={self.tag}")
        if self.name == "wait" and self.call:
            parts.append(f"for collective {self.call}")
        return f"{self.name}({', '.join(parts)})"

    @property
    def which(self) -> str:
        """The operation, with its number among the collectives of its group."""
        return f"{self}, collective {self.call} of {self.group}" if self.call else str(self)

    @property
    def _peer_word(self) -> str:
        if self.name in _WITH_DIM:
            return "dim"
        if self.name.endswith("send"):
            return "dst"
        return "src" if self.name.endswith("recv") else "root"


class RankRecord:
    """The record of one rank; what is asked is read at that moment.

    Args:
        path: Its file.

    Attributes:
        path: The same.
        identity: All that the rank has said of itself.
        job: Name of its job.
        rank: Its number in the job.
        size: Ranks of the job.
        host: Name of its node.
        pid: Its process.

    Raises:
        OSError: There is no such file.
        ValueError: It is no record, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: dict[str, Any] = identity_of(path)
        if not self.identity:
            raise ValueError(f"{path} is no record yet")
        file = open_own(path)
        try:
            self._memory = mmap.mmap(file, RECORD_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._words = np.frombuffer(self._memory, np.int64)
        self._groups = np.frombuffer(self._memory, _GROUP, GROUPS, GROUPS_AT)
        self._entries = np.frombuffer(self._memory, _ENTRY, OPERATIONS, OPERATIONS_AT)
        if self._words[Header.VERSION] != VERSION:
            raise ValueError(f"{path} is a record of another version of axonmpi")
        self.job: str = self.identity["job"]
        self.rank: int = self.identity["rank"]
        self.size: int = self.identity["size"]
        self.host: str = self.identity["host"]
        self.pid: int = self.identity["pid"]

    @property
    def phase(self) -> Phase:
        """What the rank is about."""
        return Phase(int(self._words[Header.PHASE]))

    @property
    def latest(self) -> int:
        """The number of its latest operation: it grows with every call."""
        return int(self._words[Header.LATEST])

    @property
    def stacks_by(self) -> int:
        """The signal at which it writes its stacks down, see `stacks`; 0: it does not."""
        return int(self._words[Header.STACKS_BY])

    @property
    def looked(self) -> int:
        """How often its watchdog has looked."""
        return int(self._words[Header.LOOKED])

    @property
    def thread(self) -> int:
        """The thread in whose operations the program waits: the main thread until that has ended."""
        return int(self._words[Header.THREAD])

    @property
    def groups(self) -> list[Group]:
        """The groups that it is in, the oldest first."""
        return [group for group in map(self._group, range(GROUPS)) if group is not None and not group.is_closed]

    def _group(self, slot: int) -> Group | None:
        if slot < 0:
            return None
        key, count, rank, size, first, step, gives_up, closed = self._groups[slot].tolist()
        return Group(key, count, rank, size, first, step, bool(gives_up), bool(closed)) if key else None

    def group(self, key: int) -> Group | None:
        """Return a group that it is in, or was in as far as the record goes back."""
        slots = np.flatnonzero(self._groups["key"] == key)
        return self._group(int(slots[0])) if len(slots) else None

    @cached_property
    def _can_be_seen(self) -> bool:
        """Whether its process number is one of this process's namespace."""
        return bool(self.identity["namespace"] == namespace() and self.identity["namespace"])

    def condition(self) -> Condition:
        """Return what the system says of its process."""
        if not self._can_be_seen:
            return Condition.UNKNOWN
        found = process(self.pid)
        if found is None or found.started != self.identity["started"] or found.has_ended:
            return Condition.GONE
        if found.state == "t" or traced_by(self.pid):
            return Condition.TRACED
        return Condition.STOPPED if found.is_stopped else Condition.LIVES

    def has_left(self) -> bool:
        """Say whether its process has ended before its program had come to its end."""
        if self.phase is Phase.ENDING or not self._can_be_seen:
            return False
        found = process(self.pid)
        return found is None or found.has_ended

    # ---- operations -------------------------------------------------------------------------------------------

    def operations(self) -> list[Operation]:
        """Return the latest 2,048, the oldest first, but for such as are being written."""
        return self._read(self._entries.copy())

    def unfinished(self) -> list[Operation]:
        """Return the operations that are not over, of all threads, the oldest first."""
        return self._read(self._entries[np.flatnonzero(self._entries["left"] < 0)])

    def current(self) -> Operation | None:
        """Return the innermost operation that its `thread` is in; None if that is outside of all."""
        thread = self.thread
        return next((each for each in reversed(self.unfinished()) if each.thread == thread), None)

    def _read(self, entries: NDArray[np.void]) -> list[Operation]:
        whole = (entries["number"] == entries["again"]) & (entries["number"] > 0)
        entries = entries[whole]
        return [self._operation(entry) for entry in entries[np.argsort(entries["number"])]]

    def _operation(self, entry: np.void) -> Operation:
        op, peer, left = int(entry["op"]), int(entry["peer"]), int(entry["left"])
        return Operation(
            number=int(entry["number"]),
            name=entry["name"].decode(),
            group=self._group(int(entry["group"])),
            call=int(entry["call"]),
            dtype=entry["dtype"].decode(),
            shape=tuple(entry["shape"].tolist()[: int(entry["dims"])]),
            dims=int(entry["dims"]),
            op=None if op < 0 else ReduceOp(op),
            peer=None if peer < 0 else peer,
            tag=int(entry["tag"]),
            nbytes=int(entry["nbytes"]),
            entered=int(entry["entered"]),
            started=int(entry["started"]),
            left=None if left < 0 else left,
            failed=bool(entry["failed"]),
            thread=int(entry["thread"]),
        )


# ---- finding records ----------------------------------------------------------------------------------------------


def _records() -> Iterator[RankRecord]:
    """All records of this user on this node."""
    for path in record_files():
        if not path.suffix:
            try:
                yield RankRecord(path)
            except (OSError, ValueError):  # it is being made, or has just been removed
                continue


def job_names() -> list[str]:
    """Return the names of this user's jobs on this node, the latest first; local."""
    begun: dict[str, int] = {}
    for record in _records():
        begun[record.job] = max(begun.get(record.job, 0), record.path.stat().st_mtime_ns)
    return sorted(begun, key=lambda job: -begun[job])


def records_of(job: str) -> list[RankRecord]:
    """Return the records of a job's ranks on this node, in rank order; empty if there is no such job; local."""
    return sorted((record for record in _records() if record.job == job), key=lambda record: record.rank)


def describe_process(pid: int) -> str:
    """Say what a process of this node is doing, or did when it ended; empty if it has no record; local."""
    record = next((record for record in _records() if record.pid == pid), None)
    if record is None:
        return ""
    operation = record.current()
    place = f"in {operation}" if operation is not None else "outside of all operations"
    phase = "" if record.phase in (Phase.OTHER, Phase.ENDING) else f" of its {record.phase.name.lower()} phase"
    ending = ", at the end of its program" if record.phase is Phase.ENDING else ""
    return f"rank {record.rank} of the job, on {record.host}, {place}{phase}{ending}"


def page_of_process(pid: int) -> RankRecord | None:
    """Return the record of a process that lives; None if it is no rank; local."""
    alive = (record for record in _records() if record.pid == pid and record.condition() is not Condition.GONE)
    return next(alive, None)
