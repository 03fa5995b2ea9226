"""Starting a world: alone, in jobs, with the wrong launcher, and where MPI is missing."""

import sys
from pathlib import Path

import pytest
from helpers import WITH_HELPERS
from helpers.compare import assert_said
from helpers.limits import limit

import axonmpi as ax
from axonmpi.launch import start as runtime
from axonmpi.launch.check import check_launch
from axonmpi.launch.launcher_variables import detect_launchers
from axonmpi.testing import launch


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
        import atexit, dataclasses, os, sys, threading
        hooks = sys.excepthook, threading.excepthook, sys.exit, SystemExit.__dict__["code"]

        def at_the_very_end():
            from mpi4py import MPI
            print("finalised", MPI.Is_finalized())

        atexit.register(at_the_very_end)
        from axonmpi.launch import start as runtime
        for method in (None, "mpi://", "env://"):
            started = runtime.start_world(method)
            assert dataclasses.astuple(started.topology) == (0, 1, 0, 1, 0, 1)
            assert started.comm.size == 1
        assert hooks == (sys.excepthook, threading.excepthook, sys.exit, SystemExit.__dict__["code"])
        assert runtime.start_world(num_threads=1).num_threads == 1
        raise SystemExit(3)
        """,
        SLURM_NTASKS="4",
        SLURM_PROCID="1",
    )
    assert (ended.code, ended.out, ended.err) == (3, "finalised True\n", "")


def test_a_single_rank_needs_no_mpi_and_nor_do_its_children(alone):
    ended = alone(
        """
        import multiprocessing, sys
        sys.modules["mpi4py"] = None
        import torch
        import axonmpi as ax
        from axonmpi.launch import start as runtime

        def work():
            ax.World.init("mpi")
            raise SystemExit(7)

        world = ax.init_process_group()
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        print(world.size, ax.get_num_nodes(), ax.all_reduce_sum(torch.ones(2)), child.exitcode)
        runtime.start_mpi()
        """
    )
    assert (ended.code, ended.out) == (1, "1 1 None 7\n"), ended.err
    message = ended.err[ended.err.rindex("axonmpi.errors.") :]
    assert_said(message, "mpi4py is not installed", "pip install 'axonmpi[mpich]'")


def test_several_ranks_need_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name, value in {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    message = (
        r"4 ranks were launched \(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=4\), but mpi4py is not installed"
    )
    with pytest.raises(ax.LaunchError, match=message):
        runtime.start_world()


def test_an_mpi_that_cannot_be_used_is_refused(alone):
    ended = alone(
        """
        from mpi4py import MPI
        import axonmpi as ax
        MPI.Finalize()
        try:
            ax.init_process_group()
        except ax.LaunchError as error:
            print(error)
        """
    )
    assert ended.code == 0, ended.err
    assert_said(ended.out, "MPI has been finalised in this process")


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_an_mpi_for_one_thread_at_a_time_is_called_by_the_callers_alone(level, tmp_path):
    program = Path(__file__).with_name("one_thread.py")
    env = {**WITH_HELPERS, "MPI4PY_RC_THREAD_LEVEL": level}
    done = launch(2, program, tmp_path, timeout=limit(60), env=env)
    assert (done.returncode, done.stdout.count("all is well")) == (0, 2), done.stderr


DISAGREEMENTS = {
    "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0": "mpirun -n 4 python",
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4": "mpirun -n 4 python",
    "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4": "srun --mpi=",
    "WORLD_SIZE=4": "unset WORLD_SIZE",
}


def test_processes_that_do_not_know_of_each_other_are_refused(alone):
    ended = alone(
        f"""
        import os, warnings
        import axonmpi as ax
        warnings.simplefilter("error", RuntimeWarning)
        for variables in {list(DISAGREEMENTS)}:
            own = dict(each.split("=") for each in variables.split())
            os.environ.update(own)
            try:
                ax.init_process_group()
            except ax.LaunchError as error:
                print(error, "END")
            for name in own:
                del os.environ[name]
        """
    )
    assert ended.code == 0, ended.err
    library = runtime.library_info()
    messages = ended.out.split("END\n")[:-1]
    by_mpi = ("of 4, by MPI it is rank 0 of 1", f"{library.vendor} {library.version} from {library.path}")
    for message, (variables, typed) in zip(messages, DISAGREEMENTS.items(), strict=True):
        assert message.startswith("the launcher and MPI disagree")
        assert_said(message, *by_mpi, typed, *variables.split())


def test_a_launcher_that_the_library_cannot_start_under_is_refused(monkeypatch):
    if runtime.library_info().vendor != "MPICH":
        pytest.skip("only MPICH ends the process; the others start as single ranks, as tested above")
    for name, value in {"PMIX_RANK": "1", "PMIX_NAMESPACE": "job", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # this rank would leave the error unsaid
    with pytest.raises(ax.LaunchError, match="MPICH was built without"):
        runtime.start_world()


def test_torchrun_is_recognised(alone, tmp_path):
    ended = alone(
        f"""
        import runpy, sys
        options = ["--standalone", "--nproc-per-node=2", "--no-python", "--log-dir={tmp_path}"]
        sys.argv = ["torchrun", *options, "env", "-0"]
        runpy.run_module("torch.distributed.run", run_name="__main__")
        """
    )
    assert ended.code == 0, ended.err
    given = dict(each.split("=", 1) for each in ended.out.split("\0") if "=" in each)
    (launcher,) = detect_launchers(given)
    assert (launcher.name, launcher.size, launcher.local_size) == ("torchrun", 2, 2)
    message = check_launch([launcher], 0, 1, runtime.library_info())
    assert "(torchrun starts processes that MPI knows nothing of)" in message


def test_the_library_and_its_launcher():
    library = runtime.library_info()
    assert_said(library.path, "libmpi")
    assert (library.mpirun is None, library.version[0].isdigit()) == (False, True)
    assert library.vendor in ("MPICH", "Open MPI", "Intel MPI", "MVAPICH")


def test_ranks_know_their_place_share_the_cores_and_hear_of_a_disagreement_on_one(job):
    """Also where MPI runs already."""
    ended = job(
        2,
        """
        import dataclasses
        from axonmpi.launch import start as runtime
        from axonmpi.launch.cpu import share_of_cores, usable_cores

        ax.destroy_process_group()
        assert ax.init_process_group("mpi", "env://").size == 2

        started = runtime.start_world()
        rank = started.comm.rank
        assert dataclasses.astuple(started.topology) == (rank, 2, rank, 2, 0, 1)
        masks = started.comm.allgather(usable_cores())
        assert started.num_threads == torch.get_num_threads()
        assert started.num_threads == share_of_cores(masks[rank], masks)
        assert "its share" in started.threads_reason
        os.environ["MKL_NUM_THREADS"] = "5"
        torch.set_num_threads(3)
        assert runtime.start_world().num_threads == 3 == torch.get_num_threads()
        assert runtime.start_world().threads_reason == "MKL_NUM_THREADS=5 is set"
        assert runtime.start_world(num_threads=2).num_threads == 2 == torch.get_num_threads()

        os.environ["WORLD_SIZE"] = "2"
        os.environ["RANK"] = "0"
        try:
            runtime.start_world("env://")
        except ax.LaunchError as error:
            print(str(error).splitlines()[0], flush=True)
        os.environ["RANK"] = str(world.rank)
        assert runtime.start_world("env://").topology.size == 2
        """,
        before="from mpi4py import MPI\n",
        OMP_NUM_THREADS="",
    )
    assert ended.code == 0, ended.err
    by_variables = "by the variables of RANK/WORLD_SIZE this is rank 0 of 2"
    said = f"on rank 1 the launcher and MPI disagree: {by_variables}, by MPI it is rank 1 of 2."
    assert ended.out.splitlines() == [said] * 2


def test_imports_and_sessions_on_mock_ranks_start_no_mpi(server, alone, tmp_path):
    assert server.imported == [[], 1, True]
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text("""
import pytest

@pytest.mark.ranks(2)
def test_it(world):
    assert world.size == 2
""")
    ended = alone(
        f"""
        import pytest, sys
        print(int(pytest.main(["-q", "-p", "no:cacheprovider", {str(tmp_path)!r}])), "mpi4py.MPI" in sys.modules)
        """
    )
    assert ended.out.splitlines()[-1] == "0 False", ended.out + ended.err
