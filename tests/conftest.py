"""Settings of all tests."""

import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
import torch
import warm

from axonmpi import environment
from axonmpi.backends.cores import CoreShare
from axonmpi.backends.mock import MockBackend
from axonmpi.group import current_world
from axonmpi.testing.marked import marked_rank_count

pytest_plugins = ["pytester"]

START_JOBS = ("cli", "docs", "harness", "launch", "nodes", "slurm")
"""Folders whose tests start jobs, which have time limits of their own; the one around them is longer."""


FILES_THAT_START_JOBS = ("test_settings.py", "test_command.py", "test_fsdp_limits.py")
ALL_CORES = environment.usable_cores()
COLD = sys.executable


def cores_of_mock_ranks() -> set[int]:
    """Return the core of this process of pytest-xdist, or all cores where it is the only process.

    Threads take turns at Python's lock. On several cores they wake up only to find it taken, which costs twice the
    processor time, and half as much time again.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    return {sorted(ALL_CORES)[int(worker) % len(ALL_CORES)]} if worker else set(ALL_CORES)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", metavar="K/N", help="of tests above the backends, the K-th of N shares of their cases"
    )
    parser.addoption(
        "--overlap",
        choices=("half", "always", "never"),
        default="half",
        help="tests above the backends whose collectives go beside the computation, as with cores to spare",
    )


def pytest_configure() -> None:
    """Let a process that has one core compute with one thread."""
    if len(cores_of_mock_ranks()) < len(ALL_CORES):
        torch.set_num_threads(len(cores_of_mock_ranks()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep mock ranks on the cores of this process; jobs may use all cores."""
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, ALL_CORES if starts_jobs(item) else cores_of_mock_ranks())


def starts_jobs(item: pytest.Item) -> bool:
    path = Path(item.path).relative_to(Path(__file__).parent)
    return path.parts[0] in START_JOBS or path.name in FILES_THAT_START_JOBS


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[object]:
    for item in items:
        if starts_jobs(item) and item.get_closest_marker("rank_timeout") is None:
            item.add_marker(pytest.mark.rank_timeout(300))
    result = yield
    if share := config.getoption("--cases"):  # of what is left by now
        items[:], others = cases.shared(items, cases.parse(share))
        config.hook.pytest_deselected(items=others)
    return result


@pytest.fixture(autouse=True)
def _cores_to_spare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have collectives go beside the computation in half of the cases, whatever cores this machine has.

    Cases for as many ranks as the session has take the other way than on mock ranks and in larger sessions.
    """
    if not cases.is_above_backends(request.node):
        return
    overlap = request.config.getoption("--overlap")
    count = marked_rank_count(request.node)
    overlaps = overlap == "always"
    if overlap == "half":
        overlaps = (zlib.crc32(request.node.nodeid.encode()) + (count == environment.launched_ranks())) % 2 == 1
    monkeypatch.setattr(MockBackend, "overlaps", overlaps)
    monkeypatch.setattr(CoreShare, "spare", overlaps)
    if world := current_world():  # made before, for all tests with as many ranks
        monkeypatch.setattr(world.default_group.backend, "overlaps", overlaps)


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Spare the garbage collector, which some tests call often, what tests before have left for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _warm_python() -> Iterator[warm.WarmPython]:
    with warm.WarmPython() as python:
        yield python


@pytest.fixture(autouse=True, scope="module")
def _jobs_start_soon(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have jobs of tests run in forks of a Python that has imported torch, as `warm.py` says."""
    if not (warm.WarmPython.is_possible() and starts_jobs(request.node)):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(request.getfixturevalue("_warm_python").python))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def cold_python() -> str:
    """The Python that the tests run in."""
    return COLD


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs of tests that are marked so run in interpreters of their own."""
    if request.node.get_closest_marker("cold"):
        monkeypatch.setattr(sys, "executable", COLD)


@pytest.fixture(autouse=True)
def _not_launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what starts inside a test see no launcher, whatever has started this session."""
    if starts_jobs(request.node) and request.node.get_closest_marker("ranks") is None:
        for name in set(os.environ) - set(environment.without_launcher_variables(os.environ)):
            monkeypatch.delenv(name)
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # lines of several ranks would mix
