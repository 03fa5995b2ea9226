"""The command line of `axonmpi bench` (layer 7)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...comm import destroy_process_group, init_process_group
from ...environment import launched_ranks
from ...group import World
from ...testing.launcher import launch
from . import ddp, overhead

__all__ = ["main"]

Measure = Callable[[World, int], dict[str, Any]]

BENCHMARKS: dict[str, tuple[Measure, Callable[[list[dict[str, Any]]], str], tuple[int, ...]]] = {
    "ddp": (ddp.measure, ddp.table, (2, 4)),
    "overhead": (overhead.measure, overhead.table, (1, 2, 4)),
}
_TIMEOUT_SECONDS = 900.0
_MARK = "axonmpi-bench-result "


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    options = _parser().parse_args(argv)
    measure, table, ranks = BENCHMARKS[options.benchmark]
    if launched_ranks() > 1 or options.here:
        results = [_measure_here(measure, options.blocks)]
    else:
        results = [_measure_on(options.benchmark, n, options.blocks) for n in options.ranks or ranks]
    shown = [result for result in results if result]
    if not shown:
        return 0
    if options.here:
        print(_MARK + json.dumps(shown[0]), flush=True)
        return 0
    print(table(shown))
    if options.json:
        Path(options.json).write_text(json.dumps(shown, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonmpi bench", description="Measured comparisons, interleaved in one run."
    )
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--ranks", type=_positive, nargs="+", help="numbers of ranks to start mpirun with")
    parser.add_argument(
        "--blocks", type=_positive, default=15, help="how often each variant takes its turn (default: 15)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _measure_here(measure: Measure, blocks: int) -> dict[str, Any] | None:
    """Measure on the ranks of this job; the result is rank 0's to show."""
    world = init_process_group()
    try:
        result = measure(world, blocks)
        return result if world.rank == 0 else None
    finally:
        destroy_process_group()


def _measure_on(benchmark: str, ranks: int, blocks: int) -> dict[str, Any]:
    print(f"running on {ranks} ranks ...", file=sys.stderr, flush=True)
    job = launch(
        ranks,
        "-m",
        "axonmpi",
        "bench",
        benchmark,
        "--here",
        "--blocks",
        blocks,
        timeout=_TIMEOUT_SECONDS,
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )
    for line in job.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    raise SystemExit(
        f"the benchmark failed on {ranks} ranks (exit code {job.returncode}):\n{job.stderr}{job.stdout}"
    )
