"""The figures of `axonmpi bench collectives` as tables."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..sizes import format_size

__all__ = ["VARIANTS", "count_of", "label", "table"]

VARIANTS = ("symmetric", "ordinary", "mpi", "gloo", "memcpy")
RATIOS = (("symmetric", "memcpy"), ("mpi", "symmetric"), ("mpi", "ordinary"), ("gloo", "symmetric"))
_PATHS = {
    "node": "through memory that they share",
    "nodes": "through shared memory on each node, by MPI's messages between nodes",
    "plain": "by MPI's messages",
}
_WIDTH = 11


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures: for each number of ranks how they reach each other, then a table for each operation."""
    return "\n\n".join(block for result in results for block in (_opening(result), *_tables(result)))


def label(variant: str, result: dict[str, Any]) -> str:
    """Return the name that a variant is shown with: MPI's is that of its library; local."""
    return str(result["mpi"]) if variant == "mpi" else variant


def _opening(result: dict[str, Any]) -> str:
    path = result["path"]
    how = f"{path}, {_PATHS[path]}" if path in _PATHS else path
    job = f"{count_of(result['ranks'], 'rank')}, {count_of(result['cores'], 'core')}"
    return "\n".join([f"{job}; path between the ranks: {how}", *_thread_levels(result)])


def _thread_levels(result: dict[str, Any]) -> list[str]:
    """Say what MPI's column is, if there is one."""
    levels = list(dict.fromkeys(level for case in result["cases"] for level in case["mpi_microseconds"]))
    if not levels:
        return []
    what = f"at {levels[0]}" if len(levels) == 1 else f"the quicker of {' and '.join(levels)}, each in its own job"
    return [f"{label('mpi', result)}: {what}"]


def _tables(result: dict[str, Any]) -> list[str]:
    blocks = []
    for kind, cases in groupby(result["cases"], key=lambda case: (case["operation"], case["dtype"])):
        title = (
            f"{', '.join(kind)}, {count_of(result['ranks'], 'rank')}; the slowest rank's time, medians; and ratios"
        )
        blocks.append("\n".join([title, *_header(result), *(_row(case) for case in cases)]))
    return blocks


def _header(result: dict[str, Any]) -> list[str]:
    names = "".join(f" {label(variant, result):>{_WIDTH}}" for variant in VARIANTS)
    above = "".join(f" {label(over, result):>{_WIDTH}}" for over, _ in RATIOS)
    below = "".join(f" {'/ ' + label(under, result):>{_WIDTH}}" for _, under in RATIOS)
    return [f"{'':>8}{'':>{len(names)}} |{above} |{'line':>8}", f"{'size':>8}{names} |{below} |{'write':>8}"]


def _row(case: dict[str, Any]) -> str:
    times = case["microseconds"]
    shown = "".join(f" {_time(times.get(variant)):>{_WIDTH}}" for variant in VARIANTS)
    ratios = "".join(f" {_ratio(times.get(over), times.get(under)):>{_WIDTH}}" for over, under in RATIOS)
    line = case["line_nanoseconds"]
    return f"{format_size(case['bytes']):>8}{shown} |{ratios} |{'-' if line is None else f'{line:.1f} ns':>8}"


def count_of(number: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks` and so on; local."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:.2f} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or under is None else f"{over / under:.2f}"
