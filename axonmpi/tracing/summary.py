"""A trace in words and figures: the time of each rank, and the rank or node that the others wait for.

A rank's time is that of its main thread: computing, loading data, saving, waiting for other ranks, moving data.
As ranks meet in each step, all wait for the one that spends most more than the others in one of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..record import Phase
from ..utils.text import counted, name_ranks
from .arrivals import Waits
from .clocks import Clock
from .rank_trace import RankTrace

LINK = b"link"
"""Name of the message that measures the way from one node to the next."""
_KINDS = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "computing",
    Phase.BACKWARD: "computing",
    Phase.OPTIMIZER: "computing",
    Phase.CHECKPOINT: "saving",
}
OTHER = "other work"
_BUSY = ("computing", "loading data", "saving", OTHER)
_DOES = dict(zip(_BUSY, ("computes", "loads data", "saves", "works outside of all phases"), strict=True))
_SMALL = 0.05
"""Share of the time below which nothing stands out."""
_SLOW_CORE = 0.8
"""Share of a core, relative to the other ranks, below which a rank's slowness is laid to its processor."""
_SLOW_LINK = 2.0


@dataclass(frozen=True)
class RankFigures:
    """The time of one rank's main thread, in seconds.

    Attributes:
        rank: The rank.
        node: Its node.
        busy: By kind of work, without waiting and moving.
        waiting: For other ranks.
        moving: Data, while the main thread does nothing else.
        hidden: Communication of other threads while the main thread computes.
        core: Share of a core that the main thread had while it computed, up to 1; NaN if unknown.
        awaited: Time that other ranks waited for this one.
    """

    rank: int
    node: int
    busy: dict[str, float]
    waiting: float
    moving: float
    hidden: float
    core: float
    awaited: float


@dataclass(frozen=True)
class Summary:
    """The summary of a trace.

    Attributes:
        seconds: Time that the traces of all ranks cover.
        ranks: Figures of each rank.
        cause: The sentence that names the largest loss of time, and its rank or node.
        operations: Name and size, calls on a rank, seconds of waiting and of moving: most time first.
        clocks: The clock of each node but the lowest.
        links: Bytes a second from each node to the next; empty on one node.
    """

    seconds: float
    ranks: list[RankFigures]
    cause: str
    operations: list[tuple[str, float, float, float]]
    clocks: dict[int, Clock]
    links: dict[int, float]

    def __str__(self) -> str:
        lines = [self.cause, "", f"{counted(len(self.ranks), 'rank')}, {self.seconds:.2f} s; seconds of each rank:"]
        columns = [*_BUSY, "waiting", "moving", "hidden", "awaited"]
        lines.append(f"{'rank':>6} {'node':>5} " + " ".join(f"{name:>12}" for name in columns) + f" {'core':>6}")
        for each in self.ranks:
            figures = [*(each.busy[kind] for kind in _BUSY), each.waiting, each.moving, each.hidden, each.awaited]
            core = "" if math.isnan(each.core) else f"{each.core:.2f}"
            lines.append(
                f"{each.rank:>6} {each.node:>5} " + " ".join(f"{f:>12.3f}" for f in figures) + f" {core:>6}"
            )
        lines += [
            "",
            "operations, means of the ranks that call them:",
            f"{'calls':>9} {'waiting':>9} {'moving':>9}",
        ]
        lines += [
            f"{calls:>9.0f} {wait:>9.3f} {move:>9.3f}  {name}" for name, calls, wait, move in self.operations[:12]
        ]
        for node, clock in self.clocks.items():
            ahead, drift, known = -clock.offsets[0] / 1e3, -clock.drift * 1e6, clock.error / 1e3
            lines.append(f"node {node}: clock {ahead:+.1f} us, {drift:+.2f} us a second, known to {known:.1f} us")
        lines += [f"node {node}: sends at {rate / 1e6:.1f} MB/s" for node, rate in self.links.items()]
        return "\n".join(lines)


def summarise(traces: Sequence[RankTrace], clocks: dict[int, Clock], waits: Sequence[Waits]) -> Summary:
    """Return the summary of traces on one clock.

    Args:
        traces: Of all ranks.
        clocks: Clock of each node but the lowest.
        waits: Of each.
    """
    awaited = dict.fromkeys((trace.rank for trace in traces), 0)
    begin, end = _covered(traces)
    for own, trace in zip(waits, traces, strict=True):
        inside = own.nanoseconds * _share_within(trace, begin, end)
        for rank in awaited:
            awaited[rank] += int(inside[trace.on_main & (own.awaited == rank)].sum())
    ranks = [_figures(*each, awaited, begin, end) for each in zip(traces, waits, strict=True)]
    seconds = max(end - begin, 0) / 1e9
    links = _links(traces)
    cause = _cause(ranks, seconds, links, traces)
    return Summary(seconds, ranks, cause, _operations(traces, waits), clocks, links)


def _covered(traces: Sequence[RankTrace]) -> tuple[int, int]:
    """Return the begin and the end of the time that all traces cover."""
    both = [[part for part in (trace.operations, trace.spans) if len(part)] for trace in traces]
    begin = max((min(part["started"].min() for part in parts) for parts in both if parts), default=0)
    end = min((max(part["left"].max() for part in parts) for parts in both if parts), default=0)
    return int(begin), int(end)


def _figures(trace: RankTrace, waits: Waits, awaited: dict[int, int], begin: int, end: int) -> RankFigures:
    def inside(name: str) -> NDArray[np.int64]:
        return np.asarray(np.clip(trace.spans[name], begin, end))

    busy = dict.fromkeys(_BUSY, 0.0)
    started, left = inside("started"), inside("left")
    own = (left - started) - (trace.blocked_until(left) - trace.blocked_until(started))
    core_time = core_busy = 0.0
    for phase, kind in _KINDS.items():
        here = trace.spans["name"] == phase.name.lower().encode()
        busy[kind] += float(own[here].sum()) / 1e9
        known = here & (trace.spans["nbytes"] >= 0) & (started < left)
        if kind == "computing":
            core_time += float(np.minimum(trace.spans["nbytes"], own)[known].sum())
            core_busy += float(own[known].sum())
    blocked = float(np.diff(trace.blocked_until(np.array([begin, end])))[0]) / 1e9
    busy[OTHER] = max((end - begin) / 1e9 - blocked - sum(busy.values()), 0.0)
    on_main = trace.on_main
    share = _share_within(trace, begin, end)
    waiting = float((waits.nanoseconds * share)[on_main].sum()) / 1e9
    elsewhere = trace.operations[trace.operations["thread"] != trace.identity["thread"]]
    # Operations of several threads at once count once: each from the end of those before it.
    ends = np.maximum.accumulate(np.clip(elsewhere["left"], begin, end))
    begins = np.maximum(elsewhere["started"], np.concatenate([[begin], ends])[:-1]).clip(max=ends)
    beside = (ends - begins - trace.blocked_until(ends) + trace.blocked_until(begins)).sum()
    return RankFigures(
        trace.rank, trace.node, busy, waiting, max(blocked - waiting, 0.0), float(max(beside, 0)) / 1e9,
        core_time / core_busy if core_busy else math.nan, awaited[trace.rank] / 1e9,
    )  # fmt: skip


def _share_within(trace: RankTrace, begin: int, end: int) -> NDArray[np.float64]:
    """Return the share of each operation that is between two moments."""
    started, left = trace.operations["started"], trace.operations["left"]
    inside = np.clip(left, begin, end) - np.clip(started, begin, end)
    return np.asarray(inside / np.maximum(left - started, 1))


def _operations(traces: Sequence[RankTrace], waits: Sequence[Waits]) -> list[tuple[str, float, float, float]]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for trace, own in zip(traces, waits, strict=True):
        kinds, index = np.unique(trace.operations[["name", "nbytes"]], return_inverse=True)
        took = trace.operations["left"] - trace.operations["started"]
        calls = np.bincount(index, minlength=len(kinds))
        waited = np.bincount(index, own.nanoseconds, len(kinds)) / 1e9
        moved = np.bincount(index, took - own.nanoseconds, len(kinds)) / 1e9
        for kind, *figures in zip(kinds, calls.tolist(), waited.tolist(), moved.tolist(), strict=True):
            nbytes = int(kind["nbytes"])
            name = kind["name"].decode() + (f" of {_size(nbytes)}" if nbytes else "")
            found.setdefault(name, []).append(tuple(figures))
    rows = [
        (name, *(sum(column) / len(each) for column in zip(*each, strict=True))) for name, each in found.items()
    ]
    return sorted(rows, key=lambda row: -(row[2] + row[3]))


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes = round(nbytes / 1024)
    return f"{nbytes} GiB"


def _links(traces: Sequence[RankTrace]) -> dict[int, float]:
    """Return the bytes a second from each node to the next: the median of the messages that measured it."""
    rates: dict[int, list[float]] = {}
    nodes = {trace.rank: trace.node for trace in traces}
    for trace in traces:
        for each in trace.operations[trace.operations["name"] == LINK]:
            source = nodes.get(int(each["peer"]))
            if source is not None:
                rates.setdefault(source, []).append(float(each["nbytes"] / (each["left"] - each["started"]) * 1e9))
    return {node: median(found) for node, found in sorted(rates.items())}


# ---- the cause --------------------------------------------------------------------------------------------------


def _cause(
    ranks: Sequence[RankFigures], seconds: float, links: dict[int, float], traces: Sequence[RankTrace]
) -> str:
    """Return the sentence that names the largest loss."""
    if not seconds:
        return "the traces of the ranks have no time in common"
    found = [_straggler(ranks, kind, seconds, traces) for kind in _BUSY] if len(ranks) > 1 else []
    found.append(_slow_node(ranks, seconds, links))
    loss, sentence = max(found)
    if loss >= _SMALL * seconds:
        return sentence
    times = [{**each.busy, "waiting": each.waiting, "moving": each.moving} for each in ranks]
    shares = {kind: sum(each[kind] for each in times) / len(ranks) / seconds for kind in times[0]}
    return "no rank stands out: " + ", ".join(
        f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.005
    )


def _straggler(
    ranks: Sequence[RankFigures], kind: str, seconds: float, traces: Sequence[RankTrace]
) -> tuple[float, str]:
    """Return the seconds that the others lose to the rank with the most work of a kind, and the sentence for it."""
    most = max(ranks, key=lambda each: each.busy[kind])
    others = [each for each in ranks if each is not most]
    usual = median(each.busy[kind] for each in others)
    # Ranks that wait for this one as long as it works longer: not so if their own work of another kind balances it.
    loss = min(most.busy[kind] - usual, sum(each.waiting for each in others) / len(others) + most.busy[kind] * 0.1)
    text = f"for {most.busy[kind] / seconds:.0%} of the time, the others for {usual / seconds:.0%}"
    what = f"{_DOES[kind]} {text}"
    if kind == "computing":
        core, usual_core = most.core, median(each.core for each in others)
        if core < _SLOW_CORE * usual_core:
            what = f"has {core:.2f} of a core while it computes, the others {usual_core:.2f}: it computes {text}"
        elif stages := _stages(traces, most.rank):
            what = f"(stage {stages} of the pipeline) {what}"
    return loss, f"rank {most.rank} {what}; they wait for it"


def _stages(traces: Sequence[RankTrace], rank: int) -> str:
    """Return the stages of a pipeline that a rank computes, from the labels of its phases, such as F1.0."""
    spans = next(trace.spans for trace in traces if trace.rank == rank)
    labels = {
        label.decode() for label in np.unique(spans["dtype"][np.isin(spans["name"], (b"forward", b"backward"))])
    }
    return ", ".join(sorted({label[1:].partition(".")[0] for label in labels if "." in label}))


def _slow_node(ranks: Sequence[RankFigures], seconds: float, links: dict[int, float]) -> tuple[float, str]:
    """Return the seconds that moving loses to the slowest way between nodes, and the sentence for it."""
    moving = median(each.moving for each in ranks)
    if len(links) < 2:
        return 0.0, ""
    slowest = min(links, key=links.__getitem__)
    usual = median(rate for node, rate in links.items() if node != slowest)
    if links[slowest] * _SLOW_LINK > usual:
        return 0.0, ""
    own = name_ranks([each.rank for each in ranks if each.node == slowest])
    return moving * (1 - links[slowest] / usual), (
        f"node {slowest} ({own}) sends at {links[slowest] / 1e6:.1f} MB/s, other nodes at {usual / 1e6:.1f} MB/s: "
        f"moving data takes {moving / seconds:.0%} of the time"
    )
