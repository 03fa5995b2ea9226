"""Collectives between nodes: ours beside the MPI library's own and gloo's, all of them in one job.

    symmetric   ours, on a tensor of `symmetric_empty`; of all_reduce only
    ordinary    ours, on any other tensor
    mpi         mpi4py on numpy arrays, at the thread level that axonmpi needs
    gloo        torch.distributed
    bfloat16    ours, on as many elements of bfloat16 as there are of float32; of all_reduce only

A broadcast is complete on its source before its data is elsewhere, so each is closed by its own library's barrier.
Results are checked before anything is timed, as in `axonmpi bench collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ....comm import barrier, symmetric_empty
from ....groups.world import World
from ....launch import start as runtime
from ....utils.memory import flat_zeros
from ....utils.text import aligned, counted
from ..harness.timing import count_cores, start_gloo
from .cases import Case, Variant, format_size, format_time, mpi_variant, our_variant, torch_variant
from .comparison import library_name, median_times

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DEFAULT_SIZES = ("4B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB", "8MiB")
BLOCK_SECONDS = 0.02


def measure(
    world: World, blocks: int, operations: Sequence[str], sizes: Sequence[int], seconds: float, *, gloo: bool
) -> dict[str, Any]:
    """Measure every operation on float32 of every size; collective.

    Args:
        world: All ranks of the job.
        blocks: Number of turns of each variant.
        operations: Some of `OPERATIONS`.
        sizes: Of the whole tensor, in bytes: of an all_gather its result, of a reduce_scatter what a rank puts in.
        seconds: How long a variant's turn takes, of calls that are quicker.
        gloo: Whether torch.distributed is among the variants.

    Returns:
        The ranks, nodes and cores, the MPI library's name, and the cases, each with the variants' times in
        microseconds and the ratios that `_ratios` names.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    mpi = runtime.start_mpi()
    if gloo:
        start_gloo(world)
    cases = [Case(name, torch.float32, nbytes, world.rank, world.size) for name in operations for nbytes in sizes]
    measured = [_measure_case(case, mpi, blocks, seconds) for case in cases]
    if gloo:
        dist.destroy_process_group()
    return {
        "ranks": world.size,
        "nodes": world.num_nodes,
        "cores": count_cores(world),
        "mpi": library_name(mpi),
        "blocks": blocks,
        "cases": measured,
    }


def _measure_case(case: Case, mpi: Any, blocks: int, seconds: float) -> dict[str, Any]:
    times = median_times(case, _variants(case, mpi), blocks, block_seconds=seconds)
    return {
        "operation": case.operation,
        "bytes": case.nbytes,
        "microseconds": times,
        "ratios": _ratios(times),
    }


def _ratios(times: dict[str, float]) -> dict[str, float]:
    """Return the time of ours over those of others, and of bfloat16 over that of float32; local."""
    ours, half = (
        min((times[name] for name in names if name in times), default=0.0)
        for names in (("symmetric", "ordinary"), ("bfloat16 symmetric", "bfloat16 ordinary"))
    )
    over = {name: ours / times[name] for name in ("mpi", "gloo") if name in times}
    return over | ({"bfloat16": half / ours} if half else {})


def _variants(case: Case, mpi: Any) -> dict[str, Variant]:
    """Prepare all ways to do a case; collective."""
    others = {"mpi": mpi_variant(case, mpi)} | ({"gloo": torch_variant(case)} if dist.is_initialized() else {})
    variants = {"ordinary": our_variant(case, flat_zeros(case.source_numel, case.dtype)), **others}
    if case.operation == "all_reduce":
        half = replace(case, dtype=torch.bfloat16, nbytes=case.nbytes // 2)
        return {
            "symmetric": our_variant(case, symmetric_empty([case.source_numel], case.dtype)),
            **variants,
            "bfloat16 symmetric": our_variant(half, symmetric_empty([half.source_numel], half.dtype)),
            "bfloat16 ordinary": our_variant(half, flat_zeros(half.source_numel, half.dtype)),
        }
    if case.operation == "broadcast":
        barriers = {"ordinary": barrier, "mpi": mpi.COMM_WORLD.Barrier, "gloo": dist.barrier}
        return {name: _closed(variant, barriers[name]) for name, variant in variants.items()}
    return variants


def _closed(variant: Variant, close: Callable[[], object]) -> Variant:
    def call() -> None:
        variant.call()
        close()

    return replace(variant, call=call)


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures: for each number of ranks a table for each operation."""
    return "\n\n".join(block for result in results for block in _tables(result))


def _tables(result: dict[str, Any]) -> list[str]:
    job = f"{counted(result['ranks'], 'rank')} on {counted(result['nodes'], 'node')}"
    names = {"symmetric": "symmetric", "ordinary": "ordinary", "mpi": result["mpi"], "gloo": "gloo"}
    above = ["", *("" for _ in names), "|", "ours", "ours", "|", "bfloat16"]
    below = ["size", *names.values(), "|", f"/ {names['mpi']}", "/ gloo", "|", "/ float32"]
    blocks = []
    for operation, cases in groupby(result["cases"], key=lambda case: str(case["operation"])):
        title = f"{operation}, float32, {job}, {counted(result['cores'], 'core')}; medians; and ratios"
        rows = [
            [
                format_size(case["bytes"]),
                *(format_time(case["microseconds"].get(name)) for name in names),
                *("|", *(_ratio(case, name) for name in ("mpi", "gloo")), "|", _ratio(case, "bfloat16")),
            ]
            for case in cases
        ]
        blocks.append("\n".join([title, *aligned([above, below, *rows])]))
    return blocks


def _ratio(case: dict[str, Any], name: str) -> str:
    return f"{case['ratios'][name]:.2f}" if name in case["ratios"] else "-"
