"""Makes a fault happen in a job on nodes that are namespaces, and judges how the job ends."""

import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from helpers.limits import limit
from helpers.nodes import Nodes
from jobs.faults.table import Fault
from jobs.job import Job, send, wait_for

PROGRAMS = Path(__file__).with_name("programs.py")
START_SECONDS = 30.0
"""How long a job may take to come to its fault, on a quiet machine."""
FULL = "1m"
"""The size of a /dev/shm that MPI libraries fill."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        fault: What was wrong, in words.
        ranks: How many of each node.
        seen: The line that the table shows.
        seconds: From the fault to the end of its last process.
        code: The exit code of the launcher.
        problems: What was not as it has to be; empty if all was.
        output: All that was printed.
    """

    fault: str
    ranks: tuple[int, ...]
    seen: str
    seconds: float
    code: int | None
    problems: tuple[str, ...]
    output: str


def inject(fault: Fault, ranks: tuple[int, ...], nodes: Nodes, other: Path | None = None) -> Outcome:
    """Run a job with a fault, and judge it.

    Args:
        fault: What goes wrong.
        ranks: How many of each node.
        nodes: Two nodes at least.
        other: The launcher of another MPI than this Python's, for the fault that needs one.
    """
    with tempfile.TemporaryDirectory(prefix="axonmpi-fault-") as name:
        folder = Path(name)
        for node in range(2):
            nodes.clear_shared_memory(node)
        if fault.act == "fill /dev/shm":
            nodes.resize_shared_memory(0, FULL)
        command, env = _command(fault, ranks, nodes, folder, other)
        begun = time.monotonic()
        try:
            with Job(command, {**env, "TMPDIR": name}) as job:
                return _watched(fault, ranks, nodes, job, folder, begun)
        finally:
            nodes.resize_shared_memory(0, "50%")
            nodes.cut(1, healed=True)


def _command(
    fault: Fault, ranks: tuple[int, ...], nodes: Nodes, folder: Path, other: Path | None
) -> tuple[list[str], dict[str, str]]:
    env = {**fault.env, "FAULT_MARK": str(folder / "mark"), "FAULT_PID": str(folder / "pid")}
    if fault.act in ("fill /dev/shm", "mix", "no launcher"):
        env["FAULT_AT_START"] = "1"
    if fault.act == "no launcher":
        return [*nodes.enter(0), sys.executable, str(PROGRAMS), fault.name], env
    mpirun = other if fault.act == "mix" else None
    command, variables = nodes.job(ranks, str(PROGRAMS), fault.name, *fault.arguments, env=env, mpirun=mpirun)
    return [*nodes.enter(0), *command], variables


def _watched(fault: Fault, ranks: tuple[int, ...], nodes: Nodes, job: Job, folder: Path, begun: float) -> Outcome:
    """Wait for the fault and then for the end of the job; collect what is wrong with it."""
    problems = []
    wait_for(lambda: _read(folder / "mark") or not job.is_running, limit(START_SECONDS))
    if mark := _read(folder / "mark"):
        begun = float(mark)
        _act(fault, job, nodes, folder)
    else:
        problems.append("the job has not come to its fault")
    over = wait_for(lambda: not job.is_running, fault.seconds - time.monotonic() + begun)
    seconds = time.monotonic() - begun
    code = job.launcher.poll()
    if not over:
        who = "the job goes on" if code is None else "processes are left"
        problems.append(f"{who} after {fault.seconds:g} s")
    elif fault.code != "any" and (code == 0 if fault.code is None else code != fault.code):
        problems.append(f"exit code {code}")
    job.kill()
    output = job.output
    found = [re.search(f".*(?:{pattern}).*", output) for pattern in fault.says]
    problems += [f"not said: {fault.says[i]}" for i, match in enumerate(found) if match is None]
    for node in range(2):
        if files := [name for name in nodes.shared_memory(node) if not _may_stay(name, code)]:
            problems.append(f"left in /dev/shm of n{node + 1}: {', '.join(files)}")
    seen = " ".join(found[0][0].split()) if found and found[0] else ""
    return Outcome(fault.what, ranks, seen, seconds, code, tuple(problems), output)


def _read(file: Path) -> str:
    """Return what a job has written, "" before that."""
    return file.read_text() if file.exists() else ""


def _may_stay(name: str, code: int | None) -> bool:
    """Return True for a file in /dev/shm that may outlive a job: the records of a failed job."""
    return name.startswith("axonmpi-") and ("/" not in name or code != 0)


def _act(fault: Fault, job: Job, nodes: Nodes, folder: Path) -> None:
    """Do what is done from outside, if anything."""
    if fault.act == "kill the launcher":
        job.launcher.kill()
    elif fault.act == "cut the link":
        nodes.cut(1)
    elif fault.act == "stop a rank":  # at any moment of the next tenth of a second
        *_, seed = fault.arguments
        time.sleep(random.Random(seed).random() / 10)
        send(signal.SIGSTOP, [int((folder / "pid").read_text())])
