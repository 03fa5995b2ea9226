"""The command line of `axonmpi bench`, the list of its benchmarks, and the jobs that they run in."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from ...comm import destroy_process_group, init_process_group
from ...launch.launcher_variables import launched_ranks
from ...testing.launcher import LaunchResult, launch
from ...utils.device import gpu_count
from ..arguments import file_to_write, parse_arguments, positive
from .checkpoint.saving import CHECKPOINT
from .collectives.between_nodes import NETWORK
from .collectives.comparison import COLLECTIVES
from .data_parallel import DDP, FSDP
from .domain import DOMAIN
from .harness.benchmark import Benchmark, Figures
from .overhead import OVERHEAD
from .pipeline import PIPELINE
from .tensor import TENSOR
from .torch_backend import TORCH

BENCHMARKS = {
    "checkpoint": CHECKPOINT,
    "collectives": COLLECTIVES,
    "ddp": DDP,
    "domain": DOMAIN,
    "fsdp": FSDP,
    "network": NETWORK,
    "overhead": OVERHEAD,
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "torch": TORCH,
}
_TIMEOUT_SECONDS = 3600.0
_MARK = "axonmpi-bench-figures "
"""The beginning of the line in which a job prints its figures."""


def main(argv: Sequence[str]) -> int:
    """Run a benchmark; returns the exit code."""
    options = parse_arguments(make_parser(), argv)
    benchmark = BENCHMARKS[options.benchmark]
    if options.here == "mpi" and benchmark.measure_mpi:
        results = [benchmark.measure_mpi(options)]
    elif launched_ranks() > 1 or options.here:
        results = [_measure_here(benchmark, options)]
    else:
        numbers = options.ranks or _default_ranks(benchmark, options)
        results = [_measure_on(ranks, benchmark, argv) for ranks in numbers]
    shown = [result for result in results if result]
    if not shown:
        return 0
    if options.here:  # by stdout, since rank 0 may be on a node that does not see this one's files
        print(_MARK + json.dumps(shown[0]), flush=True)
        return 0
    print(benchmark.table(shown))
    if options.json:
        options.json.write_text(json.dumps(shown, indent=2) + "\n")
    if benchmark.plot and options.plot:
        benchmark.plot(options.plot, shown)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks' options."""
    parser = argparse.ArgumentParser(
        prog="axonmpi bench", description="Measured comparisons, interleaved in one run."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        _add_options(benchmarks.add_parser(name, help=benchmark.title, description=benchmark.title), benchmark)
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
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the figures to FILE as well")
    jobs = ("axonmpi", "mpi") if benchmark.measure_mpi else ("axonmpi",)
    parser.add_argument("--here", nargs="?", choices=jobs, const="axonmpi", help=argparse.SUPPRESS)
    parser.set_defaults(device="cpu", torch=benchmark.uses_torch, trace=None)
    for flag, arguments in benchmark.options.items():
        parser.add_argument(flag, **arguments)


# ---- jobs -------------------------------------------------------------------------------------------------------


def _default_ranks(benchmark: Benchmark, options: argparse.Namespace) -> Sequence[int]:
    """Return the numbers of ranks to measure on: for GPUs 1, and 2, 4 and 8 up to the number of GPUs."""
    if options.device == "cpu":
        return benchmark.ranks
    return [1, *(ranks for ranks in (2, 4, 8) if ranks <= gpu_count())]


def _measure_here(benchmark: Benchmark, options: argparse.Namespace) -> Figures | None:
    """Measure on the ranks of this job, and return the figures on rank 0; collective."""
    world = init_process_group("mpi" if options.device == "cpu" else "nccl")
    result = benchmark.figures(world, options)
    is_first = world.rank == 0
    destroy_process_group()  # not after an exception: it waits for the other ranks, who may wait for this one
    return result if is_first else None


def _measure_on(ranks: int, benchmark: Benchmark, arguments: Sequence[str]) -> Figures:
    """Run this command under `mpirun`, and under a second one if MPI alone is measured, too."""
    print(f"running on {ranks} ranks ...", file=sys.stderr, flush=True)
    result = _run_job(ranks, [*arguments, "--here"])
    if benchmark.add_mpi:
        benchmark.add_mpi(result, partial(_run_job, ranks, [*arguments, "--here", "mpi"]))
    return result


def _run_job(ranks: int, arguments: Sequence[str]) -> Figures:
    """Run this command on several ranks, or on one, which needs no launcher, and return its figures."""
    program = ["-m", "axonmpi", "bench", *arguments]
    job: LaunchResult | subprocess.CompletedProcess[str]
    if ranks == 1:
        command = [sys.executable, *program]
        job = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    else:
        job = launch(ranks, *program, timeout=_TIMEOUT_SECONDS, env={"GLOO_SOCKET_IFNAME": "lo"})
    figures = [line for line in job.stdout.splitlines() if line.startswith(_MARK)]
    if job.returncode == 0 and figures:
        return dict(json.loads(figures[0].removeprefix(_MARK)))
    raise SystemExit(
        f"the benchmark failed on {ranks} ranks (exit code {job.returncode}):\n{job.stderr}{job.stdout}"
    )
