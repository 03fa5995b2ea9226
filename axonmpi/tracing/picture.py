"""A trace as a picture: for each rank the phases of its main thread, and the operations in which it waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..record import Phase
from ..utils.pictures import import_matplotlib
from .arrivals import Waits
from .rank_trace import RankTrace

_COLORS = {
    Phase.DATA: "#b07cc6",
    Phase.FORWARD: "#4c86c6",
    Phase.BACKWARD: "#57a773",
    Phase.OPTIMIZER: "#e0a03c",
    Phase.CHECKPOINT: "#8c6d4f",
}
_MOVING, _WAITING = "#7f7f7f", "#d64f4f"
_MOST_BOXES = 400
"""Operations of a rank in the picture; of more, those at the end."""


def draw(traces: Sequence[RankTrace], waits: Sequence[Waits], path: Path) -> None:
    """Draw the end of a trace into a .png or .svg file; local.

    Args:
        traces: Of all ranks, on one clock.
        waits: Of each.
        path: The file.
    """
    import_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.5 + 0.5 * len(traces)), layout="constrained")
    axes = figure.subplots()
    tops = [trace.on_main for trace in traces]
    starts = [trace.operations["started"][top][-_MOST_BOXES:] for trace, top in zip(traces, tops, strict=True)]
    begin = max((int(each[0]) for each in starts if len(each)), default=0)
    for row, (trace, own, top) in enumerate(zip(traces, waits, tops, strict=True)):
        for phase, color in _COLORS.items():
            here = trace.spans["name"] == phase.name.lower().encode()
            _boxes(axes, trace.spans["started"][here], trace.spans["left"][here], begin, row, color)
        started, left = trace.operations["started"][top], trace.operations["left"][top]
        _boxes(axes, started, left, begin, row, _MOVING)
        _boxes(axes, started, started + own.nanoseconds[top], begin, row, _WAITING)
    names = {
        **{phase.name.lower(): color for phase, color in _COLORS.items()},
        "moving": _MOVING,
        "waiting": _WAITING,
    }
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)


def _boxes(
    axes: object, started: NDArray[np.int64], left: NDArray[np.int64], begin: int, row: int, color: str
) -> None:
    shown = left > begin
    starts, ends = np.maximum(started[shown], begin) - begin, left[shown] - begin
    boxes = [(start / 1e9, (end - start) / 1e9) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    axes.broken_barh(boxes, (row - 0.4, 0.8), facecolors=color, linewidth=0)  # type: ignore[attr-defined]
