"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

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
    assert ended.stdout.endswith("All is well.\n")


def test_two_ranks_give_one_report():
    result = launch(2, "-m", "axonmpi", "doctor", env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("All is well.") == 1
    assert "ranks         2 on 1 node" in result.stdout
    for rank in (0, 1):
        assert result.stdout.count(f"local rank {rank} of 2, CPUs ") == 1
    assert result.stdout.count("1 thread (OMP_NUM_THREADS=1 is set)") == 2


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
