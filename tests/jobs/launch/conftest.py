"""What the tests of launches share: whole jobs under mpirun, and single processes."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest
from helpers.limits import limit

from axonmpi.launch.launcher_variables import without_launcher_variables
from axonmpi.testing import launch

PRELUDE = """
import os, sys, threading, time
import torch
import axonmpi as ax

world = ax.init_process_group()
"""
SERVER = """
import json, os, sys, threading
import axonmpi, axonmpi.testing

modules = [name for name in ("pytest", "mpi4py.MPI") if name in sys.modules]
print(json.dumps([modules, threading.active_count(), sys.excepthook is sys.__excepthook__]), flush=True)
for line in sys.stdin:
    code, variables, files = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.update(variables)
for number, file in enumerate([os.devnull, *files]):
    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
exec(compile(code, "the program", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """How a job, or a single process, ended.

    Attributes:
        code: Its exit code, of a job that of `mpirun`.
        out: What was printed.
        err: What was printed to stderr.
    """

    code: int
    out: str
    err: str

    def lines_of(self, rank):
        """Return what that rank itself reported on stderr, without the prefix."""
        prefix = f"[rank {rank}] "
        return [line.removeprefix(prefix) for line in self.err.splitlines() if line.startswith(prefix)]


@pytest.fixture
def job():
    """Return a function that runs code on n ranks that have made a world, and says how the job ended."""

    def run(n, code, *, before="", **env):
        script = textwrap.dedent(before) + PRELUDE + textwrap.dedent(code)
        result = launch(n, script, timeout=limit(60), env={"OMP_NUM_THREADS": "1", **env})
        assert (result.timed_out, result.leftover) == (False, ()), result.stdout + result.stderr
        return Ended(result.returncode, result.stdout, result.stderr)

    return run


class Server:
    """A process without launcher that has imported axonmpi, and forks one for each program.

    Attributes:
        imported: What the import has left: modules, the number of threads, and whether the hook is Python's own.
    """

    def __init__(self):
        variables = without_launcher_variables(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            variables.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.imported = self._answer()

    def _answer(self):
        if not select.select([self._process.stdout], [], [], limit(60))[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
        return json.loads(self._process.stdout.readline())

    def run(self, code, folder, variables):
        files = [folder / name for name in ("out", "err")]
        print(json.dumps([textwrap.dedent(code), variables, list(map(str, files))]), file=self._process.stdin)
        return Ended(self._answer(), *(file.read_text() for file in files))

    def close(self):
        with self._process:
            self._process.stdin.close()


@pytest.fixture(scope="session")
def server():
    with contextlib.closing(Server()) as started:
        yield started


@pytest.fixture
def alone(server, tmp_path):
    """Return a function that runs code in a process without a launcher, with some variables set."""
    return lambda code, **env: server.run(code, tmp_path, env)
