"""Waiting apart from moving: a collective moves data once the last rank has arrived; before, the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rank_trace import RECEIVES, Nanoseconds, RankTrace

UNKNOWN = -1


@dataclass(frozen=True)
class Waits:
    """The waits within a rank's operations.

    Attributes:
        nanoseconds: Of each operation.
        awaited: The rank that each operation has waited for; -1 if unknown or none.
    """

    nanoseconds: Nanoseconds
    awaited: NDArray[np.int64]


def waits_of(traces: Sequence[RankTrace]) -> list[Waits]:
    """Return the waits of each rank, in the order of the traces, which have one clock."""
    keys = [trace.operations[["group", "call"]] for trace in traces]
    unique, index = np.unique(np.concatenate(keys), return_inverse=True)
    callers, last = np.zeros(len(unique), np.int64), np.full(len(unique), -(2**62))
    late = np.full(len(unique), UNKNOWN)
    columns = np.split(index, np.cumsum([len(key) for key in keys])[:-1])
    for trace, column in zip(traces, columns, strict=True):
        here, started = column[trace.is_collective], trace.operations["started"][trace.is_collective]
        callers[here] += 1
        late[here] = np.where(started > last[here], trace.rank, late[here])
        last[here] = np.maximum(last[here], started)
    members = {
        (key, own): trace.rank for trace in traces for key, (own, *_) in trace.groups.items()
    }  # world ranks, by group and number there
    return [_of_rank(*each, callers, last, late, members) for each in zip(traces, columns, strict=True)]


def _of_rank(
    trace: RankTrace,
    column: NDArray[np.intp],
    callers: NDArray[np.int64],
    last: Nanoseconds,
    late: NDArray[np.int64],
    members: dict[tuple[int, int], int],
) -> Waits:
    operations = trace.operations
    started, left = operations["started"], operations["left"]
    is_known = (callers[column] == trace.sizes) & (trace.sizes > 1) & (operations["call"] > 0)
    waits = np.where(is_known, np.clip(last[column] - started, 0, left - started), 0)
    awaited = np.where(is_known & (waits > 0), late[column], UNKNOWN)
    receives = np.flatnonzero(np.isin(operations["name"], RECEIVES) & (operations["peer"] >= 0))
    for each in receives.tolist():
        waits[each] = left[each] - started[each]
        awaited[each] = members.get((int(operations["group"][each]), int(operations["peer"][each])), UNKNOWN)
    return Waits(waits, awaited)
