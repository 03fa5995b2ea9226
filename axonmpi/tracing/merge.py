"""The traces of all ranks in one file for Perfetto (ui.perfetto.dev), in the Trace Event Format.

A process of the file is a rank. Its threads are the phases of the program; the operations of the main thread, each
with the time in which it waited for other ranks inside; and those of other threads. Spans such as buckets overlap.
The format: Google, "Trace Event Format", 2016, for the viewers of Chrome and Perfetto.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..record import Phase
from .arrivals import UNKNOWN, Waits, waits_of
from .clocks import align
from .rank_trace import RankTrace, read_traces
from .summary import Summary, summarise

MERGED_NAME = "trace.json"
PROFILE_NAME = "rank-{}.profile"
MOST_OPERATIONS = 1_000_000
"""Operations of all ranks in the merged file; of more, the latest."""
_PHASES, _MAIN, _OTHERS = range(3)
"""Threads of a rank in the file: phases, operations of the main thread, operations of the first other thread."""
_PHASE_NAMES = [phase.name.lower().encode() for phase in Phase]


def merge(folder: Path) -> Summary:
    """Write the traces of all ranks in a folder to one file, which is replaced at once; local.

    Returns:
        The summary of the traces.

    Raises:
        FileNotFoundError: The folder has no trace.
        ValueError: A file is no trace of a rank, or belongs to another job.
        OSError: The file cannot be written.
    """
    traces, clocks = align(read_traces(folder))
    waits = waits_of(traces)
    path = folder / MERGED_NAME
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, events_of(traces, waits, folder))))
        file.write("\n]}\n")
    draft.replace(path)
    return summarise(traces, clocks, waits)


def events_of(traces: Sequence[RankTrace], waits: Sequence[Waits], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of traces on one clock, and those of torch's profiler if they are in the folder."""
    starts = np.sort(np.concatenate([trace.operations["started"] for trace in traces]))
    since = int(starts[-MOST_OPERATIONS]) if len(starts) > MOST_OPERATIONS else 0
    parts = (part["started"].min() for trace in traces for part in (trace.operations, trace.spans) if len(part))
    origin = max(int(min(parts, default=0)), since)
    for trace, own in zip(traces, waits, strict=True):
        yield from _names(trace)
        yield from _spans(trace, origin)
        yield from _operations(trace, own, origin)
        yield from _profile(trace, folder / PROFILE_NAME.format(trace.rank), origin)


def _names(trace: RankTrace) -> Iterator[dict[str, Any]]:
    pid = trace.rank
    yield _meta(pid, 0, "process_name", name=f"rank {pid} (node {trace.node}, {trace.identity.get('host', '')})")
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)
    for number, name in enumerate(("phases", "operations", *(f"operations of {name}" for name in _others(trace)))):
        yield _meta(pid, number, "thread_name", name=name)
        yield _meta(pid, number, "thread_sort_index", sort_index=number)


def _others(trace: RankTrace) -> dict[str, int]:
    """Return the threads besides the main one that have operations, by name."""
    threads = np.unique(trace.operations["thread"]).tolist()
    return {f"thread {thread:x}": thread for thread in threads if thread != trace.identity["thread"]}


def _meta(pid: int, tid: int, event: str, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _complete(pid: int, tid: int, name: str, kind: str, started: int, left: int, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": started / 1e3}
    return {**event, "dur": (left - started) / 1e3, "args": args}


def _spans(trace: RankTrace, origin: int) -> Iterator[dict[str, Any]]:
    for each in trace.spans[trace.spans["started"] >= origin]:
        name, label = each["name"].decode(), each["dtype"].decode()
        started, left, nbytes = int(each["started"]) - origin, int(each["left"]) - origin, int(each["nbytes"])
        if each["name"] in _PHASE_NAMES:
            core = nbytes / 1e3 if nbytes >= 0 else None
            yield _complete(trace.rank, _PHASES, f"{name} {label}".strip(), "phase", started, left, core_us=core)
        else:  # such spans overlap
            both = {
                "name": f"{name} {label}".strip(),
                "cat": "span",
                "pid": trace.rank,
                "tid": _MAIN,
                "id": started,
            }
            yield {**both, "ph": "b", "ts": started / 1e3, "args": {"bytes": nbytes}}
            yield {**both, "ph": "e", "ts": left / 1e3}


def _operations(trace: RankTrace, waits: Waits, origin: int) -> Iterator[dict[str, Any]]:
    pid, threads = trace.rank, {thread: _OTHERS + index for index, thread in enumerate(_others(trace).values())}
    for number in np.flatnonzero(trace.operations["started"] >= origin).tolist():
        each = trace.operations[number]
        tid = threads.get(int(each["thread"]), _MAIN)
        started, left = int(each["started"]) - origin, int(each["left"]) - origin
        args = {"bytes": int(each["nbytes"]), "group": f"{int(each['group']):x}", "ranks": int(trace.sizes[number])}
        args |= {"dtype": each["dtype"].decode(), "call": int(each["call"]), "failed": bool(each["failed"])}
        wait = int(waits.nanoseconds[number])
        yield _complete(pid, tid, each["name"].decode(), "operation", started, left, **args, waiting_us=wait / 1e3)
        if wait > 0:
            rank = int(waits.awaited[number])
            name = "waiting" if rank == UNKNOWN else f"waiting for rank {rank}"
            yield _complete(pid, tid, name, "waiting", started, started + wait, rank=rank)


def _profile(trace: RankTrace, path: Path, origin: int) -> Iterator[dict[str, Any]]:
    """Yield the events of torch's profiler, moved from the system's clock to that of the trace."""
    if not path.exists():
        return
    profile = json.loads(path.read_text(encoding="utf-8"))
    # Its times are microseconds of the system's clock after a base, the trace's nanoseconds of another clock.
    base = int(profile.get("baseTimeNanoseconds", 0)) - trace.identity["wall_clock"]
    events = [each for each in profile["traceEvents"] if each.get("ph") == "X" and isinstance(each.get("tid"), int)]
    own = np.rint(np.array([each["ts"] for each in events]) * 1e3).astype(np.int64) + base
    for event, moment in zip(events, (own + trace.shifts(own) - origin).tolist(), strict=True):
        if moment >= 0:
            yield {**event, "pid": trace.rank, "ts": moment / 1e3}
