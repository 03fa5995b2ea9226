"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

import textwrap

import pytest

from axonmpi.backends import runtime
from axonmpi.testing import launch

DOCTOR = "import sys; from axonmpi.cli import main; sys.exit(main(['doctor']))"


def test_a_single_process(alone):
    ended = alone(DOCTOR)
    library = runtime.library_info()
    assert ended.returncode == 0, ended.stderr
    assert f"{library.vendor} {library.version} from {library.path}" in ended.stdout
    for part in (
        "python ",
        "torch ",
        "mpi4py ",
        "MPI_THREAD_MULTIPLE",
        "no launcher's variables",
        "/dev/shm",
        library.mpirun,
    ):
        assert part in ended.stdout
    assert "ranks         1 on 1 node" in ended.stdout
    assert "  path " not in ended.stdout
    assert ended.stdout.endswith("All is well.\n")


def test_two_ranks_give_one_report():
    result = launch(2, "-m", "axonmpi", "doctor", env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("All is well.") == 1
    assert "ranks         2 on 1 node" in result.stdout
    for rank in (0, 1):
        assert result.stdout.count(f"local rank {rank} of 2, CPUs ") == 1
    assert result.stdout.count("1 thread (OMP_NUM_THREADS=1 is set)") == 2
    assert "path          node: through memory that all ranks share" in result.stdout


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (3, {"AXONMPI_RANKS_PER_NODE": "2"}, "nodes: through memory that the ranks of a node share, by MPI"),
        (2, {"AXONMPI_RANKS_PER_NODE": "1"}, "plain: by MPI alone, as no two ranks are on one node"),
        (2, {"AXONMPI_COLLECTIVES": "plain"}, "plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it"),
    ],
    ids=["nodes", "a rank a node", "plain"],
)
def test_the_path_of_large_data(ranks, settings, words):
    result = launch(ranks, DOCTOR, env={"OMP_NUM_THREADS": "1", **settings})
    assert result.returncode == 0, result.stderr
    assert f"path          {words}" in result.stdout
    assert result.stdout.count("  path ") == 1


NO_FILES = """
    from axonmpi.backends import runtime
    import resource
    runtime.start_mpi()  # which has files of its own
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""
NO_NEIGHBOURS = """
    import errno
    from axonmpi.backends import shared_memory
    def refuse(offered, total):
        raise PermissionError(errno.EACCES, "Permission denied", f"/proc/{offered[0]}/fd/{offered[1]}")
    shared_memory._accept = refuse
"""


@pytest.mark.parametrize(
    ("code", "reason", "cure"),
    [
        (NO_FILES, "because of OSError: [Errno 27] File too large", "ulimit -f unlimited"),
        (NO_NEIGHBOURS, "because of PermissionError: [Errno 13] Permission denied: '/proc/", "in one container"),
    ],
    ids=["limit", "permission"],
)
def test_ranks_of_a_node_that_cannot_share_memory(code, reason, cure):
    result = launch(2, textwrap.dedent(code) + DOCTOR, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    for words in ("plain: by MPI alone, slower: the ranks of a node cannot share memory", reason, cure):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("AXONMPI_COLLECTIVES", "shared", "expected 'auto' or 'plain', got 'shared'"),
        ("AXONMPI_COLLECTIVES", "plain", "expected the same on all ranks, got 'plain' on 1 of them only"),
    ],
)
def test_settings_that_ranks_cannot_follow(name, value, problem):
    """Set on one rank only; the doctor does not wait for the others for ever."""
    code = f"""
    import os
    from axonmpi.backends import runtime
    if runtime.start_mpi().COMM_WORLD.rank == 1:
        os.environ[{name!r}] = {value!r}
    """
    result = launch(2, textwrap.dedent(code) + DOCTOR, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 1, result.stderr
    assert f"PROBLEM: {name}: {problem}" in result.stdout


def test_a_launch_that_cannot_work(alone):
    speaks, silent = (alone(DOCTOR, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=rank) for rank in ("0", "1"))
    assert speaks.returncode == silent.returncode == 1
    assert silent.stdout == ""
    assert "PROBLEM: the launcher and MPI disagree" in speaks.stdout
    assert "seen          Open MPI: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2" in speaks.stdout


def test_a_missing_library(alone):
    ended = alone(DOCTOR, MPI4PY_LIBMPI="/gone.so")
    assert ended.returncode == 1
    assert "PROBLEM: only a single rank can run: mpi4py cannot load an MPI library" in ended.stdout
