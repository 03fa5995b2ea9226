"""The figures of `axonmpi bench collectives` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....utils.text import counted
from .table import VARIANTS, label

__all__ = ["plot"]


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw time against size, both logarithmic, as a PNG; replaces an existing file. Local.

    A row for each number of ranks, a column for each operation and dtype, a line for each variant.

    Args:
        path: The file to write.
        results: What `measure` has returned, for each number of ranks.
    """
    # not pyplot: its state is shared by the threads of a process, and it looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((case["operation"], case["dtype"]) for case in results[0]["cases"]))
    figure = Figure(figsize=(5 * len(kinds), 4 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(results), len(kinds), squeeze=False)
    for row, result in zip(grid, results, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            _draw(axes, result, *kind)
    figure.savefig(path, dpi=120, format="png")


def _draw(axes: Any, result: dict[str, Any], operation: str, dtype: str) -> None:
    cases = [case for case in result["cases"] if (case["operation"], case["dtype"]) == (operation, dtype)]
    for number, variant in enumerate(VARIANTS):
        points = [
            (case["bytes"], case["microseconds"][variant]) for case in cases if variant in case["microseconds"]
        ]
        if points:
            sizes, times = zip(*points, strict=True)
            axes.loglog(sizes, times, f"C{number}o-", markersize=3, label=label(variant, result))
    axes.set(xlabel="bytes", ylabel="µs", title=f"{operation}, {dtype}, {counted(result['ranks'], 'rank')}")
    axes.grid(alpha=0.3)
    axes.legend()
