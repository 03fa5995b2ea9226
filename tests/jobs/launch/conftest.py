"""What the tests of launches share: whole jobs under mpirun, and single processes."""

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

from axonmpi.launch.variables import without_launcher_variables
from axonmpi.testing import launch

PRELUDE = """
import os, sys, threading, time
import torch
import axonmpi as ax

world = ax.init_process_group()

def fail_now():
    print(f"failing at {time.monotonic()}", flush=True)
"""
SECONDS_TO_END = 5.0


class Ended:
    """How a job ended.

    Attributes:
        code: Exit code of `mpirun`.
        out: What the ranks printed.
        err: What the ranks and `mpirun` printed to stderr.
        seconds: From `fail_now()` to the end of `mpirun`, None where no rank called it.
    """

    def __init__(self, result, end):
        assert not result.timed_out, result.stdout + result.stderr
        assert result.leftover == ()
        self.code = result.returncode
        self.out = result.stdout
        self.err = result.stderr
        failed = re.search(r"failing at ([\d.]+)", result.stdout)
        self.seconds = end - float(failed[1]) if failed else None

    def assert_ended_soon(self):
        assert self.seconds is not None, self.out + self.err
        assert 0 <= self.seconds < SECONDS_TO_END

    def lines_of(self, rank):
        """What that rank itself reported on stderr, without the prefix."""
        prefix = f"[rank {rank}] "
        return [line.removeprefix(prefix) for line in self.err.splitlines() if line.startswith(prefix)]


@pytest.fixture
def job():
    """Return a function that runs code on n ranks that have made a world, and says how the job ended."""

    def run(n, code, *, before="", **env):
        script = textwrap.dedent(before) + PRELUDE + textwrap.dedent(code)
        result = launch(n, script, timeout=120, env={"OMP_NUM_THREADS": "1", **env})
        return Ended(result, time.monotonic())

    return run


@pytest.fixture
def alone():
    """Return a function that runs code in one process without a launcher, with some variables set."""

    def run(code, **env):
        variables = without_launcher_variables(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            variables.pop(name, None)
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**variables, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
