"""Clocks of nodes, aligned by the collectives of the trace: no rank leaves one before all have entered it.

Between node 0 and another node each collective bounds the difference of their clocks from both sides: a rank of node
0 leaves after all ranks of the other node have started, and the other way round. Of many collectives the tightest
bounds meet to within a message's time, and a line through the middle between them is the difference and its drift
(Duda et al., "Estimating global time in distributed systems", ICDCS 1987). Ranks of one node share a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rank_trace import Nanoseconds, RankTrace

_MEETINGS = (b"barrier", b"all_reduce", b"all_gather", b"reduce_scatter", b"all_to_all")
"""Collectives of which each rank needs data of all others."""
_WINDOWS = 32
"""Parts of the trace from each of which the tightest bounds are taken."""
_ROUNDS = 10


@dataclass(frozen=True)
class Clock:
    """The difference of a node's clock to that of node 0.

    Attributes:
        offset: Nanoseconds to add to the node's times at `origin`.
        drift: Nanoseconds to add for each nanosecond since.
        origin: A time of the node's clock.
        error: Nanoseconds by which `offset` may be wrong; infinite if the nodes' system clocks are all that is known.
    """

    offset: float = 0.0
    drift: float = 0.0
    origin: int = 0
    error: float = 0.0


def align(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], dict[int, Clock]]:
    """Return the traces by the clock of node 0, or the lowest of theirs, and the clock of each node."""
    clocks = clocks_of(traces)
    aligned = []
    for trace in traces:
        clock = clocks[trace.node]
        aligned.append(trace.shifted(clock.offset, clock.drift, clock.origin) if clock != Clock() else trace)
    return aligned, clocks


def clocks_of(traces: Sequence[RankTrace]) -> dict[int, Clock]:
    """Return the clock of each node."""
    nodes = sorted({trace.node for trace in traces})
    calls, starts, ends = _meetings(traces, nodes)
    clocks = {nodes[0]: Clock()}
    for index, node in enumerate(nodes[1:], 1):
        common = np.flatnonzero((calls[0] > 0) & (calls[index] > 0))
        if len(common):
            times = starts[index, common]
            clocks[node] = _fitted(times, starts[0, common] - ends[index, common], ends[0, common] - times)
        else:
            walls = [
                next(each.identity["wall_clock"] for each in traces if each.node == n) for n in (nodes[0], node)
            ]
            clocks[node] = Clock(float(walls[1] - walls[0]), error=math.inf)
    return clocks


def _meetings(
    traces: Sequence[RankTrace], nodes: Sequence[int]
) -> tuple[NDArray[np.int64], Nanoseconds, Nanoseconds]:
    """Return, by node and collective, the ranks that called it, their last start and their first end."""
    found = [np.isin(trace.operations["name"], _MEETINGS) & trace.is_collective for trace in traces]
    keys = [trace.operations[here][["group", "call"]] for trace, here in zip(traces, found, strict=True)]
    unique, index = np.unique(np.concatenate(keys), return_inverse=True)
    calls = np.zeros((len(nodes), len(unique)), np.int64)
    starts, ends = np.full_like(calls, -(2**62)), np.full_like(calls, 2**62)
    at = 0
    for trace, here in zip(traces, found, strict=True):
        operations, row = trace.operations[here], nodes.index(trace.node)
        column = index[at : at + len(operations)]
        at += len(operations)
        calls[row, column] += 1
        starts[row, column] = np.maximum(starts[row, column], operations["started"])
        ends[row, column] = np.minimum(ends[row, column], operations["left"])
    return calls, starts, ends


def _fitted(times: Nanoseconds, least: Nanoseconds, most: Nanoseconds) -> Clock:
    """Return the clock between bounds of its offset at some times."""
    order = np.argsort(times)
    times, least, most = times[order], least[order], most[order]
    origin, base = int(times[0]), int(least[0])
    since, low, high = (times - origin).astype(float), (least - base).astype(float), (most - base).astype(float)
    windows = [part for part in np.array_split(np.arange(len(times)), min(_WINDOWS, len(times))) if len(part)]
    centres = np.array([since[part].mean() for part in windows])
    line = np.zeros(2)  # drift, offset
    half = np.ones(len(windows))
    for _ in range(_ROUNDS):
        rest = np.polyval(line, since)
        top = np.array([(high - rest)[part].min() for part in windows])
        bottom = np.array([(low - rest)[part].max() for part in windows])
        half = np.maximum(np.abs(top - bottom) / 2, 1.0)
        middle = (top + bottom) / 2
        degree = 1 if len(windows) > 1 else 0
        step = np.polyfit(centres, middle, degree, w=1 / half)
        line = line + np.concatenate([np.zeros(1 - degree), step])
    return Clock(base + float(line[1]), float(line[0]), origin, float(np.median(half)))
