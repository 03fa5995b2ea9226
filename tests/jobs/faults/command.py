#!/usr/bin/env python3
"""Faults in real jobs, on one node and on two: how soon each job ends, how, and what it says. As root on Linux.

    tests/jobs/run faults                             every fault, with the MPI library of this Python
    tests/jobs/run faults --only stopped loops        some of them
    tests/jobs/run faults --hangs 20 --seed 1         a random rank hangs in a random way, so many times
    tests/jobs/run faults --kept a.json b.json        one table of what was kept, such as with two libraries

Nodes are namespaces of this machine. Prints a table in Markdown; `--json FILE` keeps all that the jobs printed. The
exit code is 0 where every job ended in time, with the exit code and the message that it has to have, no process
and no file in /dev/shm left behind.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from helpers.nodes import Nodes
from jobs.faults.injection import Outcome, inject
from jobs.faults.table import FAULTS, Fault, random_hangs
from jobs.job import command_parser, parse_with_seed

from axonmpi.launch import start

SHOWN = 150
"""How much of a line the table shows."""
MISSED = "culprit or cause is not named"
OPTIONS = {
    "--only": {"nargs": "+", "metavar": "FAULT", "help": "names of table.py"},
    "--hangs": {"type": int, "default": 0, "metavar": "N", "help": "so many random hangs instead"},
    "--kept": {
        "type": Path,
        "nargs": "+",
        "default": [],
        "metavar": "FILE",
        "help": "only print the table of kept results",
    },
    "--json": {"type": Path, "metavar": "FILE", "help": "where to keep everything"},
    "--other": {"type": Path, "metavar": "MPIRUN", "help": "the launcher of another MPI library"},
}


def run_here(options: argparse.Namespace) -> list[dict[str, object]]:
    """Inject the faults with the MPI library of this Python."""
    mpi = start.library_info().vendor
    outcomes = []
    with Nodes(2) as nodes:
        for fault in chosen(options):
            for ranks in fault.places:
                outcome = inject(fault, ranks, nodes, options.other)
                tell(outcome, mpi)
                outcomes.append({"mpi": mpi, **asdict(outcome)})
    return outcomes


def chosen(options: argparse.Namespace) -> list[Fault]:
    """Return the faults that were asked for; two libraries can only be mixed where there are two."""
    if options.hangs:
        return list(random_hangs(options.hangs, options.seed))
    faults = [fault for fault in FAULTS if options.only is None or {fault.name, fault.act} & set(options.only)]
    return [fault for fault in faults if fault.act != "mix" or options.other]


def tell(outcome: Outcome, mpi: str) -> None:
    """Say on the standard error how a job ended."""
    verdict = "; ".join(outcome.problems) or "as it has to"
    place = "two nodes" if len(outcome.ranks) > 1 else "one node"
    how = f"{outcome.seconds:.1f} s, exit code {outcome.code}: {verdict}"
    print(f"{mpi}, {place}: {outcome.fault}: {how}", file=sys.stderr, flush=True)


def table(outcomes: list[dict]) -> str:
    """Return the table of the docs: a row for each fault and place, seconds and exit code with each library."""
    libraries = sorted({each["mpi"] for each in outcomes})
    rows: dict[tuple[str, int], dict[str, dict]] = {}
    for each in outcomes:
        rows.setdefault((each["fault"], len(each["ranks"])), {})[each["mpi"]] = each
    heads = ["fault", "nodes", *(f"{mpi}: seconds, exit code" for mpi in libraries), "message"]
    lines = [heads, ["---"] * len(heads)]
    for (fault, nodes), found in rows.items():
        cells = [cell(found[mpi]) if mpi in found else "" for mpi in libraries]
        seen = next((each["seen"] for each in found.values() if each["seen"]), "")
        without_folders = re.sub(r"\S*/(\w+\.py)", r"\1", seen).split(" ====")[0]
        shown = _shortened(without_folders).replace("|", "\\|").replace("`", "'")
        lines.append([fault, str(nodes), *cells, f"`{shown}`" if shown else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shortened(text: str) -> str:
    """Return the beginning of a text, which ends with a word and dots if it is longer than the table shows."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN].rpartition(' ')[0]} ..."


def cell(outcome: dict) -> str:
    problems = [MISSED if problem.startswith("not said") else problem for problem in outcome["problems"]]
    bad = f" **{'; '.join(dict.fromkeys(problems))}**" if problems else ""
    code = "none" if outcome["code"] is None else outcome["code"]
    return f"{outcome['seconds']:.1f}, {code}{bad}"


def main() -> int:
    options = parse_with_seed(command_parser(__doc__, OPTIONS))
    kept = [outcome for file in options.kept for outcome in json.loads(file.read_text())]
    outcomes = kept if options.kept else run_here(options)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    print(table(outcomes))
    good = sum(not each["problems"] for each in outcomes)
    print(f"\n{good} of {len(outcomes)} jobs ended as they have to.")
    return int(any(each["problems"] for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
