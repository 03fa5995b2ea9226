"""Collectives between nodes: ours beside the MPI library's own and gloo's, all of them in one job.

    symmetric   ours, on a tensor of `symmetric_empty`; of all_reduce only
    ordinary    ours, on any other tensor
    mpi         mpi4py on numpy arrays, at the thread level that axonmpi needs
    gloo        torch.distributed
    bfloat16    ours, on as many elements of bfloat16 as there are of float32; of all_reduce only

A broadcast is complete on its root before its data is elsewhere, so each is closed by its own library's barrier.
Results are checked before anything is timed, as in `axonmpi bench collectives`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ....comm import barrier, symmetric_empty
from ....groups.world import World
from ....launch import start as runtime
from ....utils.text import counted
from ..harness.benchmark import Benchmark, Figures
from ..harness.options import choices, sizes
from ..harness.table import BAR, Column, table_lines
from .cases import CollectiveCase, Variant, library_name, measure_variants, mpi_variant, our_variant, torch_variant
from .comparison import SIZE, time_column

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
_DEFAULT_SIZES = ("4B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB", "8MiB")
_BLOCK_SECONDS = 0.02


# ---- measuring --------------------------------------------------------------------------------------------------


def _measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure every operation on float32 of every size; collective.

    A size is that of the full tensor: the result of an all_gather, the source of a reduce_scatter.

    Returns:
        The number of nodes, the MPI library's name, and the cases, each with the variants' times in microseconds
        and the ratios of `_ratios`.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    mpi = runtime.start_mpi()
    measured = []
    for operation in options.operations:
        for nbytes in options.sizes:
            case = CollectiveCase(operation, torch.float32, nbytes, world.rank, world.size)
            times = measure_variants(_variants(case, mpi), options.blocks, block_seconds=options.seconds)
            measured.append(
                {"operation": operation, "bytes": nbytes, "microseconds": times, "ratios": _ratios(times)}
            )
    return {"nodes": world.num_nodes, "mpi": library_name(mpi), "blocks": options.blocks, "cases": measured}


def _ratios(times: dict[str, float]) -> dict[str, float]:
    """Return our time over the others', and our time of bfloat16 over that of float32."""
    ours = min(times[name] for name in ("symmetric", "ordinary") if name in times)
    ratios: dict[str, float] = {name: ours / times[name] for name in ("mpi", "gloo") if name in times}
    if "bfloat16 ordinary" in times:
        ratios["bfloat16"] = min(times["bfloat16 symmetric"], times["bfloat16 ordinary"]) / ours
    return ratios


def _variants(case: CollectiveCase, mpi: Any) -> dict[str, Variant]:
    """Return all variants of a case; collective."""
    variants = {"ordinary": our_variant(case, case.zeros()), "mpi": mpi_variant(case, mpi)}
    if dist.is_initialized():
        variants["gloo"] = torch_variant(case)
    if case.operation == "all_reduce":
        half = replace(case, dtype=torch.bfloat16, nbytes=case.nbytes // 2)
        variants["symmetric"] = our_variant(case, symmetric_empty([case.source_numel], case.dtype))
        variants["bfloat16 symmetric"] = our_variant(half, symmetric_empty([half.source_numel], half.dtype))
        variants["bfloat16 ordinary"] = our_variant(half, half.zeros())
    if case.operation == "broadcast":
        barriers = {"ordinary": barrier, "mpi": mpi.COMM_WORLD.Barrier, "gloo": dist.barrier}
        return {name: _closed(variant, barriers[name]) for name, variant in variants.items()}
    return variants


def _closed(variant: Variant, close: Callable[[], object]) -> Variant:
    """Return a variant whose call ends with a barrier."""

    def call() -> None:
        variant.call()
        close()

    return replace(variant, call=call)


# ---- tables -----------------------------------------------------------------------------------------------------


def _table(results: list[Figures]) -> str:
    return "\n\n".join(block for result in results for block in _tables(result))


def _tables(result: Figures) -> list[str]:
    job = f"{counted(result['ranks'], 'rank')} on {counted(result['nodes'], 'node')}"
    columns: list[Column] = [
        SIZE,
        time_column("symmetric", "symmetric"),
        time_column("ordinary", "ordinary"),
        time_column("mpi", result["mpi"]),
        time_column("gloo", "gloo"),
        BAR,
        (f"ours\n/ {result['mpi']}", _ratio("mpi")),
        ("ours\n/ gloo", _ratio("gloo")),
        BAR,
        ("bfloat16\n/ float32", _ratio("bfloat16")),
    ]
    blocks = []
    for operation, cases in groupby(result["cases"], key=lambda case: str(case["operation"])):
        title = f"{operation}, float32, {job}, {counted(result['cores'], 'core')}; medians; and ratios"
        blocks.append("\n".join([title, *table_lines(columns, cases)]))
    return blocks


def _ratio(name: str) -> Callable[[Figures], str]:
    return lambda case: f"{case['ratios'][name]:.2f}" if name in case["ratios"] else "-"


NETWORK = Benchmark(
    "collectives between nodes: ours, the MPI library's own, gloo's; under mpirun on ranks of several nodes",
    _measure,
    _table,
    options={
        "--operations": choices(OPERATIONS),
        "--sizes": sizes(_DEFAULT_SIZES),
        "--seconds": {
            "type": float,
            "default": _BLOCK_SECONDS,
            "help": f"how long a variant's turn takes, of calls that are quicker (default: {_BLOCK_SECONDS})",
            "metavar": "S",
        },
        "--no-gloo": {"dest": "torch", "action": "store_false", "help": "without torch.distributed"},
    },
)
