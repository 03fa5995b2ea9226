#!/usr/bin/env python3
"""Traces of jobs with planted faults, clocks and costs; as root on Linux, for the nodes.

    tests/jobs/run trace faults      half a core, a slow loader, a slow node, a large stage, by the first line
    tests/jobs/run trace clocks      clocks of three nodes with offsets and drifts of their own, within 20 us
    tests/jobs/run trace overhead    steps of the trainer's model and small all-reduces, traced and not, by turns

The exit code is 0 if all of it holds.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from helpers.nodes import Nodes
from jobs.job import command_parser

from axonmpi.record.layout import OPERATION_ENTRY
from axonmpi.record.trace_file import PAGE
from axonmpi.testing.launcher import launch
from axonmpi.tracing.arrivals import waits_of
from axonmpi.tracing.clocks import align
from axonmpi.tracing.merge import merge
from axonmpi.tracing.picture import draw
from axonmpi.tracing.rank_trace import read_traces

HERE = Path(__file__).resolve().parent
TRAIN = (
    "--steps=20",
    "--evaluate-every=0",
    "--sample-length=0",
    "--no-plot",
    "--progress=off",
    "--held-out-sequences=4",
)
FAULTS = {
    "core": (2, (), r"rank 1 has 0\.[4-6]\d of a core while it computes, the others (0\.9|1\.0)"),
    "loader": (4, (), r"rank 2 loads data for \d+% of the time, the others for [0-9]%"),
    "stage": (2, ("--pp=2", "--layers=3"), r"rank 0 \(stage 0 of the pipeline\) computes for"),
}
NODE_FAULT = r"node 1 \(rank 1\) sends at (9|1\d)\.\d MB/s"
CLOCK_ERROR = 20_000
"""Nanoseconds by which a node's clock may be wrong."""
SHIFTS = {1: (3_600_000_000_000, 50e-6), 2: (-7_000_000, -20e-6)}
"""Offset in nanoseconds and drift of the nodes' clocks."""


def faults(options: argparse.Namespace) -> int:
    """Plant a fault into the trainer, and read the first line of the summary."""
    failures = 0
    for name, (ranks, flags, expected) in FAULTS.items():
        if name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                program = [str(HERE / "faulty_train.py"), name, *TRAIN, *flags, f"--out={folder}/run"]
                result = launch(ranks, *program, f"--trace={folder}/trace", timeout=options.timeout)
                printed = result.stdout + result.stderr
                failures += judged(name, expected, result.returncode, printed, Path(folder), options.keep)
    if "node" in options.only:
        with tempfile.TemporaryDirectory() as folder, Nodes(3, "1gbit", own_cores=True) as nodes:
            nodes.set_rate(1, "100mbit")
            flags = ("--global-batch=12", f"--out={folder}/run", f"--trace={folder}/trace")
            program = ["-m", "axonmpi", "train", *TRAIN, *flags]
            printed = nodes.run([1, 1, 1], *program, timeout=options.timeout)
            failures += judged("node", NODE_FAULT, 0, printed, Path(folder), options.keep)
    return int(failures > 0)


def judged(name: str, expected: str, code: int, printed: str, folder: Path, keep: Path | None) -> bool:
    """Print the first line of a run's summary, and keep its picture; return True if it does not name the fault."""
    if code:
        print(printed)
        return True
    cause = merge(folder / "trace").cause
    if keep is not None:
        keep.mkdir(exist_ok=True)
        traces, _ = align(read_traces(folder / "trace"))
        draw(traces, waits_of(traces), keep / f"{name}.png")
    is_right = re.match(expected, cause) is not None
    print(f"{'right' if is_right else 'WRONG'}  {name}: {cause}", flush=True)
    return not is_right


def clocks(options: argparse.Namespace) -> int:
    """Trace nodes, which share a clock; shift the times of two of them; print the errors of the aligned clocks."""
    with tempfile.TemporaryDirectory() as folder, Nodes(3) as nodes:
        nodes.run([1, 1, 1], str(HERE / "steps.py"), "clocks", folder, timeout=options.timeout)
        for path in sorted(Path(folder).glob("rank-*.trace")):
            shift(path)
        traces, found = align(read_traces(Path(folder)))
        worst = 0.0
        for trace in traces:
            if trace.node in SHIFTS:
                offset, drift = SHIFTS[trace.node]
                begin, end = (int(edge(trace.operations["started"])) for edge in (np.min, np.max))
                clock = found[trace.node]
                # The true time t reads t + offset + drift (t - origin); the aligned one should be t again.
                raw = read_traces(Path(folder))[trace.rank].operations["started"].astype(np.float64)
                true = raw - offset - drift * (raw - offset - ORIGIN[trace.rank]) / (1 + drift)
                error = np.abs(trace.operations["started"] - true).max()
                worst = max(worst, error)
                print(
                    f"node {trace.node}: error at most {error / 1e3:.1f} us over {(end - begin) / 1e9:.1f} s, "
                    f"{clock.error / 1e3:.1f} us given"
                )
    return int(worst > CLOCK_ERROR)


ORIGIN: dict[int, int] = {}


def shift(path: Path) -> None:
    """Write the times of a trace by another clock, if its node has one."""
    content = bytearray(path.read_bytes())
    identity = json.loads(content[:PAGE])
    entries = np.frombuffer(content, OPERATION_ENTRY, (len(content) - PAGE) // OPERATION_ENTRY.itemsize, PAGE)
    ORIGIN[identity["rank"]] = origin = int(entries["started"].max())
    if identity["node"] in SHIFTS:
        offset, drift = SHIFTS[identity["node"]]
        for name in ("entered", "started", "left"):
            times = entries[name]
            shifted = times + offset + np.rint(drift * (times - origin)).astype(np.int64)
            entries[name] = np.where(times > 0, shifted, times)
        path.write_bytes(content)


def overhead(options: argparse.Namespace) -> int:
    """Time steps and small all-reduces with a trace and without, by turns in one job."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            result = launch(ranks, str(HERE / "steps.py"), "overhead", folder, timeout=options.timeout)
        print(result.stdout if result.returncode == 0 else result.stdout + result.stderr, end="", flush=True)
        if result.returncode:
            return 1
    return 0


def main() -> int:
    parser = command_parser(__doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for call in (faults, clocks, overhead):
        kind = kinds.add_parser(call.__name__, help=call.__doc__)
        kind.set_defaults(call=call)
        kind.add_argument("--timeout", type=float, default=600.0, help="seconds that one job may take")
        if call is faults:
            names = [*FAULTS, "node"]
            kind.add_argument("--only", nargs="+", choices=names, default=names, help="some of the faults")
            kind.add_argument("--keep", type=Path, metavar="FOLDER", help="draw a picture of each there")
    options = parser.parse_args()
    result: int = options.call(options)
    return result


if __name__ == "__main__":
    sys.exit(main())
