"""Starting a world: alone, in jobs, with the wrong launcher, and where MPI is missing."""

import sys

import pytest

from axonmpi.backends import runtime

START = """
import axonmpi as ax
world = ax.init_process_group()
print("size", world.size)
"""
NO_MPI4PY = "import sys; sys.modules['mpi4py'] = None\n"
MPI_IS_MISSING = [
    (NO_MPI4PY, {}, "mpi4py is not installed"),
    ("", {"MPI4PY_LIBMPI": "/gone.so"}, "cannot load an MPI library"),
]


def last_error(ended):
    """The message of the exception that ended a process: what follows the innermost line of code."""
    return ended.stderr[ended.stderr.rindex("axonmpi.errors.") :]


@pytest.mark.parametrize("init_method", ["tcp://host:1", "file:///tmp/x", "", "mpi:", 3])
def test_an_unknown_init_method_is_refused(init_method):
    with pytest.raises(ValueError, match="init_method: expected None, 'mpi://' or 'env://', got"):
        runtime.start_world(init_method)


@pytest.mark.parametrize(
    ("num_threads", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_bad_numbers_of_threads_are_refused(num_threads, error):
    with pytest.raises(error, match="num_threads: expected"):
        runtime.start_world(num_threads=num_threads)


def test_a_single_rank_keeps_pythons_own_ways(alone):
    ended = alone(
        """
        import atexit, os, sys, threading
        hooks = sys.excepthook, threading.excepthook, sys.exit, SystemExit.__dict__["code"]

        def at_the_very_end():
            from mpi4py import MPI
            print("finalised", MPI.Is_finalized())

        atexit.register(at_the_very_end)
        from axonmpi.backends import runtime
        for method in (None, "mpi://", "env://"):
            started = runtime.start_world(method)
            place = started.rank, started.size, started.local_rank, started.local_size
            assert (*place, started.node_rank, started.num_nodes) == (0, 1, 0, 1, 0, 1)
            assert started.comm.size == 1
        assert hooks == (sys.excepthook, threading.excepthook, sys.exit, SystemExit.__dict__["code"])
        assert runtime.start_world(num_threads=1).num_threads == 1
        raise SystemExit(3)
        """,
        SLURM_NTASKS="4",
        SLURM_PROCID="1",
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout == "finalised True\n"
    assert ended.stderr == ""


def test_mpi_may_have_been_started_before(alone):
    ended = alone(
        """
        from mpi4py import MPI
        import axonmpi as ax
        for _ in range(2):
            assert ax.init_process_group("mpi", "env://").size == 1
            ax.destroy_process_group()
        """
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("from mpi4py import MPI; MPI.Finalize()", "MPI has been finalised in this process"),
        (
            "import mpi4py; mpi4py.rc.threads = False; from mpi4py import MPI",
            "asynchronous operations need MPI_THREAD_MULTIPLE",
        ),
    ],
    ids=["finalised", "one thread"],
)
def test_an_mpi_that_cannot_be_used_is_refused(alone, before, said):
    ended = alone(before + START)
    assert ended.returncode == 1
    assert said in last_error(ended)


@pytest.mark.parametrize(("before", "env", "said"), MPI_IS_MISSING, ids=["no mpi4py", "no library"])
def test_a_single_rank_needs_no_mpi(alone, before, env, said):
    ended = alone(
        before
        + START
        + """
import torch
assert ax.all_reduce_sum(torch.ones(2)) is None and ax.get_num_nodes() == 1
from axonmpi.backends import runtime
runtime.start_mpi()
""",
        **env,
    )
    assert ended.stdout == "size 1\n", ended.stderr
    assert ended.returncode == 1
    assert said in last_error(ended)
    assert "pip install 'axonmpi[mpich]'" in last_error(ended)


def test_several_ranks_need_mpi(alone):
    ended = alone(NO_MPI4PY + START, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")
    assert ended.returncode == 1
    message = "4 ranks were launched (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=4), but mpi4py is not installed"
    assert message in last_error(ended)


@pytest.mark.parametrize(
    ("env", "typed"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, "mpirun -n 4 python"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -n 4 python"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi="),
        ({"WORLD_SIZE": "4"}, "unset WORLD_SIZE"),
    ],
    ids=["PMI", "Open MPI", "Slurm", "leftover"],
)
def test_processes_that_do_not_know_of_each_other_are_refused(alone, env, typed):
    ended = alone(START, PYTHONWARNINGS="error::RuntimeWarning", **env)
    assert ended.returncode == 1
    assert "size 1" not in ended.stdout
    message = last_error(ended)
    assert message.startswith("axonmpi.errors.LaunchError: the launcher and MPI disagree")
    assert "of 4, by MPI it is rank 0 of 1" in message
    assert typed in message
    library = runtime.library_info()
    assert f"{library.vendor} {library.version} from {library.path}" in message
    for name, value in env.items():
        assert f"{name}={value}" in message


def test_a_launcher_that_the_library_cannot_start_under_is_refused(alone):
    if runtime.library_info().vendor != "MPICH":
        pytest.skip("only MPICH ends the process; the others start as single ranks, as tested above")
    ended = alone(START, PMIX_RANK="1", PMIX_NAMESPACE="job", OMPI_COMM_WORLD_SIZE="2")
    assert ended.returncode == 1
    assert "MPICH was built without" in last_error(ended)
    assert "Abort" not in ended.stderr


def test_torchrun_is_refused(alone):
    ended = alone(
        f"""
        import runpy, sys, tempfile
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write({START!r})
            script.flush()
            sys.argv = ["torchrun", "--standalone", "--nproc-per-node=2", script.name]
            runpy.run_module("torch.distributed.run", run_name="__main__")
        """
    )
    assert ended.returncode != 0
    assert "by the variables of torchrun this is rank" in ended.stderr
    assert "(torchrun starts processes that MPI knows nothing of)" in ended.stderr
    assert "size 1" not in ended.stdout


def test_the_library_and_its_launcher():
    library = runtime.library_info()
    assert library.path is not None
    assert "libmpi" in library.path
    assert library.mpirun is not None
    assert library.version[0].isdigit()
    assert library.vendor in ("MPICH", "Open MPI", "Intel MPI", "MVAPICH")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_know_their_place_and_share_the_cores(job, ranks):
    ended = job(
        ranks,
        """
        from axonmpi import environment
        from axonmpi.backends import runtime

        started = runtime.start_world()
        assert (started.rank, started.size) == (started.comm.rank, RANKS)
        assert (started.local_rank, started.local_size) == (started.rank, RANKS)
        assert (started.node_rank, started.num_nodes) == (0, 1)
        masks = started.comm.allgather(environment.usable_cores())
        assert started.num_threads == torch.get_num_threads()
        assert started.num_threads == environment.share_of_cores(masks[started.rank], masks)
        assert "its share" in started.threads_reason
        os.environ["MKL_NUM_THREADS"] = "5"
        torch.set_num_threads(3)
        assert runtime.start_world().num_threads == 3 == torch.get_num_threads()
        assert runtime.start_world().threads_reason == "MKL_NUM_THREADS=5 is set"
        assert runtime.start_world(num_threads=2).num_threads == 2 == torch.get_num_threads()
        print("done")
        """,
        before=f"RANKS = {ranks}\n",
        OMP_NUM_THREADS="",
    )
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["done"] * ranks


def test_a_disagreement_on_one_rank_is_an_error_on_all(job):
    ended = job(
        2,
        """
        from axonmpi.backends import runtime

        os.environ["WORLD_SIZE"] = "2"
        os.environ["RANK"] = "0"
        try:
            runtime.start_world("env://")
        except ax.LaunchError as error:
            print(world.rank, str(error).splitlines()[0], flush=True)
        os.environ["RANK"] = str(world.rank)
        assert runtime.start_world("env://").size == 2
        """,
    )
    assert ended.code == 0, ended.err
    message = (
        "on ranks 1 the launcher and MPI disagree: by the variables of RANK/WORLD_SIZE this is rank 0 of 2, "
        "by MPI it is rank 1 of 2."
    )
    assert sorted(ended.out.splitlines()) == [f"0 {message}", f"1 {message}"]


@pytest.mark.cold
def test_a_leftover_world_size_ends_a_real_job(job):
    ended = job(2, "print('not reached')", WORLD_SIZE="3")
    assert ended.code == 1
    assert "on ranks 0, 1 the launcher and MPI disagree" in ended.err
    assert "unset WORLD_SIZE" in ended.err
    assert "not reached" not in ended.out


def test_importing_starts_nothing(alone):
    ended = alone(
        """
        import sys, threading
        import axonmpi
        assert "mpi4py.MPI" not in sys.modules
        assert threading.active_count() == 1
        assert sys.excepthook is sys.__excepthook__
        print("fine")
        """
    )
    assert ended.stdout == "fine\n", ended.stderr


def test_this_interpreter_reads_the_exit_code_where_it_is_expected(alone):
    # The mechanism itself, without MPI, so that a version of Python that works differently is noticed.
    ended = alone(
        """
        import atexit, os, sys
        from axonmpi.backends import exits

        seen = []
        exits._observe_system_exit(lambda code: seen.append(code) or code)
        try:
            sys.exit(9)
        except SystemExit as error:
            assert error.code == 9
        for statement in ("sys.exit(3)", "raise SystemExit(4)", "sys.exit()", "exit('x')"):
            child = os.fork()
            if child == 0:
                atexit.register(lambda: print(statement, "gives", seen, flush=True))
                exec(statement)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """
    )
    assert ended.stdout.splitlines() == [
        *("sys.exit(3) gives [3]", "3"),
        *("raise SystemExit(4) gives [4]", "4"),
        *("sys.exit() gives [None]", "0"),
        *("exit('x') gives ['x']", "1"),
    ], (sys.version, ended.stderr)
