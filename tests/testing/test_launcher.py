"""launch: a whole job in a subprocess, its exit code, output, time and what it leaves behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axonmpi.errors import LaunchError
from axonmpi.testing import launch
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

RANKS = """
    import os, sys
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    kept = [name for name in ("HOME", "TORCHELASTIC_RUN_ID") if name in os.environ]
    print(f"rank {comm.rank} of {comm.size} got {sys.argv[1:]} {os.environ['MINE']} {kept}")
"""


def test_ranks_that_outnumber_the_cores_form_a_job_of_their_own_even_inside_a_job(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of the surrounding launcher, and of no other")
    result = launch(5, RANKS, "a", 7, env={"MINE": "mine"})
    assert result.returncode == 0, result.stderr
    said = "of 5 got ['a', '7'] mine ['HOME']"
    assert sorted(result.stdout.split("\n")[:-1]) == [f"rank {rank} {said}" for rank in range(5)]
    assert result.stderr == ""
    assert not result.timed_out
    assert result.leftover == ()
    assert 0 < result.seconds < 60


def test_a_script_a_module_and_the_working_folder(tmp_path):
    script = tmp_path / "tool.py"
    script.write_text("import os, sys; print(os.getcwd(), sys.argv[1])")
    for arguments in ((script, "x"), (str(script), "x"), ("-m", "tool", "x")):
        result = launch(1, *arguments, cwd=tmp_path)
        assert result.stdout == f"{tmp_path} x\n", result.stderr


def test_a_job_that_does_not_end_is_ended():
    code = """
        import time
        from mpi4py import MPI
        print("started", flush=True)
        time.sleep(1000)
    """
    result = launch(2, code, timeout=5)
    assert result.timed_out
    assert result.returncode != 0
    assert result.stdout.count("started") == 2
    assert 5 <= result.seconds < 22
    assert result.leftover == ()


def test_processes_left_behind_are_named_and_killed_and_an_exit_code_is_reported():
    code = """
        import subprocess, sys
        from mpi4py import MPI
        nowhere = subprocess.DEVNULL
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        for own_session in (True, False):
            subprocess.Popen(command, start_new_session=own_session, stdout=nowhere, stderr=nowhere)
        sys.exit(3)
    """
    result = launch(1, code)
    assert result.returncode == 3
    assert len(result.leftover) == 2
    for each in result.leftover:
        number, _, command = each.partition(": ")
        assert "time.sleep(1000)" in command
        deadline = time.monotonic() + 10
        while is_running(int(number)):
            assert time.monotonic() < deadline, "the process left behind is still there"
            os.sched_yield()


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        launch(0, "pass")
    with pytest.raises(ValueError, match="timeout: expected a positive"):
        launch(1, "pass", timeout=0)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        launch(1, tmp_path / "absent.py")
    with pytest.raises(LaunchError, match="no-such-mpirun"):
        launch(1, "pass", mpirun="no-such-mpirun")


def test_the_launcher_of_the_loaded_library_is_found():
    library = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    vendor = subprocess.run([sys.executable, "-c", library], capture_output=True, text=True, check=True).stdout
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    assert ("Open MPI" in version) == ("Open MPI" in vendor)


@pytest.mark.parametrize("user", [0, 1000])
def test_open_mpi_gets_options_and_mpich_needs_none(tmp_path, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for says in ("mpirun (Open MPI) 5.0.0", "HYDRA build details:"):
        program = tmp_path / f"{says[:2]}run"
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
        command, variables = mpirun_command(program, 3)
        assert command[:3] == [str(program), "-n", "3"]
        assert (":OVERSUBSCRIBE" in command) == ("Open" in says)
        as_root = "1" if user == 0 and "Open" in says else None
        assert variables.get("OMPI_ALLOW_RUN_AS_ROOT") == as_root
    assert (len(command), variables) == (3, {})
