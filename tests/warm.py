"""A stand-in for this Python where tests start jobs, which has imported torch already.

In most of these jobs each rank takes a second or two to import torch, and a tenth of that for what is tested. Here
ranks are forks of a process that has imported it: `warm_server.py` forks, `warm_client.py` is what launchers start
and deal with. Everything of axonmpi and of MPI happens in each rank for itself.

Programs with other settings of Python, or without `OMP_NUM_THREADS=1`, run in a Python of their own. So do all in
tests that are marked `cold`, which are about how Python starts and ends, and all where there is no Linux.

What differs: forks iterate over sets of strings in the same order, since they hash alike; their environment in
/proc is the server's; they are in the tests' process group and not in the job's, and end with the process that
stands for them. Tests that this matters to are `cold`, and ranks of `mpirun -n 4 python -m pytest` are Pythons
of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from axonmpi import environment

TESTS = Path(__file__).parent
PATIENCE_SECONDS = 20.0
LONGEST_FOLDER = 80
"""In characters; an address of a socket may have 107, a name in this folder included."""

PYTHON = """#!{python} -ISE
import sys
sys.path.insert(0, {tests!r})
import warm_client
warm_client.main({python!r}, {address!r})
"""


class WarmPython:
    """A folder of programs, `python`, `axonmpi` and `mpirun`, and the server behind them; a context manager.

    Attributes:
        python: What stands for `sys.executable`.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self.python = self._folder / "python"

    @staticmethod
    def is_possible() -> bool:
        """Say so; otherwise jobs start as anywhere else."""
        short = len(tempfile.gettempdir()) < LONGEST_FOLDER
        return sys.platform == "linux" and hasattr(os, "pidfd_open") and short and environment.launched_ranks() == 1

    def __enter__(self) -> WarmPython:
        address = self._folder / "server"
        self._write("python", PYTHON.format(python=sys.executable, tests=str(TESTS), address=str(address)))
        (self._folder / "python3").symlink_to(self.python)
        self._write("axonmpi", f'#!/bin/sh\nexec "{self.python}" -m axonmpi "$@"\n')
        if mpirun := shutil.which("mpirun", path=str(Path(sys.executable).parent)):
            self._write("mpirun", f'#!/bin/sh\nexec "{mpirun}" "$@"\n')
        variables = environment.without_launcher_variables(os.environ)
        variables.pop("PYTHONPATH", None)  # that of each program comes with it
        self._server = subprocess.Popen(
            [sys.executable, str(TESTS / "warm_server.py"), str(address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**variables, "OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            self.__exit__()
            raise OSError(f"the server of warm interpreters ended with {self._server.returncode}")
        return self

    def _write(self, name: str, text: str) -> None:
        program = self._folder / name
        program.write_text(text)
        program.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        try:
            self._server.communicate(timeout=PATIENCE_SECONDS)  # closes its input, upon which it ends
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.communicate()
            raise
        finally:
            shutil.rmtree(self._folder)
