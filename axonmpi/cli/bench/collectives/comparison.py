"""Collectives of many sizes: ours, MPI's own and torch.distributed's, above the time of a plain copy.

    symmetric   ours, on a tensor of `symmetric_empty`
    ordinary    ours, on any other tensor
    mpi         mpi4py on numpy arrays, in place if MPI can do that; float32 only, MPI has no bfloat16;
                here at MPI_THREAD_MULTIPLE, see `mpi_alone`
    gloo        torch.distributed
    torch       torch.distributed on NCCL, in place of mpi and gloo for tensors on GPUs
    memcpy      each rank copies as many bytes within its own memory, all at once: the floor

For each operation, dtype and size they take turns. Before that each runs once on known values, and its result is
checked: no wrong result is timed. On GPUs a time is the GPU's, from events; the CPU's time for a call is measured
apart.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ....comm import symmetric_empty
from ....groups.world import World
from ....launch import start as runtime
from ....utils.device import Device, device_at
from ....utils.pictures import import_matplotlib
from ....utils.text import counted
from ..harness.benchmark import Benchmark, Figures
from ..harness.options import PICTURE, choices, sizes
from ..harness.table import BAR, Column, format_size, format_time, ratio, table_lines
from ..harness.timing import MICROSECONDS, device_clock, enqueue_clock, interleave
from . import mpi_alone
from .cache_line import LineProbe
from .cases import (
    OPERATIONS,
    CollectiveCase,
    Variant,
    library_name,
    measure_variants,
    memcpy_variant,
    mpi_variant,
    our_variant,
    torch_variant,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS = ("symmetric", "ordinary", "mpi", "gloo", "memcpy")
_GPU_VARIANTS = ("ordinary", "torch", "memcpy")
_GPU_CALLS = 32
"""Calls that a GPU gets in a block at most, so that the CPU never waits for room in its queue."""


# ---- measuring --------------------------------------------------------------------------------------------------


def measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure every operation with every dtype at every size; collective.

    Returns:
        The path between the ranks, the MPI library's name, and the cases, each with the variants' times in
        microseconds, and the time that it took meanwhile to write a cache line that another rank had read, in
        nanoseconds, None if ranks do not read each other's memory. If MPI is among the variants,
        `mpi_microseconds` has its time by thread level. On GPUs, `cpu_microseconds` is the time of the CPU until a
        call returns.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    device = device_at(world.device)
    mpi = None if device.is_asynchronous else runtime.start_mpi()
    probe = LineProbe(world)
    measured = []
    for operation in options.operations:
        for dtype in options.dtypes:
            for nbytes in options.sizes:
                case = CollectiveCase(operation, DTYPES[dtype], nbytes, world.rank, world.size, world.device)
                measured.append(_measure_case(case, mpi, options.blocks, probe, device))
    return {
        "path": "nccl" if mpi is None else getattr(world.default_group.backend, "path", "none"),
        "mpi": "" if mpi is None else library_name(mpi),
        "device": str(device),
        "blocks": options.blocks,
        "cases": measured,
    }


def _measure_case(case: CollectiveCase, mpi: Any, blocks: int, probe: LineProbe, device: Device) -> Figures:
    variants = _variants(case, mpi)
    times = measure_variants(variants, blocks, before=probe.sample, clock=device_clock(device))
    cpu_times: dict[str, float] = {}
    if device.is_asynchronous:
        calls = {name: variant.call for name, variant in variants.items()}
        cpu_times = interleave(
            calls, blocks=blocks, calls=_GPU_CALLS, unit=MICROSECONDS, clock=enqueue_clock(device)
        )
    return {
        "operation": case.operation,
        "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.nbytes,
        "microseconds": times,
        "mpi_microseconds": {runtime.thread_level(mpi): times["mpi"]} if "mpi" in times else {},
        "cpu_microseconds": cpu_times,
        "line_nanoseconds": probe.median(),
    }


def _variants(case: CollectiveCase, mpi: Any) -> dict[str, Variant]:
    """Return all variants of a case; collective. `mpi` is the module `mpi4py.MPI`, None for tensors on GPUs."""
    variants = {"ordinary": our_variant(case, case.zeros()), "memcpy": memcpy_variant(case)}
    if mpi is not None:
        variants["symmetric"] = our_variant(case, symmetric_empty([case.source_numel], case.dtype))
        if case.dtype == torch.float32:
            variants["mpi"] = mpi_variant(case, mpi)
    if dist.is_initialized():
        variants["torch" if mpi is None else "gloo"] = torch_variant(case)
    return {name: variants[name] for name in (*VARIANTS, "torch") if name in variants}


# ---- tables -----------------------------------------------------------------------------------------------------

_PATHS = {
    "node": "node, through memory that they share",
    "nodes": "nodes, through shared memory on each node, by MPI's messages between nodes",
    "plain": "plain, by MPI's messages",
    "nccl": "NCCL",
}


def table(results: list[Figures]) -> str:
    """Format the figures: for each number of ranks the path between them, then a table for each operation."""
    return "\n\n".join(block for result in results for block in (_opening(result), *_tables(result)))


def _opening(result: Figures) -> str:
    job = f"{counted(result['ranks'], 'rank')}, {counted(result['cores'], 'core')}"
    lines = [f"{job}; path between the ranks: {_PATHS.get(result['path'], result['path'])}"]
    levels = list(dict.fromkeys(level for case in result["cases"] for level in case["mpi_microseconds"]))
    if len(levels) == 1:
        lines.append(f"{result['mpi']}: at {levels[0]}")
    elif levels:
        lines.append(f"{result['mpi']}: the quicker of {' and '.join(levels)}, each in its own job")
    return "\n".join(lines)


def _tables(result: Figures) -> list[str]:
    columns = _gpu_columns() if _is_of_gpus(result) else _cpu_columns(result["mpi"])
    blocks = []
    for kind, cases in groupby(result["cases"], key=lambda case: (case["operation"], case["dtype"])):
        ranks = counted(result["ranks"], "rank")
        title = f"{', '.join(kind)}, {ranks}; the slowest rank's time, medians; and ratios"
        blocks.append("\n".join([title, *table_lines(columns, cases)]))
    return blocks


def _is_of_gpus(result: Figures) -> bool:
    return any(case.get("cpu_microseconds") for case in result["cases"])


def _cpu_columns(mpi: str) -> list[Column]:
    return [
        SIZE,
        *(time_column(name, mpi if name == "mpi" else name) for name in VARIANTS),
        BAR,
        ("symmetric\n/ memcpy", ratio("symmetric", "memcpy", "microseconds")),
        (f"{mpi}\n/ symmetric", ratio("mpi", "symmetric", "microseconds")),
        (f"{mpi}\n/ ordinary", ratio("mpi", "ordinary", "microseconds")),
        ("gloo\n/ symmetric", ratio("gloo", "symmetric", "microseconds")),
        BAR,
        ("line\nwrite", lambda case: "-" if (line := case["line_nanoseconds"]) is None else f"{line:.1f} ns"),
    ]


def _gpu_columns() -> list[Column]:
    return [
        SIZE,
        *(time_column(name, name) for name in _GPU_VARIANTS),
        BAR,
        ("ordinary\n/ memcpy", ratio("ordinary", "memcpy", "microseconds")),
        ("torch\n/ ordinary", ratio("torch", "ordinary", "microseconds")),
        BAR,
        ("CPU\nordinary", lambda case: format_time(case["cpu_microseconds"].get("ordinary"))),
        ("CPU\ntorch", lambda case: format_time(case["cpu_microseconds"].get("torch"))),
    ]


SIZE: Column = ("size", lambda case: format_size(case["bytes"]))


def time_column(variant: str, heading: str) -> Column:
    """Return the column of a variant's time; "-" if it is not among a case's variants."""
    return heading, lambda case: format_time(case["microseconds"].get(variant))


# ---- picture ----------------------------------------------------------------------------------------------------


def plot(path: Path, results: list[Figures]) -> None:
    """Draw time against size, both logarithmic, as a PNG; replaces an existing file.

    A row for each number of ranks, a column for each operation and dtype, a line for each variant.
    """
    import_matplotlib()
    # Not pyplot: the threads of a process share its state, and it looks for a display.
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((case["operation"], case["dtype"]) for case in results[0]["cases"]))
    drawing = Figure(figsize=(5 * len(kinds), 4 * len(results)), layout="constrained")
    grid = drawing.subplots(len(results), len(kinds), squeeze=False)
    for row, result in zip(grid, results, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            _draw(axes, result, *kind)
    drawing.savefig(path, dpi=120, format="png")


def _draw(axes: Any, result: Figures, operation: str, dtype: str) -> None:
    cases = [case for case in result["cases"] if (case["operation"], case["dtype"]) == (operation, dtype)]
    for number, variant in enumerate(_GPU_VARIANTS if _is_of_gpus(result) else VARIANTS):
        measured = [case for case in cases if variant in case["microseconds"]]
        if measured:
            nbytes = [case["bytes"] for case in measured]
            times = [case["microseconds"][variant] for case in measured]
            label = result["mpi"] if variant == "mpi" else variant
            axes.loglog(nbytes, times, f"C{number}o-", markersize=3, label=label)
    axes.set(xlabel="bytes", ylabel="µs", title=f"{operation}, {dtype}, {counted(result['ranks'], 'rank')}")
    axes.grid(alpha=0.3)
    axes.legend()


# ---- command ----------------------------------------------------------------------------------------------------

_DEFAULT_SIZES = ("4B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB", "16MiB", "64MiB")

COLLECTIVES = Benchmark(
    "collectives of many sizes: ours, MPI's own, torch.distributed's, and a plain copy",
    measure,
    table,
    options={
        "--plot": PICTURE,
        "--operations": choices(OPERATIONS, ["all_reduce"]),
        "--device": {
            "choices": ("cpu", "cuda"),
            "help": "where tensors are: with cuda by NCCL, beside torch.distributed's (default: cpu)",
        },
        "--dtypes": choices(tuple(DTYPES), metavar="DTYPE"),
        "--sizes": sizes(_DEFAULT_SIZES),
    },
    plot=plot,
    measure_mpi=mpi_alone.measure,
    add_mpi=mpi_alone.add,
)
