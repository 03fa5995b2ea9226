"""The definition of a benchmark, and the steps that all of them have in common on the ranks of a job."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....comm import all_gather_object
from ....groups.world import World
from ....launch.cpu import usable_cores
from ....utils.device import device_at
from .options import Options
from .timing import OVER_AXONMPI
from .torch_groups import start_torch

TOLERANCE = 1e-4
"""The largest error of a result, relative to its largest element."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A comparison of variants that are measured in turns on the same ranks.

    Attributes:
        title: The variants compared, for the help.
        measure: Returns the figures of this job's ranks; collective.
        table: Formats the figures of several numbers of ranks.
        ranks: The default numbers of ranks.
        options: This benchmark's own options.
        blocks: The default number of turns of each variant.
        uses_torch: True if torch.distributed is among the variants.
        plot: Draws the figures into a file.
        measure_mpi: Measures MPI alone, in a job without axonmpi's communication; collective, result on rank 0.
        add_mpi: Adds the figures of MPI alone; its second argument runs that job, and is called only if needed.
    """

    title: str
    measure: Callable[[World, argparse.Namespace], Figures]
    table: Callable[[list[Figures]], str]
    ranks: tuple[int, ...] = (2, 4)
    options: Options = field(default_factory=dict)
    blocks: int = 15
    uses_torch: bool = True
    plot: Callable[[Path, list[Figures]], None] | None = None
    measure_mpi: Callable[[argparse.Namespace], Figures | None] | None = None
    add_mpi: Callable[[Figures, Callable[[], Figures]], None] | None = None

    def figures(self, world: World, options: argparse.Namespace) -> Figures:
        """Measure on all ranks, and describe them; collective."""
        backend = _torch_backend(world) if options.torch else ""
        if backend:
            start_torch(world, backend)
        traced = world.trace(options.trace / f"{world.size}-ranks") if options.trace else nullcontext()
        with traced:
            measured = self.measure(world, options)

        # Not after an error: to stop torch.distributed waits for the other ranks, which may wait for this one.
        # Not before the models of `measure` are gone: torch's DDP, freed later, would wait for a thread of gloo
        # that needs the interpreter lock.
        if backend:
            dist.destroy_process_group()
        threads = torch.get_num_threads()
        return {"ranks": world.size, "cores": _count_cores(world), "threads": threads, **measured}


def _torch_backend(world: World) -> str:
    """Return the name of torch.distributed's backend for the ranks' device; empty if torch has none."""
    if not device_at(world.device).is_asynchronous:
        return "gloo"
    return "nccl" if dist.is_nccl_available() else ""


def _count_cores(world: World) -> int:
    """Return the number of logical CPUs that all ranks may run on together, each counted once; collective."""
    cores_of_ranks = all_gather_object((world.node_rank, usable_cores()))
    return len({(node, core) for node, cores in cores_of_ranks for core in cores})


def check_multiple(name: str, value: int, divisor: int, meaning: str = "") -> None:
    """Raise ValueError unless an option's value is a multiple of a divisor, whose meaning is in the message."""
    if value % divisor:
        expected = f"{meaning} = {divisor}" if meaning else divisor
        raise ValueError(f"{name}: expected a multiple of {expected}, got {value}")


def largest_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of results, relative to the largest element of each; local, inf for NaN."""
    errors = [
        float((result - right).abs().max() / right.abs().max())
        for result, right in zip(results, expected, strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def check_error(variant: str, kind: str, error: float, world: World) -> None:
    """Raise RuntimeError on all ranks if a variant's results have too large an error on one of them; collective.

    Args:
        variant: Its name.
        kind: A noun for the results, in the plural.
        error: This rank's largest error, relative to the results of one process.
        world: All ranks.
    """
    worst = OVER_AXONMPI.maximum(error)
    if worst > TOLERANCE:
        raise RuntimeError(
            f"{variant} on {world.size} ranks: {kind} are not those of one process, off by {worst:.1e} of "
            f"the largest, expected at most {TOLERANCE:.0e}"
        )
