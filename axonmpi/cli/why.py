"""`axonmpi why`: the ranks of a running or hanging job that wait for others, from another shell.

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

from ..observe.board import Condition, RankPage
from ..observe.diagnosis import Diagnosis, diagnose, seconds_in, site_in
from ..observe.flight_recorder import dump
from ..observe.jobs import find_job
from ..observe.judgement import Standing, look_at
from ..observe.nodes import read_others, tell_others
from ..observe.stacks import stacks_of
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
        diagnosis: The ranks that wait, and the ranks that they wait for.
        going_on: Ranks that have begun an operation between the two reads.
        stacks: By rank, of the ranks that others wait for.
    """

    job: str
    program: str
    diagnosis: Diagnosis
    going_on: tuple[int, ...]
    stacks: Mapping[int, str]

    @property
    def hangs(self) -> bool:
        """Whether ranks wait for others, and no rank has gone on."""
        return bool(self.diagnosis.behind) and not self.going_on


def main(argv: Sequence[str]) -> int:
    """Print the state of a job; local.

    Returns:
        0 if the job goes on or has ended, 1 if it hangs, 2 if there is no such job.
    """
    options = parse_arguments(_parser(), argv)
    try:
        pages = find_job(options.job)
    except LookupError as error:
        return refuse(_PROGRAM, str(error))
    if options.dump is not None:
        files = dump(pages, options.dump)
        print(f"{counted(len(files), 'file')} in {options.dump}; analyse with: torchfrtrace {options.dump}")
        return 0
    report = examine(pages, stacks=options.stacks, folder=options.run_folder)
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


def examine(pages: Sequence[RankPage], *, stacks: bool = True, folder: Path | None = None) -> Report:
    """Read the records of a job twice, and diagnose it; local.

    Args:
        pages: The records of its ranks on this node.
        stacks: Whether to request stacks from the ranks.
        folder: A folder in which the nodes exchange their records; None: this node only.
    """
    before = {page.rank: page.latest for page in pages}
    time.sleep(LOOK_SECONDS)
    standings = look_at(pages)
    going_on = {rank for rank, standing in standings.items() if standing.latest != before[rank]}
    written = stacks_of(pages) if stacks else {}
    sites = {page.rank: site_in(written.get(page.rank, ""), page.thread) for page in pages}
    if folder is not None:
        tell_others(folder, standings, going_on)
        others, also_going_on = read_others(folder, pages[0])
        standings, going_on = {**others, **standings}, going_on | also_going_on
    diagnosis = diagnose(standings, pages[0].size, sites)
    shown = {page.rank: _stack(page, written) for page in pages if page.rank in diagnosis.behind and stacks}
    return Report(pages[0].job, pages[0].identity["program"], diagnosis, tuple(sorted(going_on)), shown)


def _stack(page: RankPage, written: Mapping[int, str]) -> str:
    """Return a rank's stack, by py-spy if the rank does not answer and py-spy is installed."""
    text = written[page.rank]
    spy = shutil.which("py-spy") if text.startswith("(no stack") else None
    if spy is None:
        return text.strip()
    command = [spy, "dump", "--nonblocking", "--pid", str(page.pid)]
    try:
        spied = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return text
    return spied.stdout.strip() or text


# ---- printing --------------------------------------------------------------------------------------------------


def as_text(report: Report, job: str = "") -> str:
    """Return the report for people; `job` is the job's name, or one of its processes, on the command line."""
    diagnosis = report.diagnosis
    hosts = ranks_by_text({rank: standing.page.host for rank, standing in diagnosis.standings.items()})
    nodes = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    lines = [f"job {report.job}: {report.program}", f"{counted(diagnosis.size, 'rank')}, {nodes}", ""]
    processes = {standing.page.pid: rank for rank, standing in diagnosis.standings.items()}
    if job.isdecimal() and int(job) in processes:
        lines.insert(2, f"process {job} is rank {processes[int(job)]}")
    lines += [f"{name_ranks(ranks)}: {place}" for place, ranks in diagnosis.classes]
    lines.append("")
    if report.going_on:
        lines.append(f"The job goes on: {name_ranks(report.going_on)} began operations within {LOOK_SECONDS:g} s.")
    lines += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in diagnosis.sentences]
    if all(standing.condition is Condition.GONE for standing in diagnosis.standings.values()):
        lines.append("The job has ended: this is where its ranks were.")
    elif not report.going_on and not diagnosis.behind:
        lines.append("No rank waits for another one that is known here.")
    if diagnosis.unknown:
        todo = "ask there, or let all nodes write to one folder with --run-folder"
        lines.append(f"Not known here, as on other nodes: {name_ranks(diagnosis.unknown)}; {todo}.")

    # Without thread numbers, equal stacks of several ranks are equal texts.
    stacks = {rank: re.sub(r"hread 0x[0-9a-f]+", "hread", text) for rank, text in report.stacks.items()}
    for stack, ranks in ranks_by_text(stacks).items():
        lines += ["", f"Stack of {name_ranks(ranks)}, innermost frame first:", stack]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report for programs."""
    diagnosis = report.diagnosis
    return {
        "job": report.job,
        "program": report.program,
        "size": diagnosis.size,
        "hangs": report.hangs,
        "going_on": report.going_on,
        "classes": [{"place": place, "ranks": ranks} for place, ranks in diagnosis.classes],
        "waits": {rank: sorted(awaited) for rank, awaited in diagnosis.waits.items()},
        "behind": diagnosis.behind,
        "is_circle": diagnosis.is_circle,
        "unknown": diagnosis.unknown,
        "sentences": diagnosis.sentences,
        "stacks": report.stacks,
        "ranks": [_of_rank(standing) for standing in diagnosis.standings.values()],
    }


def _of_rank(standing: Standing) -> dict[str, Any]:
    return {
        "rank": standing.page.rank,
        "node": standing.page.host,
        "pid": standing.page.pid,
        "process": standing.condition.value,
        "phase": standing.phase.name.lower(),
        "operation": None if standing.operation is None else str(standing.operation),
        "seconds": round(seconds_in(standing), 3),
        "operations": standing.latest,
    }
