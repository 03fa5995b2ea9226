"""The trace of one rank, as arrays: its operations and its spans."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record.layout import OPERATION_ENTRY
from ..record.trace_file import GROUP, PAGE, SPAN

Entries = NDArray[np.void]
Nanoseconds = NDArray[np.int64]
RECEIVES = (b"recv", b"wait for irecv", b"stage recv")
"""Operations that wait for one other rank."""


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        identity: `rank`, `size`, `node`, `host`, `thread` and more of the rank.
        operations: In the order of their starts; fields of `OPERATION_ENTRY`, times in nanoseconds.
        spans: Phases and other spans, in the order of their starts.
        groups: By key: this rank's number, the size, the world rank of rank 0 and the step between world ranks.
        shifts: Returns the nanoseconds that have been added to times.
    """

    identity: dict[str, Any]
    operations: Entries
    spans: Entries
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shifts: Callable[[Nanoseconds], Nanoseconds] = np.zeros_like

    @property
    def rank(self) -> int:
        """The rank's number in the world."""
        return int(self.identity["rank"])

    @property
    def node(self) -> int:
        """The number of the rank's node."""
        return int(self.identity["node"])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of ranks of each operation's group; 0 if the trace lacks it."""
        return np.array([self.groups.get(key, (0, 0))[1] for key in self.operations["group"].tolist()], np.int64)

    @cached_property
    def is_collective(self) -> NDArray[np.bool_]:
        """Whether each operation is a collective, which all ranks of the group call."""
        return (self.operations["call"] > 0) & ~np.char.startswith(self.operations["name"], b"wait")

    @cached_property
    def on_main(self) -> NDArray[np.bool_]:
        """Whether each operation keeps the main thread, and is not part of another one that does."""
        own = self.operations["thread"] == self.identity["thread"]
        left = np.where(own, self.operations["left"], 0)
        before = np.concatenate([[0], np.maximum.accumulate(left)[:-1]]) if len(left) else left
        return np.asarray(own & (self.operations["left"] > before) & (self.operations["started"] >= before))

    def blocked_until(self, moments: NDArray[Any]) -> NDArray[np.float64]:
        """Return how long the main thread has been in operations until each moment, in nanoseconds."""
        top = self.operations[self.on_main]
        if not len(top):
            return np.zeros(len(moments))
        edges = np.stack([top["started"], top["left"]], 1).ravel()
        spent = np.cumsum(top["left"] - top["started"])
        heights = np.stack([np.concatenate([[0], spent[:-1]]), spent], 1).ravel()
        return np.asarray(np.interp(moments, edges, heights))

    def shifted(self, shifts: Callable[[Nanoseconds], Nanoseconds]) -> RankTrace:
        """Return the trace by another clock, from the nanoseconds to add to each time."""
        operations, spans = self.operations.copy(), self.spans.copy()
        for entries in (operations, spans):
            for name in ("entered", "started", "left"):
                entries[name] = np.where(entries[name] > 0, entries[name] + shifts(entries[name]), entries[name])
        return replace(self, operations=operations, spans=spans, shifts=shifts)


def trace_files(folder: Path) -> list[Path]:
    """Return the files of ranks in a folder; local."""
    return [path for path in folder.glob("rank-*.trace") if re.fullmatch(r"rank-\d+\.trace", path.name)]


def read_traces(folder: Path) -> list[RankTrace]:
    """Read the traces of the ranks of a job, in rank order; local.

    Args:
        folder: The folder of the trace. It may have files of a rank that was killed.

    Raises:
        FileNotFoundError: The folder has no trace.
        ValueError: A file is no trace of a rank, or belongs to another job than rank 0's.
    """
    paths = trace_files(folder)
    if not paths:
        raise FileNotFoundError(
            f"{folder}: expected the files rank-0.trace, rank-1.trace, ... of a trace, found none"
        )
    traces = sorted(map(_read, paths), key=lambda trace: trace.rank)
    jobs = {trace.identity["trace"] for trace in traces}
    if len(jobs) > 1:
        raise ValueError(
            f"{folder}: expected the trace of one job, found files of {len(jobs)}: remove the old ones"
        )
    return traces


def _read(path: Path) -> RankTrace:
    content = path.read_bytes()
    try:
        identity = json.loads(content[:PAGE])
    except ValueError:
        raise ValueError(f"{path}: expected the trace of a rank, got {content[:20]!r} ...") from None
    count = (len(content) - PAGE) // OPERATION_ENTRY.itemsize
    entries = np.frombuffer(content, OPERATION_ENTRY, count, PAGE)
    entries = entries[(entries["number"] > 0) & (entries["number"] == entries["again"])]
    entries = entries[np.argsort(entries["started"], kind="stable")]
    is_group, is_span = entries["name"] == GROUP, entries["group"] == SPAN
    found = entries[is_group]
    groups = {int(each["group"]): tuple(each["shape"].tolist()) for each in found}
    return RankTrace(identity, entries[~is_group & ~is_span], entries[is_span], groups)
