"""Where the ranks of a test are, and how models are sharded there."""

import functools

import pytest
from helpers.models import Blocks, built, new_group

import axonmpi as ax

SETTINGS = {
    "one_node": ("", ax.ShardingStrategy.FULL_SHARD),
    "apart": ("1", ax.ShardingStrategy.FULL_SHARD),
    "kept": ("1", ax.ShardingStrategy.SHARD_GRAD_OP),
    "replicas": ("1", ax.ShardingStrategy.HYBRID_SHARD),
}
"""Ranks a node, a strategy: two ranks gather parameters never, for each unit, once a step; or have them whole."""


@pytest.fixture(params=SETTINGS)
def setting(request, monkeypatch):
    """Place the ranks, and return the strategy."""
    ranks_per_node, strategy = SETTINGS[request.param]
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    return strategy


@pytest.fixture
def wrap(world, setting):
    """Return a wrapper that shards a model among all ranks, placed as the setting says."""
    with new_group(world) as group:
        yield functools.partial(ax.FSDP, process_group=group, sharding_strategy=setting)


@pytest.fixture
def model(wrap):
    """A model of blocks that is sharded, as the setting says."""
    return wrap(built(Blocks))


@pytest.fixture
def usual(world):
    """A model of blocks that is sharded, with the usual settings."""
    return ax.FSDP(built(Blocks))
