#!/usr/bin/env python3
"""Jobs on nodes that are namespaces of this machine, by the MPI library of this Python; as root on Linux.

    tests/jobs/run nodes network [--rows ROW ...] [--blocks N]       `axonmpi bench network`, beside its limits
    tests/jobs/run nodes steps [--beside FOLDER] [--rounds N]        steps of data parallelism at 1 Gbit/s
    tests/jobs/run nodes tests [--seed N] [OPTION OF PYTEST ...]     conformance, and random calls that do not match
    tests/jobs/run nodes job --rate 1gbit --ranks 2,2 SCRIPT ...     a script of one's own

Rows of `network` are nodes, or nodes x ranks of each, and a bandwidth: 2, 8, 2x2, 4@1gbit. The exit code is 0 where
its limits hold, and where all tests pass.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from helpers.nodes import Nodes, Placement
from jobs.job import command_parser

from axonmpi.cli.bench.harness.table import format_size
from axonmpi.utils.text import aligned

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[2]
ROWS = ("2", "4", "8", "2x2", "2@1gbit", "4@1gbit", "8@1gbit", "2x2@1gbit")
LIMITS = ((4, 2.5), (64 << 10, 2.0), (256 << 10, 1.4))
"""Largest size in bytes, and the time over MPI's that is allowed up to it."""
LARGE_LIMIT, SHARED_LIMIT, BFLOAT16_LIMIT = 1.25, 1.0, 2.0
"""Above; there with several ranks on a node; and of bfloat16 over float32 of as many elements."""
WITHIN, FAR = 0.9, 1.5
"""The part of the cells that has to be within its limit, and how many times its limit none may take."""
PLACES: tuple[tuple[tuple[int, ...], Placement], ...] = (
    ((1, 2), "block"),
    ((1, 1, 1), "block"),
    ((2, 2), "round robin"),
    ((2, 1, 1), "round robin"),
)
"""Ranks of each node, for `tests`."""


# ---- network ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One ratio, and what it may be."""

    row: str
    what: str
    nbytes: int
    ratio: float
    limit: float

    @property
    def far(self) -> bool:
        return self.ratio > FAR * self.limit

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'!!' if self.far else '!' if self.ratio > self.limit else ''}"


def network(options: argparse.Namespace) -> int:
    """Run the benchmark on every row; print the ratios to MPI's own collectives."""
    cells = [cell for row in options.rows for cell in measured(row, options)]
    lines = [
        [*line, *map(str, of_line)] for line, of_line in groupby(cells, key=lambda cell: (cell.row, cell.what))
    ]
    sizes = [format_size(size) for size in dict.fromkeys(cell.nbytes for cell in cells)]
    print("\n".join(aligned([["nodes", "", *sizes], *lines], left=(0, 1))))
    within, far = sum(cell.ratio <= cell.limit for cell in cells), sum(cell.far for cell in cells)
    print(f"{within} of {len(cells)} cells within their limits (!: above), {far} over {FAR} times theirs (!!)")
    return int(within < WITHIN * len(cells) or far > 0)


def measured(row: str, options: argparse.Namespace) -> list[Cell]:
    """Run the benchmark on one row; its own table goes to the standard error."""
    shape, _, rate = row.partition("@")
    nodes, ranks = (int(number) for number in shape.split("x")) if "x" in shape else (int(shape), 1)
    with tempfile.NamedTemporaryFile("r") as figures, Nodes(nodes, rate or None) as made:
        command = ["-m", "axonmpi", "bench", "network", "--json", figures.name, *options.given]
        print(made.run([ranks] * nodes, *command, timeout=options.timeout), file=sys.stderr)
        (result,) = json.load(figures)
    cases = result["cases"]
    over_mpi = [
        Cell(row, f"{case['operation']} / MPI", case["bytes"], case["ratios"]["mpi"], limit(case["bytes"], ranks))
        for case in cases
    ]
    return over_mpi + [
        Cell(
            row,
            f"{case['operation']} bfloat16 / float32",
            case["bytes"],
            case["ratios"]["bfloat16"],
            BFLOAT16_LIMIT,
        )
        for case in cases
        if "bfloat16" in case["ratios"]
    ]


def limit(nbytes: int, ranks: int) -> float:
    """Return what a time may be over MPI's."""
    above = SHARED_LIMIT if ranks > 1 else LARGE_LIMIT
    return next((allowed for largest, allowed in LIMITS if nbytes <= largest), above)


# ---- steps ------------------------------------------------------------------------------------------------------

HIDDEN = ("hidden", "of what can be")
"""Communication that a step hides: of the all-reduce, and of the shorter of all-reduce and backward."""


def steps(options: argparse.Namespace) -> int:
    """Run steps of data parallelism, by turns on this tree and the other; print medians of the rounds."""
    trees = {"this tree": TREE, **({str(options.beside): options.beside.resolve()} if options.beside else {})}
    rows = [["nodes", "", "local", "backward", "step", "all_reduce", *HIDDEN, "gloo's step", *HIDDEN]]
    for count in options.nodes:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        with Nodes(count, "1gbit", own_cores=True) as nodes:
            for _ in range(options.rounds):
                for name, tree in trees.items():
                    command = [str(HERE / "steps.py"), str(options.blocks)]
                    printed = nodes.run(
                        [1] * count, *command, timeout=options.timeout, env={"PYTHONPATH": str(tree)}
                    )
                    rounds[name].append(json.loads(printed.splitlines()[-1]))
        rows += [[str(count), name, *medians(taken)] for name, taken in rounds.items()]
    print("\n".join(aligned(rows, left=(0, 1))))
    return 0


def medians(rounds: list[dict[str, float]]) -> list[str]:
    """Return the seconds of a step and its parts, and how much of the communication it hides."""

    def seconds(name: str) -> str:
        return f"{statistics.median(taken[name] for taken in rounds):.3f} s"

    def hidden(name: str) -> list[str]:
        of_all, of_possible = [], []
        for taken in rounds:
            saved = taken["local"] + taken["all_reduce"] - taken[name]
            of_all.append(saved / taken["all_reduce"])
            of_possible.append(saved / min(taken["backward"], taken["all_reduce"]))
        return [f"{100 * statistics.median(parts):.0f} %" for parts in (of_all, of_possible)]

    times = [seconds(name) for name in ("local", "backward", "ours", "all_reduce")]
    return [*times, *hidden("ours"), seconds("gloo"), *hidden("gloo")]


# ---- tests ------------------------------------------------------------------------------------------------------


def tests(options: argparse.Namespace) -> int:
    """Run tests of conformance, nodes and torch.distributed on ranks in several places, until one fails."""
    seed = str(options.seed)
    print(f"--seed {seed}", flush=True)
    folders = [str(HERE.parents[1] / folder) for folder in ("conformance", "backends/mpi")]
    files = [str(HERE / "on_nodes.py"), *folders]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--seed", seed, *options.given, *files]
    operations = [str(HERE.parents[1] / "interop/every_operation.py"), seed]
    with Nodes(max(len(ranks) for ranks, _ in PLACES)) as nodes:
        for ranks, placement in PLACES:
            print(f"==== {placement}: {', '.join(map(str, ranks))} ranks on the nodes", flush=True)
            for each in (command, operations):
                print(nodes.run(ranks, *each, timeout=options.timeout, placement=placement), end="", flush=True)
    return 0


# ---- command line -----------------------------------------------------------------------------------------------


def job(options: argparse.Namespace) -> int:
    """Run a script; each node has cores of its own."""
    with Nodes(len(options.ranks), options.rate, own_cores=True) as nodes:
        placement: Placement = "round robin" if options.round_robin else "block"
        command = options.script[options.script[:1] == ["--"] :]
        print(nodes.run(options.ranks, *command, timeout=options.timeout, placement=placement), end="")
    return 0


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers between commas."""
    return tuple(map(int, text.split(",")))


def main() -> int:
    parser = command_parser(__doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    made = {call: kinds.add_parser(call.__name__, help=call.__doc__) for call in (network, steps, tests, job)}
    for call, kind in made.items():
        kind.set_defaults(call=call)
        kind.add_argument("--timeout", type=float, default=1800.0, help="seconds that one job may take")
    made[network].add_argument("--rows", nargs="+", default=ROWS, help=f"default: {' '.join(ROWS)}")
    made[network].usage = "run nodes network [--rows ROW ...] [--timeout S] [options of `axonmpi bench network`]"
    made[steps].add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout of axonmpi")
    made[steps].add_argument("--nodes", type=int, nargs="+", default=(2, 4), help="default: 2 4")
    made[steps].add_argument("--rounds", type=int, default=3, help="turns of each tree (default: 3)")
    made[steps].add_argument("--blocks", type=int, default=11, help="steps of a turn (default: 11)")
    made[tests].add_argument("--seed", type=int, default=random.randrange(10**6), help="default: drawn")
    made[tests].usage = "run nodes tests [--timeout S] [--seed N] [options of pytest]"
    made[job].add_argument("--rate", help="bandwidth of each node in each direction, such as 1gbit")
    made[job].add_argument("--ranks", type=numbers, default=(2, 2), help="ranks on each node (default: 2,2)")
    made[job].add_argument("--round-robin", action="store_true", help="deal ranks to the nodes in turn")
    made[job].add_argument("script", nargs=argparse.REMAINDER, help="a script or, after --, what Python is given")
    options, given = parser.parse_known_args()
    if given and options.call not in (network, tests):
        parser.error(f"unknown: {' '.join(given)}")
    options.given = given
    if (obstacle := Nodes.obstacle()) is not None:
        raise SystemExit(obstacle)
    return int(options.call(options))


if __name__ == "__main__":
    sys.exit(main())
