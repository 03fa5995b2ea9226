"""`axonmpi why`: options, and the layout of a report whose sentences are those of `observe/wait_graph.py`.

    axonmpi why                   the job of this user that runs on this node
    axonmpi why 3fa2c1d0          a job by its name
    axonmpi why 41237             a job by the process of a rank, or of its mpirun

It reads the records of the ranks twice, in shared memory, and requests the ranks' stacks. It works without MPI, and
if no rank responds. A node has the records of its own ranks; a shared folder (`--run-folder`) adds other nodes'.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Time between two reads of the records: a rank that begins no operation in this time may be hanging."""
SPY_SECONDS = 10.0
_PROGRAM = "axonmpi why"


@dataclass(frozen=True)
class Report:
    """The state of a job.

    Attributes:
        job: Its name.
        program: Its command line.
        graph: The ranks that wait, and the ranks that they wait for.
        going_on: Ranks that have begun an operation between the two reads.
        stacks: By rank, of the ranks that others wait for.
    """

    job: str
    program: str
    graph: WaitGraph
    going_on: tuple[int, ...]
    stacks: Mapping[int, str]

    @property
    def hangs(self) -> bool:
        """Whether ranks wait for others, and no rank has gone on."""
        return bool(self.graph.behind) and not self.going_on


def main(argv: Sequence[str]) -> int:
    """Print the state of a job; local.

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
    report = examine(records, stacks=options.stacks, folder=options.run_folder)
    print(json.dumps(as_json(report), indent=1) if options.json else as_text(report, options.job))
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


# ---- examining --------------------------------------------------------------------------------------------------


def examine(records: Sequence[RankRecord], *, stacks: bool = True, folder: Path | None = None) -> Report:
    """Read the records of a job twice, and return the graph of its waits; local.

    Args:
        records: The records of its ranks on this node.
        stacks: Whether to request stacks from the ranks.
        folder: A folder in which the nodes exchange their records; None: this node only.
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
    """Return a rank's stack, by py-spy if the rank does not answer and py-spy is installed."""
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


# ---- printing --------------------------------------------------------------------------------------------------


def as_text(report: Report, job: str = "") -> str:
    """Return the report for people; `job` is the job's name, or one of its processes, on the command line."""
    graph = report.graph
    hosts = ranks_by_text({rank: state.record.host for rank, state in graph.states.items()})
    nodes = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    lines = [f"job {report.job}: {report.program}", f"{counted(graph.size, 'rank')}, {nodes}", ""]
    processes = {state.record.pid: rank for rank, state in graph.states.items()}
    if job.isdecimal() and int(job) in processes:
        lines.insert(2, f"process {job} is rank {processes[int(job)]}")
    lines += [f"{name_ranks(ranks)}: {place}" for place, ranks in graph.classes]
    lines.append("")
    if report.going_on:
        lines.append(f"The job goes on: {name_ranks(report.going_on)} began operations within {LOOK_SECONDS:g} s.")
    lines += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in graph.sentences]
    if all(state.condition is Condition.GONE for state in graph.states.values()):
        lines.append("The job has ended: this is where its ranks were.")
    elif not report.going_on and not graph.behind:
        lines.append("No rank waits for another one that is known here.")
    if graph.unknown:
        todo = "ask there, or let all nodes write to one folder with --run-folder"
        lines.append(f"Not known here, as on other nodes: {name_ranks(graph.unknown)}; {todo}.")

    # Without thread numbers, equal stacks of several ranks are equal texts.
    stacks = {rank: re.sub(r"hread 0x[0-9a-f]+", "hread", text) for rank, text in report.stacks.items()}
    for stack, ranks in ranks_by_text(stacks).items():
        lines += ["", f"Stack of {name_ranks(ranks)}, innermost frame first:", stack]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report for programs."""
    graph = report.graph
    return {
        "job": report.job,
        "program": report.program,
        "size": graph.size,
        "hangs": report.hangs,
        "going_on": report.going_on,
        "classes": [{"place": place, "ranks": ranks} for place, ranks in graph.classes],
        "waits": {rank: sorted(awaited) for rank, awaited in graph.waits.items()},
        "behind": graph.behind,
        "is_circle": graph.is_circle,
        "unknown": graph.unknown,
        "sentences": graph.sentences,
        "stacks": report.stacks,
        "ranks": [_of_rank(state) for state in graph.states.values()],
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
