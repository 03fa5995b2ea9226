"""Which benchmarks there are, and the options that each has for itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...groups.world import World
from . import ddp, fsdp, overhead, pipeline, tensor
from .collectives import measure as collectives
from .collectives import mpi as collectives_mpi
from .collectives import plot as collectives_plot
from .collectives import table as collectives_table
from .sizes import parse_size

__all__ = ["BENCHMARKS", "Benchmark", "Figures"]

Figures = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        title: What it compares.
        measure: Measures on the ranks of a world, as the options say; collective.
        table: Formats the figures of several numbers of ranks.
        ranks: The numbers of ranks where none are given.
        add_options: Adds the options that it alone has.
        plot: Draws the figures into a file, where there is something to draw.
        measure_mpi: Measures MPI alone, in a job that axonmpi takes no part in; collective, rank 0's result counts.
        add_mpi: Adds that to the figures; runs the job by calling what it is given, if there is need.
    """

    title: str
    measure: Callable[[World, argparse.Namespace], Figures]
    table: Callable[[list[Figures]], str]
    ranks: tuple[int, ...]
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    plot: Callable[[Path, list[Figures]], None] | None = None
    measure_mpi: Callable[[argparse.Namespace], Figures | None] | None = None
    add_mpi: Callable[[Figures, Callable[[], Figures]], None] | None = None


def _measure_collectives(world: World, options: argparse.Namespace) -> Figures:
    return collectives.measure(world, options.blocks, options.operations, options.dtypes, options.sizes)


def _add_collectives_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=collectives.OPERATIONS,
        default=["all_reduce"],
        help=f"some of {', '.join(collectives.OPERATIONS)} (default: all_reduce)",
        metavar="NAME",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=tuple(collectives.DTYPES),
        default=list(collectives.DTYPES),
        help=f"some of {', '.join(collectives.DTYPES)} (default: all)",
        metavar="DTYPE",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        default=[parse_size(size) for size in collectives.DEFAULT_SIZES],
        help=f"bytes of a tensor (default: {' '.join(collectives.DEFAULT_SIZES)})",
        metavar="SIZE",
    )


def _add_fsdp_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=int,
        default=fsdp.BATCH,
        help=f"samples of a step on each rank (default: {fsdp.BATCH})",
        metavar="N",
    )


def _size(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if nbytes % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 bytes, got {text!r}")
    return nbytes


BENCHMARKS: dict[str, Benchmark] = {
    "collectives": Benchmark(
        "collectives of many sizes: ours, MPI's own, gloo's, and a plain copy",
        _measure_collectives,
        collectives_table.table,
        (2, 4),
        _add_collectives_options,
        collectives_plot.plot,
        lambda options: collectives_mpi.measure(options.blocks, options.operations, options.sizes),
        collectives_mpi.add,
    ),
    "ddp": Benchmark(
        "step overhead of data parallelism, ours and torch's on gloo",
        lambda world, options: ddp.measure(world, options.blocks),
        ddp.table,
        (2, 4),
    ),
    "fsdp": Benchmark(
        "a step of fully sharded training: ours, torch's on gloo, and data parallelism; time and memory",
        lambda world, options: fsdp.measure(world, options.blocks, options.batch),
        fsdp.table,
        (2, 4),
        _add_fsdp_options,
    ),
    "overhead": Benchmark(
        "what Python adds to MPI's own all-reduce of 4 bytes",
        lambda world, options: overhead.measure(world, options.blocks),
        overhead.table,
        (1, 2, 4),
    ),
    "pipeline": Benchmark(
        "a step of a pipeline by each schedule: ours, torch's on gloo, and the ideal",
        lambda world, options: pipeline.measure(
            world, options.blocks, pipeline.sizes_of(options), options.schedules
        ),
        pipeline.table,
        (2, 4),
        pipeline.add_options,
    ),
    "tensor": Benchmark(
        "a perceptron and an attention divided among the ranks: ours, torch's on gloo, and the ideal",
        lambda world, options: tensor.measure(world, options.blocks, tensor.sizes_of(options)),
        tensor.table,
        (2, 4),
        tensor.add_options,
    ),
}
