"""Makes a fault happen in a job on nodes that are namespaces, and judges how the job ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers.nodes import Nodes
from jobs.faults.table import Fault

from axonmpi.launch.variables import without_launcher_variables
from axonmpi.utils.waiting import Backoff, wait_until

__all__ = ["Outcome", "inject"]

PROGRAMS = Path(__file__).with_name("programs.py")
START_SECONDS = 90.0
"""How long a job may take to come to its fault."""
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

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Job:
    """A job with a marker in the environment of all its processes, and a file for its output."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.mark = folder / "mark"
        self._output = folder / "output"
        self._marker = f"AXONMPI_LAUNCH_ID={uuid.uuid4().hex}".encode()
        name, _, value = self._marker.decode().partition("=")
        variables = {**without_launcher_variables(), **env, name: value, "TMPDIR": str(folder)}
        self.begun = time.monotonic()
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for_fault(self) -> float | None:
        """Return when the fault happened, None if the job has ended before."""
        wait_until(lambda: self._marked() or not self.is_running(), Backoff(0, 0.01, 0.05), START_SECONDS)
        return float(self.mark.read_text()) if self._marked() else None

    def _marked(self) -> bool:
        return self.mark.exists() and bool(self.mark.read_text())

    def is_running(self) -> bool:
        return self.launcher.poll() is None or bool(self.processes())

    def processes(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if self._marker in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        """Kill what is left, and wait until it is gone, with all that it held."""
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.launcher.wait(10)
        assert wait_until(lambda: not self.processes(), Backoff(0, 0.01, 0.05), 10.0)


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
        job = Job(*_command(fault, ranks, nodes, folder, other), folder)
        try:
            return _watched(fault, ranks, nodes, job)
        finally:
            job.end()
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
    command, variables = nodes.job(
        ranks, str(PROGRAMS), fault.name, *fault.arguments, env=env, mpirun=other if fault.act == "mix" else None
    )
    return [*nodes.enter(0), *command], variables


def _watched(fault: Fault, ranks: tuple[int, ...], nodes: Nodes, job: Job) -> Outcome:
    """Wait for the fault and then for the end of the job; collect what is wrong with it."""
    problems = []
    at = job.wait_for_fault()
    if at is None:
        problems.append("the job has not come to its fault")
        at = job.begun
    elif fault.act:
        _ACTS.get(fault.act, _nothing)(job, nodes)
    over = wait_until(lambda: not job.is_running(), Backoff(0, 0.01, 0.05), fault.seconds - time.monotonic() + at)
    seconds = time.monotonic() - at
    if not over:
        who = "processes are left" if job.launcher.poll() is not None else "the job goes on"
        problems.append(f"{who} after {fault.seconds:g} s")
    code = job.launcher.poll()
    if over and fault.code != "any" and (code == 0 if fault.code is None else code != fault.code):
        problems.append(f"exit code {code}")
    job.end()
    output = job.output
    found = [re.search(f".*(?:{pattern}).*", output) for pattern in fault.says]
    problems += [f"not said: {fault.says[i]}" for i, match in enumerate(found) if match is None]
    for node in range(2):
        if files := [name for name in nodes.shared_memory(node) if not _may_stay(name, code)]:
            problems.append(f"left in /dev/shm of n{node + 1}: {', '.join(files)}")
    seen = " ".join(found[0][0].split()) if found and found[0] else ""
    return Outcome(fault.what, ranks, seen, seconds, code, tuple(problems), output)


def _may_stay(name: str, code: int | None) -> bool:
    """Say whether a file in /dev/shm may outlive a job: the pages of one that failed, until the next starts."""
    return name.startswith("axonmpi-") and ("/" not in name or code != 0)


def _nothing(job: Job, nodes: Nodes) -> None:
    """Everything has been done before."""


def _kill_launcher(job: Job, nodes: Nodes) -> None:
    job.launcher.kill()


def _cut(job: Job, nodes: Nodes) -> None:
    nodes.cut(1)


def _stop_rank(job: Job, nodes: Nodes) -> None:
    """Stop the rank at any moment of the next tenth of a second."""
    time.sleep(random.random() / 10)
    os.kill(int(job.mark.with_name("pid").read_text()), signal.SIGSTOP)


_ACTS: dict[str, Callable[[Job, Nodes], None]] = {
    "kill the launcher": _kill_launcher,
    "cut the link": _cut,
    "stop a rank": _stop_rank,
}
