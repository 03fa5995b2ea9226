"""Groups as on a node whose cores are close together."""

import math

import pytest


@pytest.fixture
def near_caches(monkeypatch):
    """Let groups be as where caches are close together, wherever the ranks happen to run."""
    monkeypatch.setattr("axonmpi.backends.connection.connection.SLOW_LINE_SECONDS", math.inf)
