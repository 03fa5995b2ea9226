"""Settings of all tests."""

import gc
import os
from pathlib import Path

import pytest
import torch

from axonmpi import environment

pytest_plugins = ["pytester"]

START_JOBS = ("cli", "docs", "harness", "launch", "nodes", "slurm")
"""Folders whose tests start jobs, which have time limits of their own; the one around them is longer."""


FILES_THAT_START_JOBS = ("test_settings.py", "test_command.py", "test_fsdp_limits.py")


def pytest_configure() -> None:
    """Share the cores among the processes of pytest-xdist, or their threads would wait for each other."""
    if count := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, len(environment.usable_cores()) // int(count)))


def starts_jobs(item: pytest.Item) -> bool:
    path = Path(item.path).relative_to(Path(__file__).parent)
    return path.parts[0] in START_JOBS or path.name in FILES_THAT_START_JOBS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_jobs(item) and item.get_closest_marker("rank_timeout") is None:
            item.add_marker(pytest.mark.rank_timeout(300))


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Spare the garbage collector, which some tests call often, what tests before have left for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _not_launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what starts inside a test see no launcher, whatever has started this session."""
    if starts_jobs(request.node) and request.node.get_closest_marker("ranks") is None:
        for name in set(os.environ) - set(environment.without_launcher_variables(os.environ)):
            monkeypatch.delenv(name)
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # lines of several ranks would mix
