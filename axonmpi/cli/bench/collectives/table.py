"""The figures of `axonmpi bench collectives` as tables and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ....utils.text import aligned, counted
from .cases import format_size, format_time

VARIANTS = ("symmetric", "ordinary", "mpi", "gloo", "memcpy")
RATIOS = (("symmetric", "memcpy"), ("mpi", "symmetric"), ("mpi", "ordinary"), ("gloo", "symmetric"))
_PATHS = {
    "node": "node, through memory that they share",
    "nodes": "nodes, through shared memory on each node, by MPI's messages between nodes",
    "plain": "plain, by MPI's messages",
    "nccl": "NCCL",
}


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures: for each number of ranks how they reach each other, then a table for each operation."""
    return "\n\n".join(block for result in results for block in (_opening(result), *_tables(result)))


def _label(variant: str, result: dict[str, Any]) -> str:
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


@dataclass(frozen=True)
class _Columns:
    """What tables and pictures show."""

    variants: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    told: tuple[str, ...] = ()
    """Variants of which the time of the CPU until a call returns is shown, in place of a line's."""


_ON_CPUS = _Columns(VARIANTS, RATIOS)
_ON_GPUS = _Columns(
    ("ordinary", "torch", "memcpy"), (("ordinary", "memcpy"), ("torch", "ordinary")), told=("ordinary", "torch")
)


def _columns(result: dict[str, Any]) -> _Columns:
    return _ON_GPUS if any(case.get("cpu_microseconds") for case in result["cases"]) else _ON_CPUS


def _tables(result: dict[str, Any]) -> list[str]:
    columns = _columns(result)
    over, under = ([_label(ratio[side], result) for ratio in columns.ratios] for side in (0, 1))
    names = [_label(name, result) for name in columns.variants]
    above = ["", *("" for _ in names), "|", *over, "|", *(["CPU"] * len(columns.told) or ["line"])]
    below = ["size", *names, "|", *(f"/ {name}" for name in under), "|", *(columns.told or ["write"])]
    blocks = []
    for kind, cases in groupby(result["cases"], key=lambda case: (case["operation"], case["dtype"])):
        ranks = counted(result["ranks"], "rank")
        title = f"{', '.join(kind)}, {ranks}; the slowest rank's time, medians; and ratios"
        blocks.append("\n".join([title, *aligned([above, below, *(_row(case, columns) for case in cases)])]))
    return blocks


def _row(case: dict[str, Any], columns: _Columns) -> list[str]:
    times, line = case["microseconds"], case["line_nanoseconds"]
    shown = [format_time(times.get(name)) for name in columns.variants]
    ratios = [
        f"{times[over] / times[under]:.2f}" if over in times and under in times else "-"
        for over, under in columns.ratios
    ]
    told = [format_time(case["cpu_microseconds"].get(name)) for name in columns.told]
    last = told or ["-" if line is None else f"{line:.1f} ns"]
    return [format_size(case["bytes"]), *shown, "|", *ratios, "|", *last]


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw time against size, both logarithmic, as a PNG; replaces an existing file. Local.

    A row for each number of ranks, a column for each operation and dtype, a line for each variant.

    Args:
        path: The file to write.
        results: What `measure` has returned, for each number of ranks.
    """
    # not pyplot: the threads of a process share its state, and it looks for a display
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((case["operation"], case["dtype"]) for case in results[0]["cases"]))
    figure = Figure(figsize=(5 * len(kinds), 4 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), len(kinds), squeeze=False)
    for row, result in zip(grid, results, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            _draw(axes, result, *kind)
    figure.savefig(path, dpi=120, format="png")


def _draw(axes: Any, result: dict[str, Any], operation: str, dtype: str) -> None:
    cases = [case for case in result["cases"] if (case["operation"], case["dtype"]) == (operation, dtype)]
    for number, variant in enumerate(_columns(result).variants):
        points = [
            (case["bytes"], case["microseconds"][variant]) for case in cases if variant in case["microseconds"]
        ]
        if points:
            sizes, times = zip(*points, strict=True)
            axes.loglog(sizes, times, f"C{number}o-", markersize=3, label=_label(variant, result))
    axes.set(xlabel="bytes", ylabel="µs", title=f"{operation}, {dtype}, {counted(result['ranks'], 'rank')}")
    axes.grid(alpha=0.3)
    axes.legend()
