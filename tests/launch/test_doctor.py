"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

import textwrap

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


def reports(n, code):
    """Run code that calls `doctor()` any number of times; return the reports, each with its exit code."""
    beginning = """
        import errno, os, resource
        from axonmpi.backends import runtime, shared_memory
        from axonmpi.cli import main

        rank = runtime.start_mpi().COMM_WORLD.rank

        def doctor():
            code = main(["doctor"])
            if rank == 0:
                print("code", code, "END")
    """
    result = launch(n, textwrap.dedent(beginning) + textwrap.dedent(code), env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return result.stdout.split("END")[:-1]


def test_the_path_of_large_data():
    code = """
        os.environ["AXONMPI_RANKS_PER_NODE"] = "2"
        doctor()
        os.environ["AXONMPI_RANKS_PER_NODE"] = "1"
        doctor()
        os.environ["AXONMPI_COLLECTIVES"] = "plain"
        doctor()
    """
    nodes, alone, plain = reports(3, code)
    assert "path          nodes: through memory that the ranks of a node share, by MPI between nodes" in nodes
    assert "path          plain: by MPI alone, as no two ranks are on one node" in alone
    assert "path          plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it" in plain
    for report in (nodes, alone, plain):
        assert "All is well." in report
        assert report.endswith("code 0 ")


def test_ranks_of_a_node_that_cannot_share_memory():
    code = """
        def refuse(offered, total):
            raise PermissionError(errno.EACCES, "Permission denied", f"/proc/{offered[0]}/fd/{offered[1]}")

        accept, shared_memory._accept = shared_memory._accept, refuse
        doctor()
        shared_memory._accept = accept
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        doctor()
    """
    permission, limit = reports(2, code)
    for report in (permission, limit):
        assert "path          plain: by MPI alone, slower: the ranks of a node cannot share memory" in report
        assert report.endswith("code 0 ")
    assert "because of PermissionError: [Errno 13] Permission denied: '/proc/" in permission
    assert "in one container" in permission
    assert "because of OSError: [Errno 27] File too large" in limit
    assert "ulimit -f unlimited" in limit


def test_settings_that_ranks_cannot_follow():
    """Set on one rank only: the doctor does not wait for the others for ever."""
    code = """
        for name, value in (("COLLECTIVES", "plain"), ("COLLECTIVES", "shared"), ("RANKS_PER_NODE", "x")):
            if rank == 1:
                os.environ["AXONMPI_" + name] = value
            doctor()
            os.environ.pop("AXONMPI_" + name, None)
    """
    problems = [report.partition("PROBLEM: ")[2].splitlines() for report in reports(2, code)]
    assert problems == [
        ["AXONMPI_COLLECTIVES: expected the same on all ranks, got 'plain' on 1 of them only", "code 1 "],
        ["AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'", "code 1 "],
        ["AXONMPI_RANKS_PER_NODE: expected a positive number, got 'x'", "code 1 "],
    ]


def test_a_launch_that_cannot_work(alone):
    speaks, silent = (
        alone(DOCTOR, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_LOCAL_RANK=rank)
        for rank in ("0", "1")
    )
    assert speaks.returncode == silent.returncode == 1
    assert silent.stdout == ""
    assert "PROBLEM: the launcher and MPI disagree" in speaks.stdout
    assert "seen          Open MPI: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2" in speaks.stdout


def test_a_missing_library(alone):
    ended = alone(DOCTOR, MPI4PY_LIBMPI="/gone.so")
    assert ended.returncode == 1
    assert "PROBLEM: only a single rank can run: mpi4py cannot load an MPI library" in ended.stdout
