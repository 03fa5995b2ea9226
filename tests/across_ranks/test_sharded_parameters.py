"""Wrappers around divided models: with a group in which ranks have different parts they are refused."""

from functools import partial

import pytest
from helpers.compare import assert_close, assert_equal, refused
from helpers.transformer_parts import floats, together
from torch import nn

import axonmpi as ax


def divided(group: ax.ProcessGroup) -> nn.Module:
    return nn.Sequential(
        ax.ColumnParallelLinear(6, 8, process_group=group), ax.RowParallelLinear(8, 6, process_group=group)
    )


SHARDING = {
    f"fsdp {strategy.value}": partial(ax.FSDP, sharding_strategy=strategy) for strategy in ax.ShardingStrategy
}
SYNCHRONOUS = partial(ax.DDP, sync_strategy=ax.GradSyncStrategy.SYNCHRONOUS)
WRAPPERS = {"ddp": ax.DDP, "synchronous": SYNCHRONOUS, **SHARDING}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_divided_model_keeps_its_parts_where_the_group_was_forgotten(world, wrap):
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2})
    model = together(lambda: divided(mesh.group("tp")))
    before, expected = [p.detach().clone() for p in model.parameters()], model(floats(3, 6)).detach()
    message = r"'0', .*divided over ranks .*process_group=mesh.group\('dp'\)"
    refused(ValueError, (partial(wrap, model, None), message), (partial(wrap, model, mesh.group("tp")), message))
    assert_equal(list(model.parameters()), before)
    mesh.group("dp").broadcast(expected)  # whose values it begins with
    assert_close(wrap(model, mesh.group("dp"))(floats(3, 6)), expected)


@pytest.mark.ranks(4)
def test_groups_of_which_one_has_other_parts(world):
    """A pair of groups; a layer that two ranks share and the others have alone: all four are told."""
    mesh, strategy = ax.DeviceMesh({"dp": 2, "tp": 2}), ax.ShardingStrategy.HYBRID_SHARD
    model = together(lambda: divided(mesh.group("tp")))
    pair = mesh.group("dp"), mesh.group("tp")
    shared_or_alone = divided(mesh.group("tp") if mesh.rank("dp") == 0 else ax.ProcessGroup.mock())
    refused(
        ValueError,
        (partial(ax.FSDP, model, pair, sharding_strategy=strategy), "is divided over ranks"),
        (partial(ax.DDP, shared_or_alone), "is divided over ranks"),
    )


@pytest.mark.ranks(2)
def test_layers_that_are_divided_after_wrapping(world):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    wrapped = ax.DDP(model)
    model[1] = together(lambda: ax.ColumnParallelLinear(6, 6, gather_output=True))
    before = model[1].weight.detach().clone()
    message = "'1', which is divided over ranks"
    refused(ValueError, (wrapped.sync_parameters, message), (partial(wrapped, floats(3, 6)), message))
    assert_equal(model[1].weight, before)


# ---- pipelines --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", [None, ax.DDP, *SHARDING.values()], ids=["layers", "ddp", *SHARDING])
def test_a_stage_that_ranks_of_the_pipeline_share(world, wrap):
    def make(group: ax.ProcessGroup | None) -> nn.Module:
        return divided(group) if wrap is None else wrap(nn.Linear(6, 6), group)

    mesh = ax.DeviceMesh({"pp": 2, "dp": world.size // 2})
    stage = together(lambda: make(None))  # over all ranks, which have different stages
    with pytest.raises(ValueError, match=r"share module '0?' of stage .*process_group=mesh.group\('pp'\)"):
        ax.Pipeline.from_modules([stage] * 2, mesh.group("pp"), num_microbatches=2, ties=[])
    own = together(lambda: make(mesh.group("dp")))
    output = ax.Pipeline.from_modules([own] * 2, mesh.group("pp"), num_microbatches=2, ties=[])(floats(4, 6))
    assert output is None or output.shape == (4, 6)
