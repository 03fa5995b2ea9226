"""The record of a rank: what it does at this moment and what it did before, in memory that outlives it.

Each rank of a job has a file in a folder of its user under /dev/shm, which it has mapped, and writes there what it
enters and leaves with plain stores. Any process of the same user can read it, while the rank runs, hangs, is
stopped or is gone; `axonmpi.observe` does. One record is

    header      who the rank is, its phase, the number of its latest operation
    groups      for each group that it is in: the group's key, and how many collectives it has called there
    operations  a ring of the latest 2,048; one that is not over is never overwritten

A entry begins and ends with its number, which is written first and last: where the two differ, it is being
written. Operations that are not over tell where the rank is. A collective can only come to its end once all ranks
of the group, which has the same key on all of them, have called as many collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

Enter = Callable[..., int]
Leave = Callable[[int], None]


class Phase(IntEnum):
    """What a rank is about, as the parts of the library that know it say."""

    OTHER = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    ENDING = 6


class Header(IntEnum):
    """Words of the header, 8 bytes each.

    VERSION: version of the layout.
    IDENTITY_BYTES: length of the JSON text that identifies the rank.
    PHASE, PHASE_SINCE: phase of the program, and when it began.
    LATEST: number of the latest operation.
    STACKS_BY: signal at which the rank writes its stacks to a file; 0 for none.
    LOOKED: number of looks of the rank's watchdog.
    THREAD: thread by which the rank is judged: the main thread, or after its end a thread that Python waits for.
    """

    VERSION = 0
    IDENTITY_BYTES = 1
    PHASE = 2
    PHASE_SINCE = 3
    LATEST = 4
    STACKS_BY = 5
    LOOKED = 6
    THREAD = 7


# ---- the layout -------------------------------------------------------------------------------------------------

VERSION = 2
IDENTITY_AT = 512
GROUPS_AT = 4096
GROUPS, GROUP_BYTES = 256, 64
"""A group: key, collectives called, own rank, ranks, world rank of rank 0, distance of world ranks (0: none),
whether its operations give up by themselves, whether the rank has closed it: another group may take its place."""
_CLOSED = 7
OPERATIONS_AT = GROUPS_AT + GROUPS * GROUP_BYTES
OPERATIONS, OPERATION_BYTES = 2048, 160
RECORD_BYTES = OPERATIONS_AT + OPERATIONS * OPERATION_BYTES
SHAPE_SHOWN = 4
"""How many sizes of a shape a entry has."""

_OPERATION = struct.Struct("=8q88sq")
"""Number, left (-1: not over), entered, started, thread, group, collective, failed; description; number."""
_DESCRIPTION = struct.Struct("=20s12sbB2xii4xq4q")
"""Name, dtype, reduction, dimensions, peer, tag, bytes, shape."""
_LEFT = 1
"""Of a entry's words the one that is written last, by which entries are known to their writers."""
_STARTED, _THREAD, _FAILED = 3 - _LEFT, 4 - _LEFT, 7 - _LEFT
_WORDS = OPERATION_BYTES // 8
_FIRST_WORD = OPERATIONS_AT // 8
_NO_GROUP = -1


def describe(
    name: str,
    dtype: str = "",
    shape: tuple[int, ...] = (),
    op: int | None = None,
    peer: int | None = None,
    tag: int = -1,
    nbytes: int = 0,
) -> bytes:
    """Return the description of an operation, made once for all calls of its kind; local.

    Args:
        name: Of the operation.
        dtype: Name of the dtype, without `torch.`.
        shape: Of this rank's tensor; -1 where ranks may differ.
        op: Number of the reduction.
        peer: Root, source or destination in the group, or the dimension of an operation that has one.
        tag: Of a message.
        nbytes: Bytes of this rank's tensor.
    """
    sizes = (*shape[:SHAPE_SHOWN], *(0,) * SHAPE_SHOWN)[:SHAPE_SHOWN]
    return _DESCRIPTION.pack(
        name.encode(), dtype.encode(), -1 if op is None else op, min(len(shape), 255),
        -1 if peer is None else peer, tag, nbytes, *sizes,
    )  # fmt: skip


# ---- writing ----------------------------------------------------------------------------------------------------


class OwnRecord:
    """One rank's record, to write to.

    Args:
        memory: [RECORD_BYTES] zeros.

    Attributes:
        path: Its file; None of memory of the process itself.
        identity: Who the rank is.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        self.path = path
        self.identity: dict[str, Any] = {}
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.take_number = itertools.count(1).__next__
        self._groups = itertools.count()

    def sign(self, identity: dict[str, Any]) -> None:
        """Say whose record this is; local, once."""
        self.identity = identity
        text = json.dumps(identity).encode()
        assert len(text) <= GROUPS_AT - IDENTITY_AT, "a record has no room for so much"
        self.memory[IDENTITY_AT : IDENTITY_AT + len(text)] = text
        self.words[Header.VERSION] = VERSION
        self.words[Header.THREAD] = threading.main_thread().ident or 0
        self.words[Header.IDENTITY_BYTES] = len(text)

    def join(
        self, rank: int, size: int, key: int, first: int = 0, step: int = 0, *, gives_up: bool = False
    ) -> GroupLog:
        """Begin to note what this rank does in a group; local.

        Args:
            rank: This rank's number in it.
            size: How many ranks it has.
            key: The same on all ranks of the group, and on those of no other group; not 0.
            first: The world's number of its rank 0.
            step: The distance of the world's numbers of its ranks; 0 if they do not have one.
            gives_up: Whether its operations raise after some time.
        """
        for _ in range(GROUPS):
            slot = next(self._groups) % GROUPS
            at = (GROUPS_AT + slot * GROUP_BYTES) // 8
            if not self.words[at] or self.words[at + _CLOSED]:
                self.words[at] = 0
                entry = struct.pack("=7q", 0, rank, size, first, step, gives_up, False)
                self.words[at + 1 : at + 8] = memoryview(entry).cast("q")
                self.words[at] = key
                return GroupLog(self, slot, at)
        return GroupLog(self, _NO_GROUP, GROUPS_AT // 8 - 8)  # the last words of the header, which nobody reads

    def under_way(self) -> list[tuple[str, int]]:
        """Return the operations that are not over of all threads but this one, with their threads; local."""
        found = []
        for at in range(_FIRST_WORD, _FIRST_WORD + OPERATIONS * _WORDS, _WORDS):
            if self.words[at + _LEFT] < 0:
                thread, description = _OPERATION.unpack_from(self.memory, 8 * at)[4:9:4]
                if thread != threading.get_ident():
                    found.append((_DESCRIPTION.unpack(description)[0].rstrip(b"\0").decode(), thread))
        return found


class GroupLog:
    """What a rank does in one group; made by `OwnRecord.join`.

    Attributes:
        key: The group's key.
        enter: Notes that the calling thread enters an operation: `enter(description)` the group's next collective,
            `enter(description, number)` another one, which belongs to a collective of this number, or 0; local.
            Returns where its entry is.
        leave: Notes that the operation at a place is over; local.
    """

    def __init__(self, record: OwnRecord, slot: int, at: int) -> None:
        self._words, self._slot, self._at = record.words, slot, at
        self.key = self._words[at]
        self.enter, self.leave = _writers(record, slot, at + 1)

    @property
    def count(self) -> int:
        """How many collectives it has called."""
        return self._words[self._at + 1]

    def fail(self, at: int) -> None:
        """Note that an operation has raised; local."""
        self._words[at + _FAILED] = 1
        self.leave(at)

    def queue(self, at: int) -> None:
        """Note that the caller has gone on: another thread begins the operation later; local."""
        self._words[at + _STARTED] = 0
        self._words[at + _THREAD] = 0

    def start(self, at: int) -> None:
        """Note that the calling thread begins an operation that was queued; local."""
        self._words[at + _THREAD] = threading.get_ident()
        self._words[at + _STARTED] = time.monotonic_ns()

    @contextlib.contextmanager
    def noted(self, description: bytes, number: int = 0) -> Iterator[None]:
        """Note what the block does; local."""
        at = self.enter(description, number)
        try:
            yield
        except BaseException:
            self.fail(at)
            raise
        self.leave(at)

    def close(self) -> None:
        """Note that this rank is out of the group's reach; local."""
        if self._slot != _NO_GROUP:
            self._words[self._at + _CLOSED] = 1


def _writers(record: OwnRecord, slot: int, counter: int) -> tuple[Enter, Leave]:
    """Make the functions that write entries; variables of a function are found quicker than an object's."""
    memory, words, take_number = record.memory, record.words, record.take_number
    pack, now, thread = _OPERATION.pack_into, time.monotonic_ns, threading.get_ident
    latest, first_left, count = int(Header.LATEST), _FIRST_WORD + _LEFT, 0

    def enter(description: bytes, number: int | None = None) -> int:
        nonlocal count
        if number is None:
            number = count = words[counter] = count + 1
        mine = take_number()
        at = mine % OPERATIONS * _WORDS + first_left
        if words[at] < 0:
            mine, at = pass_over(mine, at)
        moment = now()
        pack(memory, 8 * at - 8, mine, -1, moment, moment, thread(), slot, number, 0, description, mine)
        words[latest] = mine
        return at

    def pass_over(mine: int, at: int) -> tuple[int, int]:
        """Pass over the entries of operations that are not over, unless all are such."""
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
    """In place of a log, where no other process waits for this one; see `GroupLog`."""

    key = count = 0

    def enter(self, description: bytes, number: int | None = None) -> int:
        """Note nothing."""
        return 0

    def leave(self, at: int) -> None:
        """Note nothing."""

    def fail(self, at: int) -> None:
        """Note nothing."""

    def queue(self, at: int) -> None:
        """Note nothing."""

    def start(self, at: int) -> None:
        """Note nothing."""

    def noted(self, description: bytes, number: int = 0) -> contextlib.AbstractContextManager[None]:
        """Note nothing."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Note nothing."""
