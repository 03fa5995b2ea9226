"""Clocks of nodes, aligned by the collectives of the trace: no rank leaves one before all have entered it.

Between node 0 and another node each collective bounds the difference of their clocks from both sides: a rank of
node 0 leaves after all ranks of the other node have started, and the other way round. So do messages there and
back, at the begin and the end of the trace, more tightly. Of many bounds the tightest meet to within a message's
time, and a line in the middle between them is the difference and its drift (Duda et al., "Estimating global time in
distributed systems", ICDCS 1987). Ranks of one node share a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rank_trace import Entries, Nanoseconds, RankTrace

THERE, BACK = b"there and back", b"back"
"""Operations of a rank of node 0, from the message to the answer, and of the other rank, which begins between."""
_MEETINGS = (b"barrier", b"all_reduce", b"all_gather", b"reduce_scatter", b"all_to_all")
"""Collectives of which each rank needs data of all others."""
_SPAN = 60e9
"""Nanoseconds between two points at which a clock is fitted: drift changes with the temperature."""
_WINDOWS = 512
"""Parts of a fit from each of which the tightest bounds are taken."""
_STEEPEST, _ROUNDS = 1e-3, 60
"""Largest drift, in nanoseconds a nanosecond, and rounds of the search for it."""


@dataclass(frozen=True)
class Clock:
    """The difference of a node's clock to that of node 0; between two points it changes evenly.

    Attributes:
        origin: A time of the node's clock, in nanoseconds.
        points: Times since the origin.
        offsets: Nanoseconds to add to the node's times at each point.
        error: Nanoseconds by which the offsets may be wrong; infinite if only the nodes' system clocks are known.
    """

    origin: int
    points: NDArray[np.float64]
    offsets: NDArray[np.float64]
    error: float

    @property
    def drift(self) -> float:
        """Mean change of the offset, in nanoseconds a nanosecond."""
        return float(np.ptp(self.offsets[[0, -1]]) and np.diff(self.offsets[[0, -1]])[0] / np.ptp(self.points))

    def shifts(self, times: Nanoseconds) -> Nanoseconds:
        """Return the nanoseconds to add to times of the node's clock."""
        since = (times - self.origin).astype(float)
        return np.asarray(np.rint(np.interp(since, self.points, self.offsets)), np.int64)


def align(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], dict[int, Clock]]:
    """Return the traces by the clock of the lowest node, and the clock of each other node."""
    clocks = clocks_of(traces)
    return [trace.shifted(clocks[trace.node].shifts) if trace.node in clocks else trace for trace in traces], clocks


def clocks_of(traces: Sequence[RankTrace]) -> dict[int, Clock]:
    """Return the clock of each node but the lowest."""
    nodes = sorted({trace.node for trace in traces})
    calls, starts, ends = _meetings(traces, nodes)
    clocks = {}
    for index, node in enumerate(nodes[1:], 1):
        common = np.flatnonzero((calls[0] > 0) & (calls[index] > 0))
        begun, ended = starts[:, common], ends[:, common]
        there, back = _messages(traces, nodes[0], node)
        times = np.concatenate([begun[index], back["started"]])
        if len(times):
            least = np.concatenate([begun[0] - ended[index], there["started"] - back["started"]])
            most = np.concatenate([ended[0] - begun[index], there["left"] - back["started"]])
            clocks[node] = _fitted(times, least, most)
        else:
            walls = [
                next(each.identity["wall_clock"] for each in traces if each.node == n) for n in (nodes[0], node)
            ]
            clocks[node] = Clock(0, np.zeros(1), np.array([float(walls[1] - walls[0])]), math.inf)
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


def _messages(traces: Sequence[RankTrace], first: int, other: int) -> tuple[Entries, Entries]:
    """Return the messages from one node to another and back, as operations of both, in the same order."""

    def found(node: int, name: bytes) -> Entries:
        parts = [trace.operations[trace.operations["name"] == name] for trace in traces if trace.node == node]
        return np.concatenate(parts)

    ranks = [trace.rank for trace in traces if trace.node == other]
    there, back = found(first, THERE), found(other, BACK)
    there = there[np.isin(there["peer"], ranks)]
    _, *both = np.intersect1d(there["tag"], back["tag"], return_indices=True)
    return there[both[0]], back[both[1]]


def _fitted(times: Nanoseconds, least: Nanoseconds, most: Nanoseconds) -> Clock:
    """Return the clock between bounds of its offset at some times."""
    origin, base = int(times.min()), int(least[0])
    since, low, high = (
        (each - start).astype(float) for each, start in ((times, origin), (least, base), (most, base))
    )
    points = np.linspace(0, since.max(), 1 + max(1, round(since.max() / _SPAN)))
    offsets, errors = [], []
    for point in points:
        near = np.flatnonzero(np.abs(since - point) <= max(_SPAN, points[1]))
        offset, error = _middle(since[near] - point, low[near], high[near])
        offsets.append(base + offset)
        errors.append(error)
    return Clock(origin, points, np.array(offsets), max(errors))


def _middle(since: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> tuple[float, float]:
    """Return the height at 0 of the line in the middle between bounds, and its distance to those near 0.

    The distance is concave in the slope, so that thirds of an interval lead to the best one.
    """
    parts = np.array_split(np.argsort(since), min(_WINDOWS, len(since)))
    tops = np.array([part[high[part].argmin()] for part in parts])
    bottoms = np.array([part[low[part].argmax()] for part in parts])

    def edges(slope: float) -> tuple[float, float]:
        return float((high[tops] - slope * since[tops]).min()), float((low[bottoms] - slope * since[bottoms]).max())

    left, right = -_STEEPEST, _STEEPEST
    for _ in range(_ROUNDS):
        third = (right - left) / 3
        gaps = [top - bottom for top, bottom in (edges(left + third), edges(right - third))]
        left, right = (left + third, right) if gaps[0] < gaps[1] else (left, right - third)
    slope = (left + right) / 2
    height = sum(edges(slope)) / 2
    line, near = height + slope * since, np.abs(since) <= np.ptp(since) / 4
    return height, float(max((high - line)[near].min(), (line - low)[near].min())) if near.any() else math.inf
