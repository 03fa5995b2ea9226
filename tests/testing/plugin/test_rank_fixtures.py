"""Fixtures that build what communicates: the same on mock ranks, and on real ones."""

import pytest
import torch
from torch import nn

import axonmpi as ax


@pytest.fixture
def model():
    """Wrapped for the default group."""
    return ax.DDP(nn.Linear(2, 1, bias=False))


@pytest.fixture
def inputs(model):
    """Torn down collectively."""
    yield torch.full((1, 2), float(ax.get_rank()))
    ax.barrier()


@pytest.fixture(params=["element", "parameter"])
def sharded(request, group):
    """Wrapped for a group that is named."""
    return ax.FSDP(nn.Linear(4, 4), group, shard_by=f"{request.param}s")


@pytest.mark.ranks(1, 2, 4)
def test_a_model_of_a_fixture(world, model, inputs) -> None:
    model(inputs).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 2), (world.size - 1) / 2))


@pytest.mark.ranks(2)
def test_a_fixture_that_asks_for_the_group(world, sharded) -> None:
    assert sharded.process_group is world.default_group
    sharded(torch.ones(1, 4)).sum().backward()


class TestInAClass:
    @pytest.fixture
    def own_rank(self, world):
        return world.rank

    @pytest.mark.ranks(2)
    @pytest.mark.usefixtures("model")
    def test_methods_are_fixtures_too(self, world, own_rank) -> None:
        assert own_rank == world.rank
