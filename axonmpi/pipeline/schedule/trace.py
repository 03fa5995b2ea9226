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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .actions import Action, Schedule, parse_action
from .timeline import Span, Timeline

__all__ = ["last_step", "read_trace", "write_trace"]

_CATEGORY = "pipeline"
_MICROSECONDS = 1e6


def write_trace(path: Path, spans: Sequence[Sequence[Span]], name: str = "pipeline") -> None:
    """Write when each rank did what; replaces an existing file, at once and not bit by bit. Local.

    Args:
        path: The file to write.
        spans: [ranks] actions of any kind, transfers too, and when they were, in seconds by a clock of all ranks.
        name: What the timeline is called when it is read again.
    """
    events = [event for rank, own in enumerate(spans) for event in _events(rank, own)]
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name}}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(whole), encoding="utf-8")
    unfinished.replace(path)


def _events(rank: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    place = {"pid": rank, "tid": rank}
    stages = sorted({span.action.stage for span in spans})
    names = {"process_name": f"rank {rank}", "thread_name": f"stages {', '.join(map(str, stages))}"}
    for key, text in names.items():
        yield {"ph": "M", "name": key, **place, "args": {"name": text}}
    yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": rank}}
    for span in spans:
        action = span.action
        yield {
            "ph": "X",
            "name": str(action),
            "cat": _CATEGORY,
            **place,
            "ts": round(span.start * _MICROSECONDS, 3),
            "dur": round((span.end - span.start) * _MICROSECONDS, 3),
            "args": {"kind": action.kind.name.lower(), "stage": action.stage, "micro_batch": action.micro_batch},
        }


def read_trace(path: Path) -> Timeline:
    """Read the actions that compute from a trace; local.

    Returns:
        Their times in seconds, the first one beginning at 0.

    Raises:
        ValueError: The file is no trace of a pipeline.
        OSError: The file cannot be read.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        spans = [_span(event) for event in whole["traceEvents"] if event.get("cat") == _CATEGORY]
        name = str(whole["otherData"]["name"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a trace of a pipeline in {str(path)!r}, got {error!r}") from None
    computed = [(rank, span) for rank, span in spans if span.action.kind.is_compute]
    if not any(span.end > span.start for _, span in computed):
        raise ValueError(f"expected a trace of a pipeline in {str(path)!r}, got one in which nothing is computed")
    numbers = sorted({rank for rank, _ in computed})
    if numbers != list(range(len(numbers))):
        raise ValueError(f"expected a trace of a pipeline in {str(path)!r}, got one of the ranks {numbers}")
    first = min(span.start for _, span in computed)
    ranks: list[list[Span]] = [[] for _ in numbers]
    for rank, span in sorted(computed, key=lambda entry: entry[1].start):
        ranks[rank].append(Span(span.action, span.start - first, span.end - first))
    return Timeline(name, tuple(map(tuple, ranks)))


def last_step(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Return the last step of a run of several steps, the first action beginning at 0; local.

    Raises:
        ValueError: The ranks did not do what the schedule says.
    """
    ranks = []
    plans = [[action for action in actions if action.kind.is_compute] for actions in schedule.actions]
    if len(plans) != len(timeline.spans):
        raise ValueError(f"expected a run with {len(plans)} ranks, got one with {len(timeline.spans)}")
    for rank, (planned, spans) in enumerate(zip(plans, timeline.spans, strict=True)):
        last = spans[-len(planned) :]
        if [span.action for span in last] != planned:
            raise ValueError(
                f"expected a run of {schedule.name} with {schedule.num_stages} stages on {len(plans)} ranks and "
                f"{schedule.num_microbatches} micro-batches, got one where rank {rank} ends with "
                f"{' '.join(str(span.action) for span in last[-4:])}"
            )
        ranks.append(last)
    first = min(spans[0].start for spans in ranks)
    moved = (tuple(Span(span.action, span.start - first, span.end - first) for span in spans) for spans in ranks)
    return Timeline(timeline.name, tuple(moved))


def _span(event: dict[str, Any]) -> tuple[int, Span]:
    action: Action = parse_action(event["name"])
    start = event["ts"] / _MICROSECONDS
    return int(event["pid"]), Span(action, start, start + event["dur"] / _MICROSECONDS)
