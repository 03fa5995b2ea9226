"""The marker `ranks(4)` as a number of ranks for each test, and the tests that are skipped; it starts no ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from ...utils.device import gpu_count

RANK_COUNT = "rank_count"
"""The fixture by which a test is parametrised."""


def parametrize_by_ranks(metafunc: pytest.Metafunc) -> None:
    """Make a test of each count in `@pytest.mark.ranks(1, 2, 4)`."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    counts = marker.args
    wrong = not counts or marker.kwargs or any(type(count) is not int or count < 1 for count in counts)
    if wrong or len(set(counts)) < len(counts):
        pytest.fail(
            f"{metafunc.definition.nodeid}: ranks: expected different numbers of ranks such as ranks(1, 2, 4), "
            f"got ranks({_shown(marker.args, marker.kwargs)})",
            pytrace=False,
        )
    if RANK_COUNT not in metafunc.fixturenames:
        metafunc.fixturenames.append(RANK_COUNT)
    ids = [f"{count}rank{'s' if count > 1 else ''}" for count in counts]
    metafunc.parametrize(RANK_COUNT, counts, ids=ids, indirect=True)


def _shown(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def marked_rank_count(item: pytest.Item) -> int | None:
    """Return the number of ranks by the test's `ranks` marker, None without the marker."""
    callspec = getattr(item, "callspec", None)
    count: int | None = None if callspec is None else callspec.params.get(RANK_COUNT)
    return count


def uses_ranks(item: pytest.Item) -> bool:
    """Return True if the test has a `ranks` marker, or the fixture `world` or `group`."""
    return marked_rank_count(item) is not None or RANK_COUNT in getattr(item, "fixturenames", ())


def is_for_all_ranks(item: pytest.Item) -> bool:
    """Return True if the test has pytest-mpi's marker `mpi`."""
    return item.get_closest_marker("mpi") is not None


def refuse_examples_on_ranks(item: pytest.Item) -> None:
    """Raise for a hypothesis test on ranks: each rank would draw examples of its own."""
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if is_property and (uses_ranks(item) or is_for_all_ranks(item)):
        raise pytest.UsageError(
            f"{item.nodeid}: got a hypothesis test on ranks, each of which would draw examples of its own. "
            "Draw from a generator with the same seed on all ranks, such as random.Random(seed), and take the "
            "seed from an option, so that a failure can be repeated"
        )


def positive_seconds(config: pytest.Config, name: str) -> float:
    """Return a setting that is a time in seconds."""
    value = str(config.getini(name))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise pytest.UsageError(f"{name}: expected a positive number of seconds, got {value!r}")
    return seconds


def timeout_of(item: pytest.Item) -> float:
    """Return the test's time limit in seconds; infinite under a debugger."""
    if item.config.getoption("usepdb", False) or item.config.getoption("trace", False):
        return math.inf
    marker = item.get_closest_marker("rank_timeout")
    if marker is None:
        return positive_seconds(item.config, "axonmpi_timeout")
    seconds = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise pytest.UsageError(
            f"{item.nodeid}: rank_timeout: expected one positive number of seconds, "
            f"got rank_timeout({_shown(marker.args, marker.kwargs)})"
        )
    return float(seconds)


def skip_unrunnable(config: pytest.Config, items: Sequence[pytest.Item], real_ranks: int) -> None:
    """Skip GPU tests without a GPU; without pytest-mpi, apply its markers.

    Args:
        config: Of the session.
        items: Its tests.
        real_ranks: Number of ranks under `mpirun`, 0 for mock ranks.
    """
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not gpu_count():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.pluginmanager.hasplugin("pytest_mpi"):
        for item in items:
            _apply_mpi_markers(item, real_ranks)


def _apply_mpi_markers(item: pytest.Item, real_ranks: int) -> None:
    marker = item.get_closest_marker("mpi")
    least = 1 if marker is None else marker.kwargs.get("min_size", 1)
    if marker is not None and real_ranks < least:
        reason = f"needs {least} ranks of an mpirun" if least > 1 else "needs an mpirun"
        item.add_marker(pytest.mark.skip(reason=reason))
    if real_ranks and item.get_closest_marker("mpi_skip"):
        item.add_marker(pytest.mark.skip(reason="does not work under mpirun"))
    if real_ranks and item.get_closest_marker("mpi_xfail"):
        item.add_marker(pytest.mark.xfail(reason="fails under mpirun"))
