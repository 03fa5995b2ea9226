"""A timeline as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open (without torch).

    {"traceEvents": [
      {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "rank 1"}},
      {"ph": "X", "name": "F1.0", "cat": "pipeline", "pid": 1, "tid": 1, "ts": 1500.0, "dur": 980.0,
       "args": {"kind": "forward", "stage": 1, "micro_batch": 0}}, ...

It is the Trace Event Format: complete events in microseconds, a process for each rank.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .actions import Schedule, parse_action
from .timeline import Span, Timeline

TIMES_NAME = "pipeline.json"
"""The file's name in the folder of a trace of a whole run."""
_CATEGORY = "pipeline"
_MICROSECONDS = 1e6


def write_trace(path: Path, spans: Sequence[Sequence[Span]], name: str = "pipeline") -> None:
    """Write a trace; it replaces an existing file at once. Local.

    Args:
        path: The file to write.
        spans: [ranks] actions of any kind, transfers too, with times in seconds by a clock that all ranks share.
        name: The name of the timeline when it is read again.
    """
    events = [event for rank, own in enumerate(spans) for event in _events(rank, own)]
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name}}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(whole), encoding="utf-8")
    unfinished.replace(path)


def _events(rank: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    row = {"pid": rank, "tid": rank}
    stages = sorted({span.action.stage for span in spans})
    yield {"ph": "M", "name": "process_name", **row, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "thread_name", **row, "args": {"name": f"stages {', '.join(map(str, stages))}"}}
    yield {"ph": "M", "name": "process_sort_index", **row, "args": {"sort_index": rank}}
    for span in spans:
        action = span.action
        yield {
            "ph": "X",
            "name": str(action),
            "cat": _CATEGORY,
            **row,
            "ts": round(span.start * _MICROSECONDS, 3),
            "dur": round((span.end - span.start) * _MICROSECONDS, 3),
            "args": {"kind": action.kind.name.lower(), "stage": action.stage, "micro_batch": action.micro_batch},
        }


def read_trace(path: Path) -> Timeline:
    """Read the actions that compute from a trace, or from the folder of a trace of a whole run; local.

    Returns:
        Their times in seconds, the first one beginning at 0.

    Raises:
        ValueError: The file is no trace of a pipeline.
        OSError: The file cannot be read.
    """
    path = path / TIMES_NAME if path.is_dir() else path
    try:
        return _timeline(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a trace of a pipeline in {str(path)!r}, got {error!r}") from None


def _timeline(trace: Any) -> Timeline:
    ranks: defaultdict[int, list[Span]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == _CATEGORY and (action := parse_action(event["name"])).kind.is_compute:
            start = event["ts"] / _MICROSECONDS
            ranks[int(event["pid"])].append(Span(action, start, start + event["dur"] / _MICROSECONDS))
    if not any(span.end > span.start for spans in ranks.values() for span in spans):
        raise ValueError("one in which nothing is computed")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"one of the ranks {sorted(ranks)}")
    spans = (tuple(sorted(ranks[rank], key=lambda span: span.start)) for rank in sorted(ranks))
    return Timeline(str(trace["otherData"]["name"]), tuple(spans)).from_zero()


def last_step(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Return the last step of a run of several steps, the first action beginning at 0; local.

    Raises:
        ValueError: The ranks did not do what the schedule says.
    """
    plans = [tuple(action for action in actions if action.kind.is_compute) for actions in schedule.actions]
    if len(plans) != len(timeline.spans):
        raise ValueError(f"expected a run with {len(plans)} ranks, got one with {len(timeline.spans)}")
    ends = tuple(spans[-len(planned) :] for planned, spans in zip(plans, timeline.spans, strict=True))
    for rank, (planned, last) in enumerate(zip(plans, ends, strict=True)):
        if tuple(span.action for span in last) != planned:
            raise ValueError(
                f"expected a run of {schedule.name} with {schedule.num_stages} stages on {len(plans)} ranks and "
                f"{schedule.num_microbatches} micro-batches, got one where rank {rank} ends with "
                f"{' '.join(str(span.action) for span in last[-4:])}"
            )
    return Timeline(timeline.name, ends).from_zero()
