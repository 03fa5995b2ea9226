"""Launcher of a Python script under `mpirun`, for tests of whole jobs.

A test of an abort needs the exit code, the output, the time, and the processes that are left. So the job runs in a
session of its own, writes into files rather than pipes (a process that is left would hold a pipe open), and a
variable in the environment of its processes identifies them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..launch.cpu import release_core
from ..launch.launcher_variables import without_launcher_variables
from ..types import Seconds
from ..utils.arguments import integer, seconds
from ..utils.waiting import Backoff, wait_until
from .mpirun import find_mpirun, mpirun_command

_MARKER = "AXONMPI_LAUNCH_ID"
_LEAVE_SECONDS = 2.0
"""How long processes of a job may outlive its `mpirun` before they count as left over."""


@dataclass(frozen=True)
class LaunchResult:
    """The end of an `mpirun`: its exit code, output and time.

    Attributes:
        returncode: Exit code of `mpirun`; negative: the signal that ended it.
        stdout: Standard output of all ranks.
        stderr: Standard error of all ranks and of `mpirun`.
        seconds: From start to end of `mpirun`.
        timed_out: Whether it was ended by the time-out.
        leftover: Processes of the job that outlived `mpirun`, as "id: command"; they were killed.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    leftover: tuple[str, ...]


def launch(
    n: int,
    script_or_code: str | Path,
    *args: object,
    timeout: Seconds | None = 60.0,
    env: Mapping[str, str] | None = None,
    mpirun: str | Path | None = None,
    cwd: str | Path | None = None,
) -> LaunchResult:
    """Run a Python script on n ranks under `mpirun` and wait until the job is over; local.

    Works inside an MPI job too: the new job does not see the surrounding launcher's variables.

    Args:
        n: Number of ranks, at least 1; may exceed the number of cores.
        script_or_code: A path; or source code; or an option of Python, such as `-m` with the module in `args`.
        *args: Arguments of the script.
        timeout: Seconds after which the job is ended; None never ends it.
        env: Variables to set in addition.
        mpirun: The launcher; None finds the launcher of mpi4py's MPI library.
        cwd: Folder to run in, None for the current one.

    Returns:
        Exit code, output, time and leftover processes. A failing job is a result, not an exception.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `n` is below 1, or the time-out is not positive.
        FileNotFoundError: A `Path` that does not exist.
        LaunchError: There is no `mpirun` of mpi4py's MPI library.
    """
    integer("n", n, minimum=1)
    if not isinstance(script_or_code, str | Path):
        raise TypeError(f"script_or_code: expected a path or source code, got {script_or_code!r}")
    limit = seconds("timeout", timeout)
    marker = uuid.uuid4().hex
    surrounding = without_launcher_variables()
    command, settings = mpirun_command(find_mpirun(mpirun), n)
    variables = {**settings, **surrounding, **(env or {}), _MARKER: marker}
    with tempfile.TemporaryDirectory(prefix="axonmpi-launch-") as folder:
        python = [sys.executable, *_python_arguments(script_or_code, Path(folder))]
        with open(Path(folder, "stdout"), "w+b") as out, open(Path(folder, "stderr"), "w+b") as err:
            started = time.monotonic()
            process = subprocess.Popen(
                [*command, *python, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=release_core,
            )
            timed_out = _wait(process, limit, marker)
            taken = time.monotonic() - started
            leftover = _end_leftover(marker)
            return LaunchResult(process.returncode, _text(out), _text(err), taken, timed_out, leftover)


def _python_arguments(script_or_code: str | Path, folder: Path) -> list[str]:
    """Return the arguments of Python; source code becomes a file, so that tracebacks show its lines."""
    if isinstance(script_or_code, Path):
        if not script_or_code.exists():
            raise FileNotFoundError(f"script: expected a file, got {script_or_code}, which does not exist")
        return [str(script_or_code)]
    is_option = script_or_code.startswith("-") and "\n" not in script_or_code
    if is_option or (script_or_code.endswith(".py") and Path(script_or_code).is_file()):
        return [script_or_code]
    script = folder / "launched.py"
    script.write_text(textwrap.dedent(script_or_code))
    return [str(script)]


def _wait(process: subprocess.Popen[bytes], timeout: float | None, marker: str) -> bool:
    """Wait for `mpirun`; return True after its process group was ended at the time-out. An interrupt ends all."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        _end_group(process)
        return True
    except BaseException:
        _end_group(process)
        _end_leftover(marker)
        raise
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End `mpirun` and its process group, by SIGTERM and then by SIGKILL."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience)
    process.wait()


def _end_leftover(marker: str) -> tuple[str, ...]:
    """Kill the job's processes that do not end by themselves, and return their names."""
    wait_until(lambda: not _processes_with(marker), Backoff(0, shortest=0.02), _LEAVE_SECONDS)
    processes = _processes_with(marker)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(f"{pid}: {command}" for pid, command in processes.items())


def _processes_with(marker: str) -> dict[int, str]:
    """Return the commands of the processes with the marker in their environment; none without /proc."""
    wanted = f"{_MARKER}={marker}".encode()
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                processes[int(folder.name)] = command.strip()
    return processes


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")
