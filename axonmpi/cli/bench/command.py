"""The command line of `axonmpi bench`, and the list of its benchmarks."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...comm import destroy_process_group, init_process_group
from ...errors import LaunchError
from ...groups.world import World
from ...launch.variables import launched_ranks
from ...testing.launcher import LaunchResult, launch
from ...testing.mpirun import find_mpirun
from ...utils.device import gpu_count
from .. import parse_arguments, positive
from . import data_parallel, overhead, pipeline, tensor, torch_backend
from .checkpoint import saving as checkpoint
from .checkpoint import table as checkpoint_table
from .collectives import between_nodes as network
from .collectives import comparison as collectives
from .collectives import mpi_alone as collectives_mpi
from .collectives import table as collectives_table
from .collectives.cases import OPERATIONS, parse_size

_TIMEOUT_SECONDS = 3600.0
_MARK = "axonmpi-bench-result "

Figures = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        title: What it compares.
        measure: Measures on the ranks of a world; collective.
        table: Formats the figures of several numbers of ranks.
        ranks: The default numbers of ranks.
        add_options: Adds the options of this benchmark alone.
        plot: Draws the figures into a file.
        measure_mpi: Measures MPI alone, in a job without axonmpi's communication; collective, result on rank 0.
        add_mpi: Adds the figures of MPI alone; calls its second argument to run that job, if needed.
        blocks: How often each variant takes its turn, unless told otherwise.
    """

    title: str
    measure: Callable[[World, argparse.Namespace], Figures]
    table: Callable[[list[Figures]], str]
    ranks: tuple[int, ...]
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    plot: Callable[[Path, list[Figures]], None] | None = None
    measure_mpi: Callable[[argparse.Namespace], Figures | None] | None = None
    add_mpi: Callable[[Figures, Callable[[], Figures]], None] | None = None
    blocks: int = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(_parser(), arguments)
    benchmark = BENCHMARKS[options.benchmark]
    if options.here == "mpi" and benchmark.measure_mpi:
        results = [benchmark.measure_mpi(options)]
    elif launched_ranks() > 1 or options.here:
        results = [_measure_here(benchmark, options)]
    else:
        results = [
            _measure_on(ranks, benchmark, arguments) for ranks in options.ranks or _numbers(benchmark, options)
        ]
    shown = [result for result in results if result]
    if not shown:
        return 0
    if options.here:
        print(_MARK + json.dumps(shown[0]), flush=True)
        return 0
    print(benchmark.table(shown))
    if options.json:
        options.json.write_text(json.dumps(shown, indent=2) + "\n")
    if benchmark.plot and options.plot:
        benchmark.plot(options.plot, shown)
    return 0


# ---- running ----------------------------------------------------------------------------------------------------


def _numbers(benchmark: Benchmark, options: argparse.Namespace) -> list[int]:
    """Return the numbers of ranks to measure on: for GPUs one, and those of two, four ... that there are; local."""
    if options.device == "cpu":
        return list(benchmark.ranks)
    return [1, *(ranks for ranks in (2, 4, 8) if ranks <= gpu_count())]


def _measure_here(benchmark: Benchmark, options: argparse.Namespace) -> Figures | None:
    """Measure on the ranks of this job, and return the figures on rank 0; collective."""
    world = init_process_group("mpi" if options.device == "cpu" else "nccl")
    result = benchmark.measure(world, options)
    is_first = world.rank == 0
    destroy_process_group()  # not after an exception: it waits for the other ranks, who may wait for this one
    return result if is_first else None


def _measure_on(ranks: int, benchmark: Benchmark, arguments: Sequence[str]) -> Figures:
    """Run this command once more under `mpirun`, and where MPI alone is measured too, under a second one."""
    print(f"running on {ranks} ranks ...", file=sys.stderr, flush=True)
    result = _run_job(ranks, [*arguments, "--here"])
    if benchmark.add_mpi:
        benchmark.add_mpi(result, lambda: _run_job(ranks, [*arguments, "--here", "mpi"]))
    return result


def _run_job(ranks: int, arguments: Sequence[str]) -> Figures:
    """Start this command on several ranks, and return the figures that it prints."""
    program = ["-m", "axonmpi", "bench", *arguments]
    job: LaunchResult | subprocess.CompletedProcess[str]
    if ranks == 1 and not _has_mpirun():
        command = [sys.executable, *program]
        job = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    else:
        job = launch(ranks, *program, timeout=_TIMEOUT_SECONDS, env={"GLOO_SOCKET_IFNAME": "lo"})
    for line in job.stdout.splitlines():
        if line.startswith(_MARK):
            result: Figures = json.loads(line.removeprefix(_MARK))
            return result
    raise SystemExit(
        f"the benchmark failed on {ranks} ranks (exit code {job.returncode}):\n{job.stderr}{job.stdout}"
    )


def _has_mpirun() -> bool:
    """Say whether ranks can be started; local. One rank can be without."""
    try:
        find_mpirun()
    except LaunchError:
        return False
    return True


# ---- options ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonmpi bench", description="Measured comparisons, interleaved in one run."
    )
    choices = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        _add_options(choices.add_parser(name, help=benchmark.title, description=benchmark.title), benchmark)
    return parser


def _add_options(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    ranks = " ".join(map(str, benchmark.ranks))
    parser.add_argument(
        "--ranks",
        type=positive,
        nargs="+",
        help=f"numbers of ranks to start mpirun with (default: {ranks})",
        metavar="N",
    )
    parser.add_argument(
        "--blocks",
        type=positive,
        default=benchmark.blocks,
        help=f"how often each variant takes its turn (default: {benchmark.blocks})",
        metavar="N",
    )
    parser.set_defaults(device="cpu")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the figures to FILE as well")
    here = ("axonmpi", "mpi") if benchmark.measure_mpi else ("axonmpi",)
    parser.add_argument("--here", nargs="?", choices=here, const="axonmpi", help=argparse.SUPPRESS)
    if benchmark.plot:
        parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="draw the figures into FILE.png")
    if benchmark.add_options:
        benchmark.add_options(parser)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _picture(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, got {text!r}")
    return _file(text)


def _add_collectives_options(parser: argparse.ArgumentParser) -> None:
    _add_operations(parser, OPERATIONS, "all_reduce")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where tensors are: with cuda by NCCL, beside torch.distributed's (default: cpu)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=tuple(collectives.DTYPES),
        default=list(collectives.DTYPES),
        help=f"some of {', '.join(collectives.DTYPES)} (default: all)",
        metavar="DTYPE",
    )
    _add_sizes(parser, collectives.DEFAULT_SIZES)


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    _add_operations(parser, network.OPERATIONS, *network.OPERATIONS)
    _add_sizes(parser, network.DEFAULT_SIZES)
    parser.add_argument(
        "--seconds",
        type=float,
        default=network.BLOCK_SECONDS,
        help=f"how long a variant's turn takes, of calls that are quicker (default: {network.BLOCK_SECONDS})",
        metavar="S",
    )
    parser.add_argument("--no-gloo", dest="gloo", action="store_false", help="without torch.distributed")


def _add_operations(parser: argparse.ArgumentParser, choices: Sequence[str], *default: str) -> None:
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=choices,
        default=list(default),
        help=f"some of {', '.join(choices)} (default: {' '.join(default) if default != choices else 'all'})",
        metavar="NAME",
    )


def _add_sizes(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        default=[parse_size(size) for size in default],
        help=f"bytes of a tensor (default: {' '.join(default)})",
        metavar="SIZE",
    )


def _add_fsdp_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=int,
        default=data_parallel.BATCH,
        help=f"samples of a step on each rank (default: {data_parallel.BATCH})",
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


# ---- benchmarks ------------------------------------------------------------------------------------------------

BENCHMARKS: dict[str, Benchmark] = {
    "checkpoint": Benchmark(
        "saving and loading a checkpoint: ours, plain writes, torch's on gloo; time, memory, stalls, planning",
        checkpoint.measure,
        checkpoint_table.table,
        (4,),
        checkpoint.add_options,
        blocks=5,
    ),
    "collectives": Benchmark(
        "collectives of many sizes: ours, MPI's own, torch.distributed's, and a plain copy",
        lambda world, options: collectives.measure(
            world, options.blocks, options.operations, options.dtypes, options.sizes
        ),
        collectives_table.table,
        (2, 4),
        _add_collectives_options,
        collectives_table.plot,
        lambda options: collectives_mpi.measure(options.blocks, options.operations, options.sizes),
        collectives_mpi.add,
    ),
    "ddp": Benchmark(
        "step overhead of data parallelism, ours and torch's on gloo and on ours",
        lambda world, options: data_parallel.measure_ddp(world, options.blocks),
        data_parallel.ddp_table,
        (2, 4),
    ),
    "fsdp": Benchmark(
        "a step of fully sharded training: ours, torch's on gloo, and data parallelism; time and memory",
        lambda world, options: data_parallel.measure_fsdp(world, options.blocks, options.batch),
        data_parallel.fsdp_table,
        (2, 4),
        _add_fsdp_options,
    ),
    "network": Benchmark(
        "collectives between nodes: ours, the MPI library's own, gloo's; under mpirun on ranks of several nodes",
        lambda world, options: network.measure(
            world, options.blocks, options.operations, options.sizes, options.seconds, gloo=options.gloo
        ),
        network.table,
        (2, 4),
        _add_network_options,
    ),
    "overhead": Benchmark(
        "what Python adds to MPI's own all-reduce of 4 bytes",
        lambda world, options: overhead.measure(world, options.blocks),
        overhead.table,
        (1, 2, 4),
    ),
    "pipeline": Benchmark(
        "a step of a pipeline by each schedule: ours, torch's on gloo and on ours, and the ideal",
        lambda world, options: pipeline.measure(
            world, options.blocks, pipeline.sizes_of(options), options.schedules
        ),
        pipeline.table,
        (2, 4),
        pipeline.add_options,
    ),
    "tensor": Benchmark(
        "a perceptron and an attention divided among the ranks: ours, torch's on gloo and on ours, and the ideal",
        lambda world, options: tensor.measure(world, options.blocks, tensor.sizes_of(options)),
        tensor.table,
        (2, 4),
        tensor.add_options,
    ),
    "torch": Benchmark(
        "torch.distributed on axonmpi's backend and on gloo: all-reduces, torch's own DDP and FSDP2",
        lambda world, options: torch_backend.measure(world, options.blocks),
        torch_backend.table,
        (2, 4),
        blocks=7,
    ),
}
