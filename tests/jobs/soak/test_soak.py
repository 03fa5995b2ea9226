"""What is made, used and dropped leaves nothing behind: a short form of `tests/jobs/run soak`."""

import weakref

import pytest
import torch
from jobs.soak import command as soak
from torch import nn
from torch.nn import functional as F

import axonmpi as ax


@pytest.mark.ranks(2)
@pytest.mark.real_ranks
def test_rounds_of_everything_leave_nothing(world) -> None:
    each = soak.rounds(world)
    first = soak.most_of(each, 2)
    assert first.growth(soak.most_of(each, 1), kib=1 << 16) == []  # allocators take longer to settle


def pipeline(world: ax.World) -> ax.Pipeline:
    return ax.Pipeline.from_modules(
        [soak.layer() for _ in range(world.size)], num_microbatches=2, loss_fn=F.mse_loss, seed=1
    )


def hybrid(world: ax.World) -> nn.Module:
    groups = world.default_group, world.partition([[rank] for rank in range(world.size)])
    return ax.FSDP(soak.model(), groups, sharding_strategy=ax.ShardingStrategy.HYBRID_SHARD)


MODELS = {
    "ddp": lambda world: ax.DDP(soak.model()),
    "ddp without views": lambda world: ax.DDP(soak.model(), gradient_as_bucket_view=False),
    "full shard": lambda world: ax.FSDP(soak.model()),
    "no shard": lambda world: ax.FSDP(soak.model(), sharding_strategy=ax.ShardingStrategy.NO_SHARD),
    "whole parameters": lambda world: ax.FSDP(soak.model(), shard_by="parameters"),
    "hybrid": hybrid,
    "tensor": lambda world: nn.Sequential(ax.ColumnParallelLinear(8, 16), ax.RowParallelLinear(16, soak.WIDTH)),
    "pipeline": pipeline,
}


@pytest.mark.ranks(2)
@pytest.mark.real_ranks
@pytest.mark.parametrize("kind", MODELS)
def test_dropped_models_are_freed(world, kind) -> None:
    """One that has trained, and one that was never used."""
    kept = [*of_trained(world, kind), *of_model(MODELS[kind](world))]
    soak.collect()
    assert not [reference() for reference in kept if reference() is not None]


def of_model(model: nn.Module | ax.Pipeline) -> list[weakref.ref]:
    return [weakref.ref(model), *map(weakref.ref, model.modules()), *map(weakref.ref, model.parameters())]


def of_trained(world: ax.World, kind: str) -> list[weakref.ref]:
    model = MODELS[kind](world)
    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "pipeline":
        model.train_step(soak.batch(), soak.batch())
    else:
        inputs = torch.ones(4, 8) if kind == "tensor" else soak.batch()
        F.mse_loss(model(inputs), soak.batch()).backward()
    kept = [*of_model(model), *(weakref.ref(p.grad) for p in model.parameters() if p.grad is not None)]
    optimizer.step()
    return kept
