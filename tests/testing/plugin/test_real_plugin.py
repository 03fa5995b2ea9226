"""The plugin in sessions under mpirun: tests on ranks run on real ranks, and all ranks agree."""

import re
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.compare import assert_said
from helpers.limits import limit

from axonmpi.testing import LaunchResult, launch


def mpirun_pytest(folder: Path, source: str, *args: str, ini: str = "") -> LaunchResult:
    """Run pytest on two ranks on the source of a test file, in a folder."""
    (folder / "test_it.py").write_text("import pytest\nimport axonmpi as ax\n" + source)
    (folder / "pytest.ini").write_text("[pytest]\n" + ini)
    options = ("-p", "no:hypothesispytest", *args)  # that takes long to import
    env = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return launch(2, "-m", "pytest", "test_it.py", *options, cwd=folder, timeout=limit(60), env=env)


PASSING = """
import warnings
from axonmpi.observe import watchdog

@pytest.mark.ranks(2)
def test_warnings(world):
    warnings.warn("seen by all")
    if world.rank == 1:
        warnings.warn("seen by one")

@pytest.mark.ranks(2)
def test_the_watchdog_prints_to_the_terminal(world):
    watchdog._print(f"said by {world.rank}")

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


def test_a_session_that_passes(tmp_path):
    """Of the page's examples too, in a project that uses all cores for mock ranks."""
    page = (REPOSITORY / "docs/testing.md").read_text()
    for name, source in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S):
        (tmp_path / name).write_text(source)
    options = ("test_sum.py", "test_random.py", "--seed=7", "-v", "-rs", "--junitxml=results.xml")
    result = mpirun_pytest(tmp_path, PASSING, *options, ini="addopts = -n auto --dist loadfile")
    assert (result.returncode, result.leftover) == (0, ()), result.stdout + result.stderr
    assert_said(
        result.stdout,
        "= 12 passed, 3 skipped, 1 deselected, 1 xfailed",
        "axonmpi: 2 ranks under MPI; all ranks run tests without a rank marker",
        "axonmpi: tests for more than 2 ranks were left out: 1",
        "rank 0: Skipped: nowhere, not on 0; rank 1: Skipped: nowhere, not on 1",
    )
    assert_said(result.stdout, "test session starts", "test_on_all PASSED", "UserWarning: seen by all", times=1)
    assert sorted(re.findall(r"said by \d", result.stderr)) == ["said by 0", "said by 1"]
    assert re.search(
        r"warnings on other ranks only =+\n---- rank 1 ----\n.*UserWarning: seen by one", result.stdout
    )


FAILING = """
import sys, time, warnings

@pytest.mark.ranks(2)
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

@pytest.mark.ranks(1)
def test_of_one_rank(world):
    assert False, "on the only rank"

@pytest.mark.ranks(2)
def test_after_all_that(world):
    ax.barrier()
"""


def test_a_session_that_fails(tmp_path):
    result = mpirun_pytest(tmp_path, FAILING)
    out = result.stdout
    assert (result.returncode, result.leftover) == (1, ()), out + result.stderr
    assert re.search(r"= 4 failed, 2 passed, .*2 errors in", out)
    assert_said(
        out,
        "\nrank 0: assert 2 == 99\nrank 1: ValueError: one\n",
        "rank 1: SystemExit: 3",
        "rank 1: AssertionError: in setup",
        "rank 1: AssertionError: in teardown",
    )
    once = (
        "E       assert 2 == 99",
        '>           raise ValueError("one")',
        "E       AssertionError: on the only rank",
    )
    assert_said(out, *once, "short test summary info", times=1)
    for rank in range(2):
        assert re.search(rf"Captured stdout call \(rank {rank}\) -+\nsaid by {rank}\n", out)
    assert_said(out + result.stderr, "must not run", "ends the job", times=0)


STUCK = """
import time

@pytest.mark.ranks(2)
def test_before(world):
    assert world.rank == 1, "another matter"

@pytest.mark.ranks(2)
def test_stuck(world):
    print("said by", world.rank)
    if world.rank == 1:
        raise ValueError("the cause")
    go_round_and_round()

def go_round_and_round():
    while True:
        time.sleep(0.01)
"""
LATE = "axonmpi: test_it.py::test_stuck[2ranks] did not end within 1 s; the job is ended"
FAILED = "test_stuck[2ranks]: rank 1 failed, and other ranks did not come to the end within 1 s; the job is ended"


@pytest.mark.parametrize(("setting", "said"), [("timeout", LATE), ("grace", FAILED)], ids=["timeout", "grace"])
def test_a_rank_that_does_not_end_a_test_ends_the_job_and_all_is_printed(tmp_path, setting, said):
    result = mpirun_pytest(tmp_path, STUCK, ini=f"axonmpi_{setting} = 1")
    out, err = result.stdout, result.stderr
    assert (result.returncode, result.timed_out, result.leftover) == (1, False, ()), out + err
    assert_said(
        err,
        said,
        "---- failure of rank 1 ----\n",
        "E           ValueError: the cause",
        "==== earlier: call of test_it.py::test_before[2ranks] ====\nrank 0: AssertionError: another",
        "---- output of rank 0 ----\nsaid by 0\n",
        "---- Captured stdout call ----\nsaid by 1\n",
        "---- stack of rank 1 ----\n(in the test runner)\n",
        times=1,
    )
    assert re.search(r"---- stack of rank 0 ----\nThread .*\n.* in go_round_and_round\n.* in test_stuck\n", err)


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


def test_x_ff_and_tests_for_the_first_rank_only(tmp_path):
    """The cache is rank 0's, the exit code the first bad one; to remove the same old folder twice is no failure."""
    ini = "axonmpi_unmarked = first\nfilterwarnings = error\n"
    (tmp_path / "conftest.py").write_text(OTHER_RANK)
    result = mpirun_pytest(tmp_path, FIRST_ONLY, "-x", ini=ini)
    assert result.returncode == 1, result.stdout + result.stderr
    for said in (r"rank 1: .*assert \(1 == 0", "= 1 failed, 1 passed", "stopping after 1 failures"):
        assert re.search(said, result.stdout)
    assert (tmp_path / "runs").read_text() == "x"
    (tmp_path / "mended").touch()
    result = mpirun_pytest(tmp_path, FIRST_ONLY, "--ff", "-v", ini=ini)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.findall(r"::test_(\w+).* PASSED", result.stdout) == ["one", "two", "three"]
    assert (tmp_path / "runs").read_text() == "xx"
    assert not (tmp_path / ".pytest_cache/v/of/rank_1").exists()


MISMATCH = """
from axonmpi.launch.launcher_variables import detect_launchers

@pytest.mark.parametrize("rank", [detect_launchers()[0].rank])
def test_it(rank):
    pass
"""
ONE_LEAVES = """
@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 1:
        pytest.exit("had enough", returncode=7)

def test_never():
    assert False
"""
DISAGREEMENTS = {
    "collection": (MISMATCH, 4, "rank 0: test_it.py::test_it[0]\n  rank 1: test_it.py::test_it[1]"),
    "end": (ONE_LEAVES, 7, "---- rank 1 ----\nend of the session: _pytest.outcomes.Exit: had enough"),
}


@pytest.mark.parametrize(("source", "code", "said"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_do_not_agree_end_the_session_for_all(tmp_path, source, code, said):
    result = mpirun_pytest(tmp_path, source)
    printed = result.stdout + result.stderr
    assert result.returncode == code, printed
    assert printed.count(said) == 1
    assert "test_never" not in printed
