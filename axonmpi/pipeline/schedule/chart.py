"""A timeline as a Gantt chart, for the terminal or as a picture (without torch).

    rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---

The length of a box is the time of its action. `F2` is the forward of micro-batch 2; with several stages on a rank,
`F5.2` is the forward of stage 5 for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...utils.pictures import import_matplotlib
from .actions import Action, ActionKind
from .timeline import Span, Timeline

_COLORS = {
    ActionKind.FORWARD: ("#4c86c6", "forward"),
    ActionKind.BACKWARD: ("#57a773", "backward"),
    ActionKind.BACKWARD_INPUT: ("#57a7a0", "gradient of the input"),
    ActionKind.BACKWARD_WEIGHT: ("#e0a03c", "gradient of the weights"),
}
_LIGHTER = 0.65
_NARROWEST_WITH_NUMBER = 0.008
"""Share of the width that a box needs for its micro-batch's number."""
_SUFFIXES = (".png", ".svg")


def describe(timeline: Timeline) -> str:
    """Return a line with the bubble and the most activations that each rank holds; local."""
    ranks = "1 rank" if len(timeline.spans) == 1 else f"{len(timeline.spans)} ranks"
    peaks = ", ".join(map(str, timeline.peak_activations))
    return f"{timeline.name} on {ranks}: bubble {timeline.bubble:.1%}, peak activations {peaks}"


def text_chart(timeline: Timeline, width: int = 240, scale: float | None = None) -> str:
    """Draw a timeline in characters; local.

    Args:
        timeline: The timeline.
        width: The most characters in a line; if they are too few, boxes lose the end of their text.
        scale: Characters for a unit of time, whatever the width; None means `text_scale(timeline, width)`.

    Returns:
        A line for each rank, from left to right in time.
    """
    scale = text_scale(timeline, width) if scale is None else scale
    indent, label = _indent(timeline), _labels(timeline)
    rows = (_row(timeline.start, spans, label, scale) for spans in timeline.spans)
    return "\n".join(f"{f'rank {rank}':{indent}}{row}".rstrip() for rank, row in enumerate(rows))


def text_scale(timeline: Timeline, width: int) -> float:
    """Return the characters for a unit of time that give the shortest box room for its text; local.

    Args:
        timeline: The timeline.
        width: The most characters in a line; if they are too few, the scale is smaller.
    """
    spans = [span for spans in timeline.spans for span in spans if span.end > span.start]
    if not spans:
        return 1.0
    label = _labels(timeline)
    longest = max(len(label(span.action)) for span in spans)
    shortest = min(span.end - span.start for span in spans)
    return min((longest + 1) / shortest, max(width - _indent(timeline), 1) / timeline.makespan)


def _indent(timeline: Timeline) -> int:
    return len(f"rank {len(timeline.spans) - 1}  ")


def _row(first: float, spans: tuple[Span, ...], label: Callable[[Action], str], scale: float) -> str:
    """Draw the boxes of a rank in a chart that begins at the time `first`."""
    row = ""
    for span in spans:
        start, end = (round((time - first) * scale) for time in (span.start, span.end))
        text = label(span.action)
        row = row.ljust(start) + (text + "-" * (end - start - len(text) - 1))[: end - start].ljust(end - start)
    return row


def _labels(timeline: Timeline) -> Callable[[Action], str]:
    """Return the function that makes the text in a box, without the stage if each rank has only one."""
    if any(len({span.action.stage for span in spans}) > 1 for spans in timeline.spans):
        return str
    return lambda action: f"{action.kind.value}{action.micro_batch}"


def draw_chart(timeline: Timeline, path: Path, measured: Timeline | None = None) -> None:
    """Draw a timeline as a picture; replaces an existing file. Local.

    Args:
        timeline: The timeline; the ideal one, if a measured one is given.
        path: The file to write; its name ends in .png or .svg.
        measured: A real run in the same unit of time, drawn below on the same scale.

    Raises:
        ValueError: The file's name ends in something else.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"path: expected a name that ends in {' or '.join(_SUFFIXES)}, got {str(path)!r}")
    import_matplotlib()
    # not pyplot: its state is shared by the threads of a process, and it looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = [timeline] if measured is None else [timeline, measured]
    most = max((len(spans) for each in timelines for spans in each.spans), default=0)
    width = min(max(8.0, 0.45 * most), 30.0)  # inches, about half of one for each action
    height = sum(1.2 + 0.45 * len(each.spans) for each in timelines)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    longest = max(each.makespan for each in timelines) or 1.0
    rows = figure.subplots(len(timelines), squeeze=False, height_ratios=[len(each.spans) + 1 for each in timelines])
    words = [""] if measured is None else ["ideal: ", "measured: "]
    for (axes,), each, word in zip(rows, timelines, words, strict=True):
        _draw(axes, each, longest)
        axes.set_title(word + describe(each))
    figure.savefig(path, dpi=120, format=path.suffix[1:])


def _draw(axes: Any, timeline: Timeline, longest: float) -> None:
    """Draw one timeline into a part of the picture; `longest` is the makespan that fills its width."""
    from matplotlib.colors import to_rgba

    for rank, spans in enumerate(timeline.spans):
        stages = sorted({span.action.stage for span in spans})
        boxes = [(span.start - timeline.start, span.end - span.start) for span in spans]
        # the later a stage among those of its rank, the lighter its boxes
        colors = [
            to_rgba(_COLORS[action.kind][0], _LIGHTER ** stages.index(action.stage))
            for action in (span.action for span in spans)
        ]
        axes.broken_barh(boxes, (rank - 0.45, 0.9), facecolors=colors, edgecolor="white", linewidth=0.6)
        for (start, length), span in zip(boxes, spans, strict=True):
            if length > _NARROWEST_WITH_NUMBER * longest:
                number = str(span.action.micro_batch)
                axes.text(start + length / 2, rank, number, ha="center", va="center", fontsize=7)
    ranks = range(len(timeline.spans))
    axes.set(xlim=(0, longest), ylim=(len(ranks) - 0.5, -0.5), xlabel="time")
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.legend(handles=_legend(timeline), loc="upper left", bbox_to_anchor=(1, 1))


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    return [Patch(color=color, label=label) for kind, (color, label) in _COLORS.items() if kind in kinds]
