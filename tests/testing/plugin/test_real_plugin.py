"""The plugin in sessions under mpirun: tests on ranks run on real ranks, and all ranks agree."""

import re

import pytest
from helpers import REPOSITORY

PASSING = """
import warnings
from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(2)
def test_warnings(world):
    warnings.warn("seen by all")
    if world.rank == 1:
        warnings.warn("seen by one")

@pytest.mark.ranks(2)
@settings(max_examples=5, database=None)
@given(number=st.integers())
def test_examples(world, number):
    assert ax.all_gather_object(number) == [number] * 2

@pytest.mark.mpi
def test_on_all():
    assert ax.get_world_size() == 2
    ax.barrier()

@pytest.mark.mpi(min_size=9)
def test_on_more():
    assert False

@pytest.mark.mpi_skip
def test_not_under_mpi():
    assert False

def test_on_each_rank(tmp_path):
    assert ax.get_world_size() == 2

@pytest.mark.ranks(2)
def test_skipped_on_one(world):
    if world.rank == 1:
        pytest.skip("not here")

@pytest.mark.ranks(2)
def test_skipped(world):
    pytest.skip(f"nowhere, not on {world.rank}")

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_expected(world):
    assert world.rank == 0

@pytest.mark.ranks(2)
@pytest.mark.parametrize("time", range(2))
def test_groups_of_a_test_are_released_after_it(world, time):
    assert world.groups == ()
    world.new_group([1, 0])

@pytest.fixture(scope="module")
def number():
    return ax.get_rank()

@pytest.mark.ranks(1, 2)
def test_fixture(number, world, shared_tmp_path):
    assert ax.all_gather_object(number) == list(range(world.size))
    assert len(set(ax.all_gather_object(shared_tmp_path))) == 1
"""


def test_a_session_that_passes(mpirun_pytest, tmp_path):
    """Of the page's example too, in a project that uses all cores for mock ranks."""
    page = REPOSITORY / "docs/testing.md"
    (tmp_path / "test_sum.py").write_text(
        re.search(r"```python\n(# test_sum\.py\n.*?)```", page.read_text(), re.S)[1]
    )
    ini = "addopts = -n auto --dist loadfile"
    result = mpirun_pytest(2, PASSING, "test_sum.py", "-v", "-rs", "--junitxml=results.xml", ini=ini)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "= 11 passed, 3 skipped, 1 deselected, 1 xfailed" in result.stdout
    assert "axonmpi: 2 ranks under MPI; all ranks run tests without a rank marker" in result.stdout
    assert "axonmpi: tests for more than 2 ranks were left out: 1" in result.stdout
    assert "rank 0: Skipped: nowhere, not on 0; rank 1: Skipped: nowhere, not on 1" in result.stdout
    assert result.stdout.count("test session starts") == 1
    assert result.stdout.count("test_on_all PASSED") == 1
    assert result.stdout.count("UserWarning: seen by all") == 1
    assert re.search(
        r"warnings on other ranks only =+\n---- rank 1 ----\n.*UserWarning: seen by one", result.stdout
    )
    assert result.leftover == ()


FAILING = """
import sys, time, warnings

@pytest.mark.ranks(3)
def test_two_kinds(world, request):
    print("said by", world.rank)
    if world.rank == 0:
        request.config.add_cleanup(lambda: time.sleep(1.5))  # much to tidy up, while the others end with an error
    if world.rank == 1:
        raise ValueError("one")
    assert world.size == 99

@pytest.mark.ranks(2)
def test_exit(world):
    if world.rank == 1:
        sys.exit(3)

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_unexpected_pass(world):
    pass

@pytest.fixture
def broken_setup(world):
    assert world.rank != 1, "in setup"

@pytest.fixture
def broken_teardown(world):
    yield
    assert world.rank != 1, "in teardown"

@pytest.mark.ranks(2)
def test_setup(broken_setup):
    assert False, "must not run"

@pytest.mark.ranks(2)
def test_teardown(broken_teardown):
    pass

from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(2)
@settings(database=None, max_examples=50)
@given(number=st.integers(0, 1000))
def test_example(world, number):
    assert world.rank == 0 or number < 17

@pytest.mark.ranks(3)
def test_after_all_that(world):
    ax.barrier()
"""


def test_a_session_that_fails(mpirun_pytest):
    result = mpirun_pytest(3, FAILING)
    out = result.stdout
    assert result.returncode == 1, out + result.stderr
    assert re.search(r"= 4 failed, 2 passed, .*2 errors in", out)
    assert "\nranks 0, 2: assert 3 == 99\nrank 1: ValueError: one\n" in out
    assert len(re.findall("E +assert 3 == 99", out)) == 1
    assert out.count('>           raise ValueError("one")') == 1
    for rank in range(3):
        assert re.search(rf"Captured stdout call \(rank {rank}\) -+\nsaid by {rank}\n", out)
    assert "rank 1: SystemExit: 3" in out
    assert "rank 1: AssertionError: in setup" in out
    assert "rank 1: AssertionError: in teardown" in out
    assert "must not run" not in out
    assert "rank 0: axonmpi.errors.RankFailedError: rank 1 failed with this example" in out
    assert "number=17," in out
    assert out.count("short test summary info") == 1
    assert "ends the job" not in result.stderr
    assert result.leftover == ()


HANGING = """
import time

@pytest.mark.ranks(1)
@pytest.mark.rank_timeout(1)
def test_hang(world):
    print("said by", world.rank)
    go_round_and_round()

def go_round_and_round():
    while True:
        time.sleep(0.01)
"""


def test_a_test_that_hangs_ends_the_job_with_the_stacks_of_all_ranks(mpirun_pytest):
    result = mpirun_pytest(2, HANGING)
    err = result.stderr
    assert result.returncode not in (0, None)
    assert not result.timed_out
    assert "axonmpi: test_it.py::test_hang[1rank] did not end within 1 s; the job is ended" in err
    stacks = dict(re.findall(r"---- stack of rank (\d) ----\n((?:(?!----).*\n)*)", err))
    assert "in go_round_and_round" in stacks["0"]
    assert "in the test runner" in stacks["1"]
    assert "---- output of rank 0 ----\nsaid by 0\n" in err
    assert result.leftover == ()


CROSSED = """
@pytest.mark.ranks(2)
def test_crossed(world):
    pair = world.new_group(range(2))
    (pair if world.rank else world.default_group).barrier()
"""


def test_ranks_that_wait_for_each_other_end_the_job_with_the_cause(mpirun_pytest):
    result = mpirun_pytest(2, CROSSED)
    assert result.returncode not in (0, None)
    assert "CollectiveTimeoutError: ranks wait for each other" in result.stderr
    assert "stack of rank 1:" in result.stderr


STUCK = """
@pytest.mark.ranks(2)
def test_before(world):
    assert world.rank == 1, "another matter"

@pytest.mark.ranks(2)
def test_stuck(world):
    if world.rank == 1:
        raise ValueError("the cause")
    world.default_group.barrier()
"""


@pytest.mark.slow
def test_a_failure_that_leaves_the_others_stuck_ends_the_job_and_is_printed(mpirun_pytest):
    result = mpirun_pytest(2, STUCK, ini="axonmpi_grace = 1")
    assert result.returncode not in (0, None)
    assert not result.timed_out
    assert "test_stuck[2ranks]: rank 1 failed, and other ranks did not come to the end within 1 s" in result.stderr
    assert "---- failure of rank 1 ----\n" in result.stderr
    assert "E           ValueError: the cause" in result.stderr
    assert (
        "==== earlier: call of test_it.py::test_before[2ranks] ====\nrank 0: AssertionError: another"
        in result.stderr
    )
    assert re.search(r"---- stack of rank 0 ----\n(.*\n)*.*world.default_group.barrier\(\)", result.stderr)
    assert result.leftover == ()


FIRST_ONLY = """
import os

def test_two():
    assert not ax.is_initialized()
    with open("runs", "a") as file:
        file.write("x")

@pytest.mark.ranks(2)
def test_one(world):
    assert world.rank == 0 or os.path.exists("mended")

def test_three():
    assert os.path.exists("mended")
"""
OTHER_RANK = """
import os, warnings, pytest
import axonmpi as ax

@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    result = yield
    session.testsfailed += os.path.exists("mended") and ax.get_rank() == 1
    return result

def pytest_sessionfinish(session):
    warnings.warn(pytest.PytestWarning("(rm_rf) error removing garbage"))
    if ax.get_rank() == 1:
        session.config.cache.set("of/rank_1", "mine")
"""


@pytest.mark.slow
def test_x_ff_and_tests_for_the_first_rank_only(mpirun_pytest, tmp_path):
    """The cache is rank 0's, the exit code the first bad one; to remove the same old folder twice is no failure."""
    ini = "axonmpi_unmarked = first\nfilterwarnings = error\n"
    (tmp_path / "conftest.py").write_text(OTHER_RANK)
    result = mpirun_pytest(2, FIRST_ONLY, "-x", ini=ini, cache=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"rank 1: .*assert \(1 == 0", result.stdout)
    assert "= 1 failed, 1 passed" in result.stdout
    assert "stopping after 1 failures" in result.stdout
    assert (tmp_path / "runs").read_text() == "x"
    (tmp_path / "mended").touch()
    result = mpirun_pytest(2, FIRST_ONLY, "--ff", "-v", ini=ini, cache=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "= 3 passed" in result.stdout
    assert re.findall(r"::test_(\w+).* PASSED", result.stdout) == ["one", "two", "three"]
    assert (tmp_path / "runs").read_text() == "xx"
    assert not (tmp_path / ".pytest_cache/v/of/rank_1").exists()


MISMATCH = """
from axonmpi.launch.variables import detect_launchers

@pytest.mark.parametrize("rank", [detect_launchers()[0].rank])
def test_it(rank):
    pass
"""


@pytest.mark.slow
def test_different_collections_are_refused(mpirun_pytest):
    result = mpirun_pytest(2, MISMATCH)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR, result.stdout + result.stderr
    assert result.stderr.count("ERROR: the ranks did not collect the same tests") == 1
    assert "rank 0: test_it.py::test_it[0]\n  rank 1: test_it.py::test_it[1]" in result.stderr


ONE_LEAVES = """
@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 1:
        pytest.exit("had enough", returncode=7)

def test_never():
    assert False
"""


@pytest.mark.slow
def test_a_rank_that_ends_its_session_ends_it_for_all(mpirun_pytest):
    result = mpirun_pytest(2, ONE_LEAVES)
    assert result.returncode == 7, result.stdout + result.stderr
    assert "---- rank 0 ----\ncall of test_it.py::test_it[2ranks]" in result.stdout
    assert "---- rank 1 ----\nend of the session: _pytest.outcomes.Exit: had enough" in result.stdout
    assert "test_never" not in result.stdout
