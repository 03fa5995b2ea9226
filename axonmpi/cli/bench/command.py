"""The command line of `axonmpi bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...comm import destroy_process_group, init_process_group
from ...launch.variables import launched_ranks
from ...testing.launcher import launch
from .. import parse_arguments, positive
from .benchmarks import BENCHMARKS, Benchmark, Figures

__all__ = ["main"]

_TIMEOUT_SECONDS = 3600.0
_MARK = "axonmpi-bench-result "


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
        results = [_measure_on(ranks, benchmark, arguments) for ranks in options.ranks or benchmark.ranks]
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
        default=15,
        help="how often each variant takes its turn (default: 15)",
        metavar="N",
    )
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


# ---- running ----------------------------------------------------------------------------------------------------


def _measure_here(benchmark: Benchmark, options: argparse.Namespace) -> Figures | None:
    """Measure on the ranks of this job; the result is rank 0's to show."""
    world = init_process_group()
    result = benchmark.measure(world, options)
    is_first = world.rank == 0
    destroy_process_group()  # not after an exception: it waits for the other ranks, who may wait for this one
    return result if is_first else None


def _measure_on(ranks: int, benchmark: Benchmark, arguments: Sequence[str]) -> Figures:
    """Run this command once more, under an `mpirun` of its own, and where MPI alone is asked for under another."""
    print(f"running on {ranks} ranks ...", file=sys.stderr, flush=True)
    result = _run_job(ranks, [*arguments, "--here"])
    if benchmark.add_mpi:
        benchmark.add_mpi(result, lambda: _run_job(ranks, [*arguments, "--here", "mpi"]))
    return result


def _run_job(ranks: int, arguments: Sequence[str]) -> Figures:
    """Have this command measure where it is, on ranks that find their options in the arguments."""
    job = launch(
        ranks,
        "-m",
        "axonmpi",
        "bench",
        *arguments,
        timeout=_TIMEOUT_SECONDS,
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )
    for line in job.stdout.splitlines():
        if line.startswith(_MARK):
            result: Figures = json.loads(line.removeprefix(_MARK))
            return result
    raise SystemExit(
        f"the benchmark failed on {ranks} ranks (exit code {job.returncode}):\n{job.stderr}{job.stdout}"
    )
