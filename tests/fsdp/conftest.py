"""What the tests of sharded models share: the models and references of the tests of data parallelism, and nodes."""

import sys
from pathlib import Path

import pytest

from axonmpi import ShardingStrategy

sys.path.append(str(Path(__file__).resolve().parents[1] / "ddp"))

PLACEMENTS = {"one_node": "", "pairs": "2", "apart": "1"}
"""How many ranks believe that they share a node: all, two, none."""


@pytest.fixture(params=PLACEMENTS)
def placement(request, monkeypatch):
    """Let groups made in the test believe that their ranks are on so many nodes."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", PLACEMENTS[request.param])
    return request.param


SETTINGS = {
    "one_node": ("", ShardingStrategy.FULL_SHARD),
    "apart": ("1", ShardingStrategy.FULL_SHARD),
    "kept": ("1", ShardingStrategy.SHARD_GRAD_OP),
    "replicas": ("1", ShardingStrategy.HYBRID_SHARD),
}
"""Ranks a node, a strategy: two ranks gather parameters never, for each unit, once a step; or have them whole."""


@pytest.fixture(params=SETTINGS)
def setting(request, monkeypatch):
    """Place the ranks, and return the strategy."""
    ranks_per_node, strategy = SETTINGS[request.param]
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    return strategy


@pytest.fixture
def apart(monkeypatch):
    """Let every rank believe that it is alone on its node: units take turns in the same memory."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
