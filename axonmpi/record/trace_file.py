"""A file of all finished operations of a rank, of its phases and of other spans: the record, kept for longer.

    page 0      the rank's identity, as JSON
    chunks      of 4,096 entries each, in the layout of the record's operations

While a rank is traced, each operation that ends is copied here from the rank's record, and phases and other spans
are added. The file is shared memory of the page cache: a process that is killed leaves all that it has written. A
file has at most 100 chunks (65 MB, 409,600 entries of 160 bytes); then the oldest chunk is written over.

An operation's entry has the group's key in place of its slot. A span has no group, -1; in that of a phase `nbytes`
is the time in nanoseconds that its thread had a core, -1 if unknown. Each chunk begins with entries named `group`,
the groups of the rank: `shape` is its rank, the size, the world rank of rank 0 and the step between world ranks.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .layout import OPERATION, OPERATION_BYTES, OPERATION_ENTRY, Phase, describe

if TYPE_CHECKING:
    from .writer import GroupLog

FILE_NAME = "rank-{}.trace"
PAGE = mmap.ALLOCATIONGRANULARITY
CHUNK_ENTRIES = 4096
CHUNK_BYTES = CHUNK_ENTRIES * OPERATION_BYTES
MOST_CHUNKS = 100
SPAN, GROUP = -1, b"group"
"""The group of a span, and the name of the entry of a group."""
_GROUP_AT = OPERATION_ENTRY.fields["group"][1] if OPERATION_ENTRY.fields else 0


class TraceFile:
    """The trace of one rank; made by `OwnRecord.begin_trace`.

    Args:
        folder: Existing folder of the traces of all ranks.
        identity: Identity of the rank, at least its `rank`.
        groups: The rank's groups.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], groups: Iterable[GroupLog]) -> None:
        self._file = os.open(
            folder / FILE_NAME.format(identity["rank"]), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        head = json.dumps({**identity, "thread": threading.get_ident()}).encode()
        assert len(head) <= PAGE, "the identity is longer than its page"
        os.pwrite(self._file, head.ljust(PAGE), 0)
        self._groups = groups
        self._take = itertools.count().__next__
        self._chunks: dict[int, memoryview] = {}
        self._lock = threading.RLock()
        self._has_room = True
        self._phase = (0, 0, 0, Phase.OTHER, "")  # its begin, its thread and the thread's time until then
        self._map(0)

    def keep(self, entry: bytes | memoryview, group: int) -> None:
        """Add an entry, of the group with a key; local."""
        chunk, row = divmod(self._take(), CHUNK_ENTRIES)
        view = self._chunks.get(chunk)
        if view is None:
            view = self._map(chunk)
            if view is None:
                return
        at = row * OPERATION_BYTES
        view[at : at + OPERATION_BYTES] = entry
        struct.pack_into("=q", view, at + _GROUP_AT, group)

    def keep_group(self, log: GroupLog) -> None:
        """Add the entry of a group; local."""
        self._keep_span(describe("group", shape=log.members), 0, 0, log.key)

    def _map(self, chunk: int) -> memoryview | None:
        """Return the memory of a chunk, new or written over; None without room for it."""
        with self._lock:
            if chunk in self._chunks or not self._has_room:
                return self._chunks.get(chunk)
            at = PAGE + chunk % MOST_CHUNKS * CHUNK_BYTES
            try:
                os.posix_fallocate(self._file, at, CHUNK_BYTES)  # or a write would be a bus error on a full disk
                self._chunks[chunk] = memoryview(mmap.mmap(self._file, CHUNK_BYTES, offset=at))
            except OSError as error:
                self._has_room = False
                warnings.warn(f"the trace of this rank ends here: {error}", RuntimeWarning, stacklevel=3)
                return None
            self._chunks.pop(chunk - 2, None)  # other threads may still write to the one before
            for log in list(self._groups):
                self.keep_group(log)
            return self._chunks[chunk]

    # ---- spans ------------------------------------------------------------------------------------------------

    def enter_phase(self, phase: Phase, label: str) -> None:
        """End the span of the phase before and begin another one; local.

        Args:
            phase: The phase that begins; OTHER has no span.
            label: Shown beside the phase, such as the action of a pipeline; at most 12 characters.
        """
        began, used, thread, before, shown = self._phase
        now, used_now, own = time.monotonic_ns(), time.thread_time_ns(), threading.get_ident()
        if before is not Phase.OTHER:
            cpu = used_now - used if thread == own else -1
            self._keep_span(describe(before.name.lower(), shown, nbytes=cpu), began, now)
        self._phase = (now, used_now, own, phase, label)

    def span(self, name: str, began: int, label: str = "", nbytes: int = -1) -> None:
        """Add a span that ends now; local.

        Args:
            name: At most 20 characters.
            began: Its begin, of `time.monotonic_ns()`.
            label: Shown beside the name; at most 12 characters.
            nbytes: Data that it handles; -1 if none.
        """
        self._keep_span(describe(name, label, nbytes=nbytes), began, time.monotonic_ns())

    def _keep_span(self, description: bytes, began: int, ended: int, group: int = SPAN) -> None:
        self.keep(OPERATION.pack(1, ended, began, began, threading.get_ident(), group, 0, 0, description, 1), group)

    def close(self) -> None:
        """End the phase, and close the file; local."""
        self.enter_phase(Phase.OTHER, "")
        with self._lock:
            self._has_room = False
            self._chunks = {}
        os.close(self._file)
