"""Records of ranks, read by any process of the same user: the ranks of this node, and their operations.

    for record in records_of(job):      one for each rank of the job on this node, in rank order
        record.rank, record.host        identity of the rank
        record.condition()              state of its process: lives, is stopped, has ended
        record.phase                    phase of its program
        record.current()                the operation of its main thread; None outside of operations
        record.operations()             the latest 2,048 operations, oldest first

Reading needs neither MPI nor an answer of the rank.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import ReduceOp
from ..utils.own_files import open_own
from ..utils.processes import namespace, traced_by
from .files import identity_of, living_process, record_files
from .layout import (
    GROUP_ENTRY,
    GROUPS,
    GROUPS_AT,
    OPERATION_ENTRY,
    OPERATIONS,
    OPERATIONS_AT,
    RECORD_BYTES,
    VERSION,
    Header,
    Phase,
)

SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
_WITH_DIM = ("all_gather", "reduce_scatter", "all_to_all")


class Condition(Enum):
    """State of a rank's process."""

    LIVES = "lives"
    STOPPED = "is stopped"
    TRACED = "is in a debugger"
    GONE = "has ended"
    UNKNOWN = "is unknown"


@dataclass(frozen=True)
class Group:
    """A group in a rank's record.

    Attributes:
        key: Key of the group: the same on all its ranks, and different from any other group's.
        count: Number of collectives that the rank has called in the group.
        rank: The rank's number in the group.
        size: Number of ranks of the group.
        first: World rank of the group's rank 0.
        step: Distance between the world ranks of consecutive ranks; 0 if it varies.
        gives_up: True if the group's operations raise after a timeout.
        is_closed: True if the rank has closed the group.
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
        """Return the world rank of a rank of the group; None if the record does not have it; local."""
        return self.first + self.step * rank if self.step or not rank else None

    @property
    def members(self) -> tuple[int, ...] | None:
        """World ranks of the group, in its order; None if the record does not have them."""
        return tuple(range(self.first, self.first + self.step * self.size, self.step)) if self.step else None

    def __str__(self) -> str:
        if (members := self.members) is None:
            return f"a group of {self.size} ranks"
        return f"the group of ranks {members[0]} to {members[-1]}" + (f" by {self.step}" if self.step != 1 else "")


@dataclass(frozen=True)
class Operation:
    """An operation that a rank has entered: a collective, a message, or a wait for either.

    Attributes:
        number: Number among the operations of the rank, from 1.
        name: Name of a method of `Backend`; or "wait" for a collective, "wait for isend", "wait for irecv", "stage
            send", "stage recv" (payloads of pipelines in shared memory), "end of program".
        group: Group of the operation; None without a group, or if the record has no room for the group.
        call: Number among the group's collectives, from 1, also of a wait for it; 0 for messages.
        dtype: Name of the dtype, empty without one.
        shape: The first four sizes; -1 for sizes that may differ between ranks.
        dims: Number of dimensions.
        op: The reduction.
        peer: Root, source or destination in the group; or the dimension, of operations that have one.
        tag: Tag of a message, else -1.
        nbytes: Bytes of the rank's tensor.
        entered: Time of the call, in nanoseconds of the node's monotonic clock.
        started: Time at which a queued operation started; 0 before that.
        left: Time of the end; None if unfinished.
        failed: True if it raised.
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
    def in_group(self) -> str:
        """The operation as text, with its number among the collectives of its group."""
        return f"{self}, collective {self.call} of {self.group}" if self.call else str(self)

    @property
    def _peer_word(self) -> str:
        if self.name in _WITH_DIM:
            return "dim"
        if self.name.endswith("send"):
            return "dst"
        return "src" if self.name.endswith("recv") else "root"


class RankRecord:
    """The record of one rank; attributes and methods read its present contents.

    Args:
        path: File of the record.

    Attributes:
        path: File of the record.
        identity: Identity of the rank, as `files.publish_record` has written it.
        job: Name of the job.
        rank: World rank.
        size: Number of ranks of the job.
        host: Name of the node.
        pid: Process number.

    Raises:
        OSError: There is no such file.
        ValueError: The file is no record, or has the layout of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: dict[str, Any] = identity_of(path)
        if not self.identity:
            raise ValueError(f"{path} is no record yet")
        file = open_own(path)
        try:
            memory = mmap.mmap(file, RECORD_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._words = np.frombuffer(memory, np.int64)
        self._groups = np.frombuffer(memory, GROUP_ENTRY, GROUPS, GROUPS_AT)
        self._operations = np.frombuffer(memory, OPERATION_ENTRY, OPERATIONS, OPERATIONS_AT)
        if self.word(Header.VERSION) != VERSION:
            raise ValueError(f"{path} is a record of another version of axonmpi")
        self.job: str = self.identity["job"]
        self.rank: int = self.identity["rank"]
        self.size: int = self.identity["size"]
        self.host: str = self.identity["host"]
        self.pid: int = self.identity["pid"]
        # Process numbers of another namespace, such as a container's, mean other processes here.
        self._is_visible = self.identity["namespace"] == namespace() != 0

    def word(self, index: Header) -> int:
        """Return a word of the header; local."""
        return int(self._words[index])

    @property
    def phase(self) -> Phase:
        """Phase of the program."""
        return Phase(self.word(Header.PHASE))

    @property
    def latest(self) -> int:
        """Number of the latest operation."""
        return self.word(Header.LATEST)

    @property
    def thread(self) -> int:
        """Id of the thread by which the rank is judged: the main thread, until it has ended."""
        return self.word(Header.THREAD)

    # ---- process ----------------------------------------------------------------------------------------------

    def condition(self) -> Condition:
        """Return the state of the rank's process; local."""
        if not self._is_visible:
            return Condition.UNKNOWN
        process = living_process(self.pid, self.identity["started"])
        if process is None:
            return Condition.GONE
        if process.state == "t" or traced_by(self.pid):
            return Condition.TRACED
        return Condition.STOPPED if process.state == "T" else Condition.LIVES

    def has_left(self) -> bool:
        """Return True if the process has ended before the end of its program; local."""
        if self.phase is Phase.ENDING or not self._is_visible:
            return False
        return living_process(self.pid, self.identity["started"]) is None

    # ---- groups -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Group]:
        """The open groups of the rank, oldest first."""
        return [group for group in map(self._group, range(GROUPS)) if group is not None and not group.is_closed]

    def group(self, key: int) -> Group | None:
        """Return a group of the rank, open or closed; None if the record does not have it; local."""
        slots = np.flatnonzero(self._groups["key"] == key)
        return self._group(int(slots[0])) if len(slots) else None

    def _group(self, slot: int) -> Group | None:
        if slot < 0:
            return None
        key, count, rank, size, first, step, gives_up, closed = self._groups[slot].tolist()
        return Group(key, count, rank, size, first, step, bool(gives_up), bool(closed)) if key else None

    # ---- operations -------------------------------------------------------------------------------------------

    def operations(self) -> list[Operation]:
        """Return the latest 2,048 operations, oldest first; local."""
        return self._read(self._operations.copy())

    def unfinished(self) -> list[Operation]:
        """Return the unfinished operations of all threads, oldest first; local."""
        return self._read(self._operations[np.flatnonzero(self._operations["left"] < 0)])

    def current(self) -> Operation | None:
        """Return the innermost operation of the thread by which the rank is judged; None outside; local."""
        thread = self.thread
        return next((each for each in reversed(self.unfinished()) if each.thread == thread), None)

    def _read(self, entries: NDArray[np.void]) -> list[Operation]:
        """Return the operations of entries, in order, without entries that are being written."""
        is_complete = (entries["number"] == entries["again"]) & (entries["number"] > 0)
        entries = entries[is_complete]
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


# ---- jobs -------------------------------------------------------------------------------------------------------


def _records() -> Iterator[RankRecord]:
    """Yield all records of this user on this node."""
    for path in record_files():
        if not path.suffix:
            try:
                yield RankRecord(path)
            except (OSError, ValueError):  # being made, or just removed
                continue


def job_names() -> list[str]:
    """Return the names of this user's jobs on this node, the latest first; local."""
    begun: dict[str, int] = {}
    for record in _records():
        begun[record.job] = max(begun.get(record.job, 0), record.path.stat().st_mtime_ns)
    return sorted(begun, key=lambda job: -begun[job])


def records_of(job: str) -> list[RankRecord]:
    """Return the records of a job's ranks on this node, in rank order; empty without such a job; local."""
    return sorted((record for record in _records() if record.job == job), key=lambda record: record.rank)


def describe_process(pid: int) -> str:
    """Describe the present or last operation of a process of this node; empty if it has no record; local."""
    record = next((record for record in _records() if record.pid == pid), None)
    if record is None:
        return ""
    operation = record.current()
    where = f"in {operation}" if operation is not None else "outside of all operations"
    phase = "" if record.phase in (Phase.OTHER, Phase.ENDING) else f" of its {record.phase.name.lower()} phase"
    ending = ", at the end of its program" if record.phase is Phase.ENDING else ""
    return f"rank {record.rank} of the job, on {record.host}, {where}{phase}{ending}"
