"""The record of this process, and the log that each of its groups writes there with plain stores."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

from .layout import (
    CLOSED,
    DESCRIPTION,
    GROUP_BYTES,
    GROUPS,
    GROUPS_AT,
    IDENTITY_AT,
    OPERATION,
    OPERATION_BYTES,
    OPERATIONS,
    OPERATIONS_AT,
    VERSION,
    Header,
)
from .trace_file import Groups, TraceFile

_LEFT = 1
"""Index of the word `left` in an entry. Writers know an entry by the position of this word, which they set last."""
_STARTED, _THREAD, _FAILED, _BYTES = 3 - _LEFT, 4 - _LEFT, 7 - _LEFT, 14 - _LEFT
_WORDS = OPERATION_BYTES // 8
_FIRST_WORD = OPERATIONS_AT // 8
_NO_GROUP = -1
_UNREAD = GROUPS_AT // 8 - GROUP_BYTES // 8
"""Position of the last words of the header, which nobody reads."""


class OwnRecord:
    """The record of this process, to write to.

    Args:
        memory: [RECORD_BYTES] zeros.
        path: File of the memory; None for memory of this process alone.

    Attributes:
        path: The file, or None.
        identity: Identity of the rank, empty before `sign`.
        words: The memory as 64-bit words.
        trace: The rank's trace; None if it is not traced.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        self.path = path
        self.identity: dict[str, Any] = {}
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.take_number = itertools.count(1).__next__
        self.trace: TraceFile | None = None
        self._next_group = itertools.count()
        self._logs: WeakSet[GroupLog] = WeakSet()

    def begin_trace(self, folder: Path, identity: dict[str, Any]) -> None:
        """Copy the operations of all groups into a trace from now on; local.

        Args:
            folder: Existing folder of the traces of all ranks.
            identity: Further fields of the identity, at least `rank`.

        Raises:
            OSError: The trace cannot be made.
        """
        self._set_trace(TraceFile(folder, {**self.identity, **identity}, self._groups))

    def end_trace(self) -> None:
        """Complete the trace, if there is one; local."""
        trace = self.trace
        self._set_trace(None)
        if trace is not None:
            trace.close()

    def _set_trace(self, trace: TraceFile | None) -> None:
        self.trace = trace
        for log in list(self._logs):
            log.trace(trace)

    def sign(self, identity: dict[str, Any]) -> None:
        """Write the identity of the rank, which makes the record readable; local, once."""
        self.identity = identity
        text = json.dumps(identity).encode()
        assert len(text) <= GROUPS_AT - IDENTITY_AT, "the identity is longer than a record has room for"
        self.memory[IDENTITY_AT : IDENTITY_AT + len(text)] = text
        self.words[Header.VERSION] = VERSION
        self.words[Header.THREAD] = threading.main_thread().ident or 0
        self.words[Header.IDENTITY_BYTES] = len(text)

    def join(
        self, rank: int, size: int, key: int, first: int = 0, step: int = 0, *, gives_up: bool = False
    ) -> GroupLog:
        """Add a group of this rank; local.

        Args:
            rank: This rank's number in the group.
            size: Number of ranks of the group.
            key: Key of the group, not 0: the same on all its ranks, and different from any other group's.
            first: World rank of the group's rank 0.
            step: Distance between the world ranks of consecutive ranks; 0 if it varies.
            gives_up: True if the group's operations raise after a timeout.
        """
        for _ in range(GROUPS):
            slot = next(self._next_group) % GROUPS
            at = (GROUPS_AT + slot * GROUP_BYTES) // 8
            if not self.words[at] or self.words[at + CLOSED]:
                self.words[at] = 0
                entry = struct.pack("=7q", 0, rank, size, first, step, gives_up, False)
                self.words[at + 1 : at + 8] = memoryview(entry).cast("q")
                self.words[at] = key
                return self._added(GroupLog(self, slot, at, (rank, size, first, step)))
        return GroupLog(self, _NO_GROUP, _UNREAD, (rank, size, first, step))

    def _added(self, log: GroupLog) -> GroupLog:
        self._logs.add(log)
        if self.trace is not None:
            self.trace.keep_groups()
            log.trace(self.trace)
        return log

    def _groups(self) -> Groups:
        return [(log.key, log.members) for log in list(self._logs)]

    @property
    def latest(self) -> int:
        """Number of the latest operation."""
        return self.words[Header.LATEST]

    def seconds_in_operations(self, after: int) -> float:
        """Return the time that this thread has spent in operations, its waits included; local.

        An operation within another counts once. Of more operations than the ring holds, the latest stand for all.

        Args:
            after: Number of the operation after which to begin.
        """
        nanoseconds = end = 0
        count = self.latest - after
        for number in range(max(after, self.latest - OPERATIONS) + 1, self.latest + 1):
            entry = OPERATIONS_AT + number % OPERATIONS * OPERATION_BYTES
            known_as, left, _, started, thread, *_ = OPERATION.unpack_from(self.memory, entry)
            if known_as == number and left > end and thread == threading.get_ident():
                nanoseconds += left - max(started, end)
                end = left
        return nanoseconds / 1e9 * max(1.0, count / OPERATIONS)

    def unfinished_of_others(self) -> list[tuple[str, int]]:
        """Return name and thread of each unfinished operation of a thread other than this one; local."""
        found = []
        for at in range(_FIRST_WORD, _FIRST_WORD + OPERATIONS * _WORDS, _WORDS):
            if self.words[at + _LEFT] < 0:
                thread, description = OPERATION.unpack_from(self.memory, 8 * at)[4:9:4]
                if thread != threading.get_ident():
                    found.append((DESCRIPTION.unpack(description)[0].rstrip(b"\0").decode(), thread))
        return found


class GroupLog:
    """The operations of this rank in one group; made by `OwnRecord.join`.

    Attributes:
        key: The group's key.
        members: This rank's number in the group, its size, the world rank of its rank 0, and the distance between
            the world ranks of consecutive ranks.
        enter: Adds an operation of the calling thread and returns the position of its entry; local.
            `enter(description)` is the group's next collective; `enter(description, number)` is another operation,
            which belongs to the collective of this number, or to none if it is 0.
        leave: Marks the operation at a position as finished; local.
    """

    def __init__(self, record: OwnRecord, slot: int, at: int, members: tuple[int, int, int, int]) -> None:
        self._words, self._at, self._memory = record.words, at, record.memory
        self.key, self.members = self._words[at], members
        self.enter, self._leave = _writers(record, slot, at + 1)
        self.leave = self._leave

    @property
    def count(self) -> int:
        """Number of collectives that this rank has called in the group."""
        return self._words[self._at + 1]

    def fail(self, at: int) -> None:
        """Mark an operation as finished with an error; local."""
        self._words[at + _FAILED] = 1
        self.leave(at)

    def set_bytes(self, at: int, nbytes: int) -> None:
        """Set the bytes of this rank's tensors, for calls whose description lacks them; local."""
        self._words[at + _BYTES] = nbytes

    def queue(self, at: int) -> None:
        """Mark an operation as queued for another thread; local."""
        self._words[at + _STARTED] = 0
        self._words[at + _THREAD] = 0

    def start(self, at: int) -> None:
        """Mark a queued operation as started by the calling thread; local."""
        self._words[at + _THREAD] = threading.get_ident()
        self._words[at + _STARTED] = time.monotonic_ns()

    @contextlib.contextmanager
    def noted(self, description: bytes, number: int = 0) -> Iterator[None]:
        """Log the `with` block as an operation; local."""
        at = self.enter(description, number)
        try:
            yield
        except BaseException:
            self.fail(at)
            raise
        self.leave(at)

    def close(self) -> None:
        """Mark the group as closed; local."""
        self._words[self._at + CLOSED] = 1

    def trace(self, trace: TraceFile | None) -> None:
        """Copy finished operations into a trace from now on, or into none; local."""
        self.leave = self._leave if trace is None else trace.leaver(self._memory, self.key)


def _writers(record: OwnRecord, slot: int, counter: int) -> tuple[Callable[..., int], Callable[[int], None]]:
    """Return the functions that write entries: closures, whose variables are found faster than attributes."""
    memory, words, take_number = record.memory, record.words, record.take_number
    pack, now, thread = OPERATION.pack_into, time.monotonic_ns, threading.get_ident
    latest, first_left, count = int(Header.LATEST), _FIRST_WORD + _LEFT, 0

    def enter(description: bytes, number: int | None = None) -> int:
        nonlocal count
        if number is None:
            number = count = words[counter] = count + 1
        mine = take_number()
        at = mine % OPERATIONS * _WORDS + first_left
        if words[at] < 0:
            mine, at = skip_unfinished(mine, at)
        moment = now()
        pack(memory, 8 * at - 8, mine, -1, moment, moment, thread(), slot, number, 0, description, mine)
        words[latest] = mine
        return at

    def skip_unfinished(mine: int, at: int) -> tuple[int, int]:
        """Find the next entry of a finished operation; if there is none, the oldest is overwritten."""
        for _ in range(OPERATIONS):
            mine = take_number()
            at = mine % OPERATIONS * _WORDS + first_left
            if words[at] >= 0:
                break
        return mine, at

    def leave(at: int) -> None:
        words[at] = now()

    return enter, leave


class NoLog:
    """A log that writes nothing, for mock ranks and for ranks alone; see `GroupLog`."""

    key = count = 0

    def enter(self, description: bytes, number: int | None = None) -> int:
        """Return a position that is not used."""
        return 0

    def leave(self, at: int) -> None:
        """Do nothing."""

    fail = queue = start = leave

    def set_bytes(self, at: int, nbytes: int) -> None:
        """Do nothing."""

    def noted(self, description: bytes, number: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Do nothing."""
