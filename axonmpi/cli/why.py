"""`axonmpi why`: of a job that runs or hangs, who waits for whom, and why; asked from another shell.

    axonmpi why                   the job of this user that runs on this node
    axonmpi why 3fa2c1d0          a job by its name
    axonmpi why 41237             a job by the process of a rank, or of its mpirun

It reads the records of the ranks, twice, and asks the ranks for their stacks. It needs neither MPI nor an
answer of the ranks. A node knows its own ranks; those of others where all nodes write to one folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..observe.flight_recorder import dump
from ..observe.jobs import find_job
from ..observe.shared_folder import read_states, write_states
from ..observe.stacks import stacks_of
from ..observe.wait_graph import WaitGraph, seconds_in, site_in, wait_graph_of
from ..observe.waits import RankState, states_of
from ..record.reader import Condition, RankRecord
from ..utils.text import counted, name_ranks, ranks_by_text
from .arguments import parse_arguments
from .output import BAD_USAGE, refuse

LOOK_SECONDS = 1.0
"""Between two looks at the records: what a rank does not do in that time, it may not do at all."""
SPY_SECONDS = 10.0
_PROGRAM = "axonmpi why"


@dataclass(frozen=True)
class Report:
    """What is known of a job.

    Attributes:
        job: Its name.
        program: Its command line.
        graph: Who waits for whom.
        going_on: Ranks that have begun an operation between the two looks.
        stacks: Of the ranks that have to be looked at.
        asked: How the job was named.
    """

    job: str
    program: str
    graph: WaitGraph
    going_on: tuple[int, ...]
    stacks: Mapping[int, str]
    asked: str = ""

    @property
    def hangs(self) -> bool:
        """Whether ranks wait for others, and none of those that are known has gone on."""
        return bool(self.graph.behind) and not self.going_on


def main(argv: Sequence[str]) -> int:
    """Say what a job waits for; local.

    Returns:
        0 if the job goes on or has ended, 1 if it hangs, 2 if there is no such job.
    """
    options = parse_arguments(_parser(), argv)
    try:
        records = find_job(options.job)
    except LookupError as error:
        return refuse(_PROGRAM, str(error))
    if options.dump is not None:
        files = dump(records, options.dump)
        print(f"{counted(len(files), 'file')} in {options.dump}; analyse with: torchfrtrace {options.dump}")
        return 0
    report = replace(examine(records, stacks=options.stacks, folder=options.run_folder), asked=options.job)
    print(json.dumps(as_json(report), indent=1) if options.json else as_text(report))
    return int(report.hangs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Say who waits for whom in a job of this node, and why.",
        epilog=f"Exit code: 0 if the job goes on or has ended, 1 if it hangs, {BAD_USAGE} if there is no such job.",
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB|PID", help="default: the job that runs here")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--no-stacks", dest="stacks", action="store_false", help="ask no rank for its stack")
    parser.add_argument(
        "--run-folder", type=Path, metavar="FOLDER", help="that nodes share: tell the others there, and read them"
    )
    parser.add_argument(
        "--dump", type=Path, metavar="FOLDER", help="only write the latest operations there, for torchfrtrace"
    )
    return parser


# ---- looking ----------------------------------------------------------------------------------------------------


def examine(records: Sequence[RankRecord], *, stacks: bool = True, folder: Path | None = None) -> Report:
    """Look at a job twice, and find out what its ranks wait for; local.

    Args:
        records: Of its ranks on this node.
        stacks: Whether to ask ranks for their stacks.
        folder: Where the nodes tell each other, if anywhere.
    """
    before = {record.rank: record.latest for record in records}
    time.sleep(LOOK_SECONDS)
    states = states_of(records)
    going_on = {rank for rank, state in states.items() if state.latest != before[rank]}
    written = stacks_of(records) if stacks else {}
    sites = {record.rank: site_in(written.get(record.rank, ""), record.thread) for record in records}
    if folder is not None:
        write_states(folder, states, going_on)
        others, also_going_on = read_states(folder, records[0])
        states, going_on = {**others, **states}, going_on | also_going_on
    graph = wait_graph_of(states, records[0].size, sites)
    shown = {record.rank: _stack(record, written) for record in records if record.rank in graph.behind and stacks}
    return Report(records[0].job, records[0].identity["program"], graph, tuple(sorted(going_on)), shown)


def _stack(record: RankRecord, written: Mapping[int, str]) -> str:
    """Return a rank's stack, by py-spy where the rank does not answer and py-spy is there."""
    text = written[record.rank]
    spy = shutil.which("py-spy") if text.startswith("(no stack") else None
    if spy is None:
        return text.strip()
    command = [spy, "dump", "--nonblocking", "--pid", str(record.pid)]
    try:
        spied = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return text
    return spied.stdout.strip() or text


# ---- telling ----------------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """Return the report for people."""
    found = report.graph
    lines = [f"job {report.job}: {report.program}", f"{counted(found.size, 'rank')}, {_nodes(found)}", ""]
    processes = {state.record.pid: rank for rank, state in found.states.items()}
    if report.asked.isdecimal() and int(report.asked) in processes:
        lines.insert(2, f"process {report.asked} is rank {processes[int(report.asked)]}")
    lines += [f"{name_ranks(ranks)}: {place}" for place, ranks in found.classes]
    lines.append("")
    if report.going_on:
        lines.append(f"The job goes on: {name_ranks(report.going_on)} began operations within {LOOK_SECONDS:g} s.")
    lines += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in found.sentences]
    if all(state.condition is Condition.GONE for state in found.states.values()):
        lines.append("The job has ended: this is where its ranks were.")
    elif not report.going_on and not found.behind:
        lines.append("No rank waits for another one that is known here.")
    if found.unknown:
        todo = "ask there, or let all nodes write to one folder with --run-folder"
        lines.append(f"Not known here, as on other nodes: {name_ranks(found.unknown)}; {todo}.")
    for stack, ranks in ranks_by_text(
        {rank: _without_idents(text) for rank, text in report.stacks.items()}
    ).items():
        lines += ["", f"Stack of {name_ranks(ranks)}, innermost frame first:", stack]
    return "\n".join(lines)


def _without_idents(stack: str) -> str:
    """Return a stack without the numbers of threads, so that those of several ranks are the same text."""
    return re.sub(r"hread 0x[0-9a-f]+", "hread", stack)


def _nodes(found: WaitGraph) -> str:
    hosts: dict[str, list[int]] = {}
    for rank, state in found.states.items():
        hosts.setdefault(state.record.host, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())


def as_json(report: Report) -> dict[str, Any]:
    """Return the report for programs."""
    found = report.graph
    return {
        "job": report.job,
        "program": report.program,
        "size": found.size,
        "hangs": report.hangs,
        "going_on": report.going_on,
        "classes": [{"place": place, "ranks": ranks} for place, ranks in found.classes],
        "waits": {rank: sorted(awaited) for rank, awaited in found.waits.items()},
        "behind": found.behind,
        "is_circle": found.is_circle,
        "unknown": found.unknown,
        "sentences": found.sentences,
        "stacks": report.stacks,
        "ranks": [_of_rank(state) for state in found.states.values()],
    }


def _of_rank(state: RankState) -> dict[str, Any]:
    return {
        "rank": state.record.rank,
        "node": state.record.host,
        "pid": state.record.pid,
        "process": state.condition.value,
        "phase": state.phase.name.lower(),
        "operation": None if state.operation is None else str(state.operation),
        "seconds": round(seconds_in(state), 3),
        "operations": state.latest,
    }
