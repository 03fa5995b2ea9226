"""Jobs that are watched from outside while they run, and commands that run on ranks themselves."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.limits import limit

from axonmpi.launch.launcher_variables import detect_launchers, without_launcher_variables
from axonmpi.testing import launcher
from axonmpi.testing.mpirun import find_mpirun, mpirun_command
from axonmpi.utils.waiting import Backoff, wait_until


def wait_for(ready: Callable[[], object], seconds: float) -> bool:
    """Wait until `ready()` is true, looking now and then; return False if it is not in time."""
    return wait_until(ready, Backoff(0, 0.01, 0.05), seconds)


class Job:
    """A job, all processes of which have a variable of their own; a context manager that leaves none of them.

    Args:
        command: The launcher and what it starts.
        env: Variables of the job, besides those of this process.

    Attributes:
        launcher: The process of the launcher.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile("wb", prefix="axonmpi-job-")  # noqa: SIM115
        self._marker = uuid.uuid4().hex
        self.launcher = subprocess.Popen(
            command,
            env={**without_launcher_variables(), **env, launcher._MARKER: self._marker},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._output.close()

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.launcher.poll() is None or bool(self.processes())

    def processes(self, program: str = "") -> list[int]:
        """Return the ids of the processes whose command line begins with `program`."""
        found = launcher._processes_with(self._marker)
        return [number for number, command in found.items() if command.startswith(program)]

    def ranks(self) -> list[int]:
        """Return the ids of the processes of ranks: those that run Python."""
        return self.processes(sys.executable)

    def wait(self, seconds: float) -> int:
        """Wait for the end of all processes; return the exit code of the launcher."""
        if not wait_for(lambda: not self.is_running, seconds):
            self.kill()
            raise AssertionError(f"the job has not ended in {seconds:g} s:\n{self.output}")
        return self.launcher.wait()

    def kill(self) -> None:
        """Kill all processes, and wait until they have gone with all that they held."""

        def gone() -> bool:
            send(signal.SIGKILL, self.processes())
            return not self.is_running

        assert wait_for(gone, limit(10))


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def start_ranks(number: int, *arguments: object, **env: str) -> Job:
    """Start `number` ranks of this Python with arguments, under the mpirun that belongs to it."""
    command, variables = mpirun_command(find_mpirun(), number)
    return Job([*command, sys.executable, *map(str, arguments)], {**variables, "OMP_NUM_THREADS": "1", **env})


def run_on_ranks(number: int) -> None:
    """Replace this process with an mpirun of the same command; do nothing on the ranks of that."""
    if detect_launchers():
        return
    command, variables = mpirun_command(find_mpirun(), number)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    os.execv(command[0], [*command, sys.executable, *sys.argv])


def command_parser(
    text: str | None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a command of this folder; `options`: what `add_argument` takes, by the flag."""
    name = f"tests/jobs/run {Path(sys.argv[0]).parent.name}"
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=text, formatter_class=kind)
    for flag, settings in (options or {}).items():
        parser.add_argument(flag, **settings)
    return parser


def parse_with_seed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with the option `--seed`, and print the seed."""
    parser.add_argument("--seed", type=int, help="of all that is drawn at random; drawn itself if not given")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(10**6)
    print(f"--seed {options.seed}", flush=True)
    return options
