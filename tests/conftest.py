"""Settings of all tests."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

START_JOBS = ("cli", "docs", "harness", "launch", "nodes", "slurm")
"""Folders whose tests start jobs, which have time limits of their own; the one around them is longer."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path).relative_to(Path(__file__).parent)
        starts_jobs = path.parts[0] in START_JOBS or path.name in (
            "test_settings.py",
            "test_command.py",
            "test_fsdp_limits.py",
        )
        if starts_jobs and item.get_closest_marker("rank_timeout") is None:
            item.add_marker(pytest.mark.rank_timeout(300))
