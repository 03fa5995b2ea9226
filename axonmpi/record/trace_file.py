"""A file of all finished operations of a rank, of its phases and of other spans: the record, kept for longer.

    head        64 KiB: the rank's identity, as JSON
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .layout import OPERATION, OPERATION_BYTES, Phase, describe

Groups = list[tuple[int, tuple[int, int, int, int]]]
FILE_NAME = "rank-{}.trace"
PAGE = 1 << 16
"""Bytes of the largest page of any machine, as another one may read the file."""
CHUNK_ENTRIES = 4096
CHUNK_BYTES = CHUNK_ENTRIES * OPERATION_BYTES
MOST_CHUNKS = 100
SPAN, GROUP = -1, b"group"
"""The group of a span, and the name of the entry of a group."""
_WORDS, _GROUP = OPERATION_BYTES // 8, 5
"""Words of an entry, and the index of its group."""


class TraceFile:
    """The trace of one rank; made by `OwnRecord.begin_trace`.

    Args:
        folder: Existing folder of the traces of all ranks.
        identity: Identity of the rank, at least its `rank`.
        groups: Returns the key of each of the rank's groups, with its rank, size, first rank and step.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], groups: Callable[[], Groups]) -> None:
        self._file = os.open(
            folder / FILE_NAME.format(identity["rank"]), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        head = json.dumps({**identity, "thread": threading.get_ident()}).encode()
        assert len(head) <= PAGE, "the identity is longer than its page"
        os.pwrite(self._file, head.ljust(PAGE), 0)
        self._groups = groups
        self._take = itertools.count().__next__
        self._chunks: dict[int, mmap.mmap] = {}
        self._current: list[tuple[int, mmap.mmap, memoryview]] = []
        self._lock = threading.RLock()
        self._has_room = True
        self._phase = (0, 0, 0, Phase.OTHER, "")  # its begin, its thread and the thread's time until then
        self._map(0)

    def leaver(self, record: mmap.mmap, group: int) -> Callable[[int], None]:
        """Return a function that ends an operation of a group, and adds its entry; local.

        Args:
            record: The rank's record.
            group: Key of the group.
        """
        words, now, take, current, keep = (
            memoryview(record).cast("q"),
            time.monotonic_ns,
            self._take,
            self._current,
            self._keep,
        )
        last_row, shift = CHUNK_ENTRIES - 1, CHUNK_ENTRIES.bit_length() - 1

        def leave(at: int) -> None:
            words[at] = now()
            index, begin = take(), 8 * at - 8
            chunk, memory, out = current[0]
            if index >> shift != chunk:
                keep(index, record[begin : begin + OPERATION_BYTES], group)
                return
            row = index & last_row
            to = row * OPERATION_BYTES
            memory[to : to + OPERATION_BYTES] = record[begin : begin + OPERATION_BYTES]
            out[row * _WORDS + _GROUP] = group

        return leave

    def keep_groups(self) -> None:
        """Add the entries of all groups; local."""
        for key, members in self._groups():
            self._keep_span(describe("group", shape=members), 0, 0, key)

    def _keep(self, index: int, entry: bytes, group: int) -> None:
        """Write the entry of this index, of any chunk."""
        chunk, row = divmod(index, CHUNK_ENTRIES)
        memory = self._chunks.get(chunk) or self._map(chunk)
        if memory is not None:
            at = row * OPERATION_BYTES
            memory[at : at + OPERATION_BYTES] = entry
            struct.pack_into("=q", memory, at + 8 * _GROUP, group)

    def _map(self, chunk: int) -> mmap.mmap | None:
        """Return the memory of a chunk, new or written over; None without room for it."""
        with self._lock:
            if chunk in self._chunks or not self._has_room:
                return self._chunks.get(chunk)
            at = PAGE + chunk % MOST_CHUNKS * CHUNK_BYTES
            try:
                os.posix_fallocate(self._file, at, CHUNK_BYTES)  # or a write would be a bus error on a full disk
                memory = self._chunks[chunk] = mmap.mmap(self._file, CHUNK_BYTES, offset=at)
            except OSError as error:
                self._has_room = False
                if not self._current:
                    os.close(self._file)
                    raise
                warnings.warn(f"the trace of this rank ends here: {error}", RuntimeWarning, stacklevel=3)
                return None
            self._chunks.pop(chunk - 2, None)  # other threads may still write to the one before
            self._current[:] = [(chunk, memory, memoryview(memory).cast("q"))]
            self.keep_groups()
            return memory

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
        entry = OPERATION.pack(1, ended, began, began, threading.get_ident(), group, 0, 0, description, 1)
        self._keep(self._take(), entry, group)

    def close(self) -> None:
        """End the phase, and close the file; local."""
        self.enter_phase(Phase.OTHER, "")
        with self._lock:
            self._has_room = False
            self._chunks = {}
        os.close(self._file)
