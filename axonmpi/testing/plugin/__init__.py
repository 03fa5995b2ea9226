"""The pytest plugin: one test body, on mock ranks under `pytest` and on real ranks under `mpirun`.

    @pytest.mark.ranks(1, 2, 4)
    def test_sum(world):
        tensor = torch.ones(3)
        ax.all_reduce(tensor)
        assert tensor.tolist() == [world.size] * 3

    pytest                  ranks are threads
    mpirun -n 4 pytest      ranks are the first 1, 2 and 4 processes; one report for all of them

Markers: `ranks(*counts)`, `rank_timeout(seconds)`, `gpu`, and pytest-mpi's `mpi` (always on all ranks). Fixtures:
`world`, `group`, `rank_count`, `shared_tmp_path`. Settings: `axonmpi_unmarked`, `axonmpi_timeout`, `axonmpi_grace`.
This file declares them; `mock_plugin.py` or `real_plugin.py` runs the tests of a session.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ...launch.launcher_variables import launched_ranks
from .markers import (
    RANK_COUNT,
    parametrize_by_ranks,
    positive_seconds,
    refuse_examples_on_ranks,
    skip_unrunnable,
    timeout_of,
)
from .mock_plugin import MockRanks

if TYPE_CHECKING:
    from .real_plugin import RealRanks

_RANKS = pytest.StashKey["MockRanks | RealRanks"]()
_STDERR = pytest.StashKey[int]()

_MARKERS = (
    "ranks(*counts): run the test once for each of these numbers of ranks, on mock ranks or under mpirun",
    "rank_timeout(seconds): how long the test may take on ranks, in place of the setting axonmpi_timeout",
    "gpu: needs a CUDA device, skipped without one",
    "mpi(min_size=1): runs on all ranks of an mpirun",
    "mpi_skip: does not work under mpirun",
    "mpi_xfail: fails under mpirun",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the settings."""
    parser.addini(
        "axonmpi_unmarked",
        "ranks that run tests without a `ranks` or `mpi` marker under mpirun: `all` ranks, or the `first` only",
        default="all",
    )
    parser.addini("axonmpi_timeout", "seconds after which a test on ranks is taken to be stuck", default="60")
    parser.addini(
        "axonmpi_grace", "seconds for the other ranks to end a test after one of them failed", default="10"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Duplicate the terminal's file descriptor before output is captured."""
    if launched_ranks() > 1:
        early_config.stash[_STDERR] = os.dup(2)
    return (yield)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return no workers for `-n auto` under mpirun, which has started the processes already."""
    return 0 if launched_ranks() > 1 else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose between mock and real ranks."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    for name in ("axonmpi_timeout", "axonmpi_grace"):
        positive_seconds(config, name)
    unmarked = str(config.getini("axonmpi_unmarked"))
    if unmarked not in ("all", "first"):
        raise pytest.UsageError(f"axonmpi_unmarked: expected 'all' or 'first', got {unmarked!r}")
    ranks: MockRanks | RealRanks
    if launched_ranks() > 1:
        from .real_plugin import RealRanks  # a plain run needs nothing of MPI

        stream = config.stash.get(_STDERR, None)
        ranks = RealRanks(config, unmarked, os.dup(2) if stream is None else stream)
    else:
        ranks = MockRanks()
    config.stash[_RANKS] = ranks
    config.pluginmanager.register(ranks, "axonmpi_ranks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number of ranks."""
    parametrize_by_ranks(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that cannot run here, and check all time limits."""
    skip_unrunnable(config, items, config.stash[_RANKS].real_size)
    for item in items:
        timeout_of(item)  # refuses a wrong limit before anything runs
        refuse_examples_on_ranks(item)


@pytest.fixture(name=RANK_COUNT)
def _rank_count(request: pytest.FixtureRequest) -> int:
    """The number of ranks that the test runs on."""
    return request.config.stash[_RANKS].rank_count(request.node)


@pytest.fixture
def world(request: pytest.FixtureRequest, rank_count: int) -> Any:
    """This rank's world, of exactly as many ranks as the test runs on, and the default inside the test."""
    return request.config.stash[_RANKS].world(request.node)


@pytest.fixture
def group(world: Any) -> Any:
    """The group of all ranks that the test runs on."""
    return None if world is None else world.default_group


@pytest.fixture
def shared_tmp_path(group: Any, tmp_path: Path) -> Any:
    """An empty folder of the test that is the same on all of its ranks."""
    return None if group is None else group.broadcast_object(tmp_path)
