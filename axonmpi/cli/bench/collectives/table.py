"""The figures of `axonmpi bench collectives` as tables."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ....utils.text import aligned, counted
from .cases import format_size

__all__ = ["VARIANTS", "label", "table"]

VARIANTS = ("symmetric", "ordinary", "mpi", "gloo", "memcpy")
RATIOS = (("symmetric", "memcpy"), ("mpi", "symmetric"), ("mpi", "ordinary"), ("gloo", "symmetric"))
_PATHS = {
    "node": "node, through memory that they share",
    "nodes": "nodes, through shared memory on each node, by MPI's messages between nodes",
    "plain": "plain, by MPI's messages",
}


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures: for each number of ranks how they reach each other, then a table for each operation."""
    return "\n\n".join(block for result in results for block in (_opening(result), *_tables(result)))


def label(variant: str, result: dict[str, Any]) -> str:
    """Return the name that a variant is shown with: MPI's is that of its library; local."""
    return str(result["mpi"]) if variant == "mpi" else variant


def _opening(result: dict[str, Any]) -> str:
    job = f"{counted(result['ranks'], 'rank')}, {counted(result['cores'], 'core')}"
    lines = [f"{job}; path between the ranks: {_PATHS.get(result['path'], result['path'])}"]
    levels = list(dict.fromkeys(level for case in result["cases"] for level in case["mpi_microseconds"]))
    if len(levels) == 1:
        lines.append(f"{result['mpi']}: at {levels[0]}")
    elif levels:
        lines.append(f"{result['mpi']}: the quicker of {' and '.join(levels)}, each in its own job")
    return "\n".join(lines)


def _tables(result: dict[str, Any]) -> list[str]:
    over, under = ([label(ratio[side], result) for ratio in RATIOS] for side in (0, 1))
    above = ["", *("" for _ in VARIANTS), "|", *over, "|", "line"]
    below = [
        "size",
        *(label(name, result) for name in VARIANTS),
        "|",
        *(f"/ {name}" for name in under),
        "|",
        "write",
    ]
    blocks = []
    for kind, cases in groupby(result["cases"], key=lambda case: (case["operation"], case["dtype"])):
        ranks = counted(result["ranks"], "rank")
        title = f"{', '.join(kind)}, {ranks}; the slowest rank's time, medians; and ratios"
        blocks.append("\n".join([title, *aligned([above, below, *map(_row, cases)])]))
    return blocks


def _row(case: dict[str, Any]) -> list[str]:
    times, line = case["microseconds"], case["line_nanoseconds"]
    shown = [_time(times[name]) if name in times else "-" for name in VARIANTS]
    ratios = [
        f"{times[over] / times[under]:.2f}" if over in times and under in times else "-" for over, under in RATIOS
    ]
    return [format_size(case["bytes"]), *shown, "|", *ratios, "|", "-" if line is None else f"{line:.1f} ns"]


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"
