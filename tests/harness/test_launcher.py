"""launch: a whole job in a subprocess, its exit code, output, time and what it leaves behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axonmpi.errors import LaunchError
from axonmpi.testing import launch
from axonmpi.testing.launcher import _processes_with
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

pytestmark = pytest.mark.cold

RANKS = """
    import sys
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    print(f"rank {comm.rank} of {comm.size} got {sys.argv[1:]}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_form_one_job_even_if_they_outnumber_the_cores(n):
    result = launch(n, RANKS, "a", 7)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == [f"rank {rank} of {n} got ['a', '7']" for rank in range(n)]
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


def test_an_exit_code_is_reported():
    assert launch(2, "import sys; from mpi4py import MPI; sys.exit(3)").returncode == 3


def test_variables_are_set_on_top_of_the_others():
    code = "import os; print(os.environ['MINE'], 'HOME' in os.environ)"
    assert launch(1, code, env={"MINE": "yes"}).stdout == f"yes {'HOME' in os.environ}\n"


def test_a_job_inside_a_job_is_a_job_of_its_own(monkeypatch):
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "3")
    result = launch(2, RANKS)
    assert "rank 0 of 2" in result.stdout
    assert "rank 1 of 2" in result.stdout


def test_a_job_that_does_not_end_is_ended():
    code = """
        import time
        from mpi4py import MPI
        print("started", flush=True)
        time.sleep(1000)
    """
    result = launch(2, code, timeout=8)
    assert result.timed_out
    assert result.returncode != 0
    assert result.stdout.count("started") == 2
    assert 8 <= result.seconds < 25
    assert result.leftover == ()


@pytest.mark.parametrize("own_session", [True, False])
def test_a_process_left_behind_is_named_and_killed(own_session):
    code = f"""
        import subprocess, sys
        from mpi4py import MPI
        nowhere = subprocess.DEVNULL
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        subprocess.Popen(command, start_new_session={own_session}, stdout=nowhere, stderr=nowhere)
    """
    result = launch(1, code)
    assert result.returncode == 0
    assert len(result.leftover) == 1
    number, _, command = result.leftover[0].partition(": ")
    assert "time.sleep(1000)" in command
    deadline = time.monotonic() + 10
    while _is_running(int(number)):
        assert time.monotonic() < deadline, "the process left behind is still there"
        os.sched_yield()


def _is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_processes_are_found_by_their_marker():
    marker = "0123-only-here"
    code = "print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "AXONMPI_LAUNCH_ID": marker},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"up\n"
        assert list(_processes_with(marker)) == [process.pid]
        process.communicate(b"\n")
    assert _processes_with(marker) == {}


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
    program = find_mpirun()
    library = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    vendor = subprocess.run([sys.executable, "-c", library], capture_output=True, text=True, check=True).stdout
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert ("Open MPI" in version) == ("Open MPI" in vendor)


def _fake(folder, name, says):
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("user", [0, 1000])
def test_open_mpi_gets_its_options(tmp_path, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    command, variables = mpirun_command(_fake(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.0"), 3)
    assert command[1:3] == ["-n", "3"]
    assert ":OVERSUBSCRIBE" in command
    assert variables.get("OMPI_ALLOW_RUN_AS_ROOT") == ("1" if user == 0 else None)


def test_mpich_needs_no_options(tmp_path):
    program = _fake(tmp_path, "mpirun", "HYDRA build details:")
    assert mpirun_command(program, 3) == ([str(program), "-n", "3"], {})
