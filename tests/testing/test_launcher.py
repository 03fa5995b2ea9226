"""launch: a whole job in a subprocess, its exit code, output, time and what it leaves behind."""

import os
import signal
from functools import partial

import pytest
from helpers.compare import refused
from helpers.limits import limit

from axonmpi.errors import LaunchError
from axonmpi.testing import launch, launcher
from axonmpi.testing.mpirun import mpirun_command
from axonmpi.utils.processes import process
from axonmpi.utils.waiting import Backoff, wait_until

RANKS = """
    import os, sys
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    kept = [name for name in ("HOME", "TORCHELASTIC_RUN_ID") if name in os.environ]
    print(f"rank {comm.rank} of {comm.size} got {sys.argv[1:]} {os.environ['MINE']} {kept}")
"""


def program(path, text):
    """Make a file of the shell that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def mpirun(tmp_path):
    """A launcher that starts one process, whatever it is asked for."""
    return program(tmp_path / "mpirun", 'case $1 in --version) ;; *) shift 2; exec "$@" ;; esac')


def test_ranks_that_outnumber_the_cores_form_a_job_of_their_own_even_inside_a_job(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of the surrounding launcher, and of no other")
    result = launch(5, RANKS, "a", 7, env={"MINE": "mine"})
    said = "of 5 got ['a', '7'] mine ['HOME']"
    assert sorted(result.stdout.split("\n")[:-1]) == [f"rank {rank} {said}" for rank in range(5)]
    assert (result.returncode, result.stderr, result.timed_out, result.leftover) == (0, "", False, ())
    assert 0 < result.seconds < 60


def test_a_script_a_module_and_the_working_folder(mpirun, tmp_path):
    script = tmp_path / "tool.py"
    script.write_text("import os, sys; print(os.getcwd(), sys.argv[1])")
    for arguments in ((script, "x"), (str(script), "x"), ("-m", "tool", "x")):
        result = launch(1, *arguments, cwd=tmp_path, mpirun=mpirun)
        assert result.stdout == f"{tmp_path} x\n", result.stderr


def test_a_job_that_does_not_end_is_ended_with_its_children(mpirun):
    code = "import subprocess; subprocess.run(['sleep', '1000'])"
    result = launch(2, code, timeout=0.5, mpirun=mpirun)
    assert (result.timed_out, result.returncode, result.leftover) == (True, -signal.SIGTERM, ())
    assert 0.5 <= result.seconds < limit(10)


def has_ended(number):
    return process(number) is None


def test_processes_left_behind_are_named_and_killed_and_an_exit_code_is_reported(mpirun, monkeypatch):
    monkeypatch.setattr(launcher, "_LEAVE_SECONDS", 0.0)
    code = """
        import subprocess, sys
        nowhere = subprocess.DEVNULL
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        for own_session in (True, False):
            subprocess.Popen(command, start_new_session=own_session, stdout=nowhere, stderr=nowhere)
        sys.exit(3)
    """
    result = launch(1, code, mpirun=mpirun)
    assert (result.returncode, len(result.leftover)) == (3, 2)
    for each in result.leftover:
        number, _, command = each.partition(": ")
        assert "time.sleep(1000)" in command
        assert wait_until(partial(has_ended, int(number)), Backoff(0, 0.01), limit(10))


def test_wrong_arguments_are_refused(tmp_path):
    refused(
        (ValueError, FileNotFoundError, LaunchError),
        (lambda: launch(0, "pass"), "n: expected at least 1, got 0"),
        (lambda: launch(1, "pass", timeout=0), "timeout: expected a positive"),
        (lambda: launch(1, tmp_path / "absent.py"), "which does not exist"),
        (lambda: launch(1, "pass", mpirun="no-such-mpirun"), "no-such-mpirun"),
    )


@pytest.mark.parametrize("user", [0, 1000])
def test_open_mpi_gets_options_and_mpich_needs_none(tmp_path, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    command, variables = mpirun_command(program(tmp_path / "openmpi", "echo 'mpirun (Open MPI) 5.0.0'"), 3)
    assert command[:5] == [str(tmp_path / "openmpi"), "-n", "3", "--map-by", ":OVERSUBSCRIBE"]
    assert variables.get("OMPI_ALLOW_RUN_AS_ROOT") == ("1" if user == 0 else None)
    command, variables = mpirun_command(program(tmp_path / "mpich", "echo HYDRA build details:"), 3)
    assert (command, variables) == ([str(tmp_path / "mpich"), "-n", "3"], {})
