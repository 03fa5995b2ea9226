"""Wrappers around divided models: with a group in which ranks have different parts they are refused."""

from __future__ import annotations

import pytest
import torch
from helpers.whole_models import randn, together
from torch import nn

import axonmpi as ax

STRATEGIES = list(ax.ShardingStrategy)


def divided(group: ax.ProcessGroup) -> nn.Module:
    return nn.Sequential(
        ax.ColumnParallelLinear(6, 8, process_group=group), ax.RowParallelLinear(8, 6, process_group=group)
    )


WRAPPERS = {
    "ddp": lambda model, group: ax.DDP(model, group),
    "synchronous": lambda model, group: ax.DDP(model, group, sync_strategy=ax.GradSyncStrategy.SYNCHRONOUS),
    **{
        f"fsdp {strategy.value}": lambda model, group, strategy=strategy: ax.FSDP(
            model, group, sharding_strategy=strategy
        )
        for strategy in STRATEGIES
    },
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_divided_model_keeps_its_parts_where_the_group_was_forgotten(world, wrap):
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2})
    model = together(lambda: divided(mesh.group("tp")))
    before, expected = [p.detach().clone() for p in model.parameters()], model(randn(3, 6)).detach()
    for group in (None, mesh.group("tp")):
        with pytest.raises(ValueError, match=r"'0', .*divided over ranks .*process_group=mesh.group\('dp'\)"):
            wrap(model, group)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    mesh.group("dp").broadcast(expected)  # whose values it begins with
    wrapped = wrap(model, mesh.group("dp"))
    torch.testing.assert_close(wrapped(randn(3, 6)), expected)


@pytest.mark.ranks(4)
def test_a_pair_of_groups_of_which_one_has_other_parts(world):
    mesh = ax.DeviceMesh({"dp": 2, "tp": 2})
    model = together(lambda: divided(mesh.group("tp")))
    with pytest.raises(ValueError, match="is divided over ranks"):
        ax.FSDP(model, (mesh.group("dp"), mesh.group("tp")), sharding_strategy=ax.ShardingStrategy.HYBRID_SHARD)


@pytest.mark.ranks(4)
def test_one_rank_with_another_group_is_an_error_on_all(world):
    """Two ranks share a layer, the others have theirs alone: all four are told."""
    mesh = ax.DeviceMesh({"dp": 2, "tp": 2})
    alone = ax.ProcessGroup.mock()
    model = divided(mesh.group("tp") if mesh.rank("dp") == 0 else alone)
    with pytest.raises(ValueError, match="is divided over ranks"):
        ax.DDP(model)


@pytest.mark.ranks(2)
def test_layers_that_are_divided_after_wrapping(world):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    wrapped = ax.DDP(model)
    model[1] = together(lambda: ax.ColumnParallelLinear(6, 6, gather_output=True))
    before = model[1].weight.detach().clone()
    for attempt in (wrapped.sync_parameters, lambda: wrapped(randn(3, 6))):
        with pytest.raises(ValueError, match="'1', which is divided over ranks"):
            attempt()
    assert torch.equal(model[1].weight, before)


# ---- pipelines --------------------------------------------------------------------------------------------------

STAGES = {
    "layers": lambda group: divided(group),
    "ddp": lambda group: ax.DDP(nn.Linear(6, 6), group),
    **{
        f"fsdp {strategy.value}": lambda group, strategy=strategy: ax.FSDP(
            nn.Linear(6, 6), group, sharding_strategy=strategy
        )
        for strategy in STRATEGIES
    },
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", STAGES.values(), ids=STAGES)
def test_a_stage_that_ranks_of_the_pipeline_share(world, make):
    mesh = ax.DeviceMesh({"pp": 2, "dp": world.size // 2})
    stage = together(lambda: make(None))  # over all ranks, which have different stages
    with pytest.raises(ValueError, match=r"share module '0?' of stage .*process_group=mesh.group\('pp'\)"):
        ax.Pipeline.from_modules([stage] * 2, mesh.group("pp"), num_microbatches=2, ties=[])
    own = together(lambda: make(mesh.group("dp")))
    pipeline = ax.Pipeline.from_modules([own] * 2, mesh.group("pp"), num_microbatches=2, ties=[])
    output = pipeline(randn(4, 6))
    assert output is None or output.shape == (4, 6)
