"""Every kind of parallelism on four ranks, however they are placed, beside one process; a script for ranks."""

from __future__ import annotations

import torch
from job import model, training
from torch import nn
from torch.nn import functional as F

import axonmpi as ax

STEPS = 3


def main() -> None:
    world = ax.init_process_group()
    training(world, ax.ShardingStrategy.FULL_SHARD)
    training(world, ax.ShardingStrategy.HYBRID_SHARD)
    data_parallel(world)
    pipeline()
    tensor_parallel()
    places = ax.all_gather_object(world.node_rank)
    if world.is_main:
        print(f"done on nodes {places}")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Make the whole batch, the same on all ranks."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=chance), torch.randn(8, 3, generator=chance)


def plain() -> nn.Module:
    """Train on the whole batch in this process."""
    alone, (inputs, targets) = model(), batch()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(alone(inputs), targets).backward()
        optimizer.step()
    return alone


def data_parallel(world: ax.World) -> None:
    wrapped, (inputs, targets) = ax.DDP(model()), batch()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        own = slice(2 * world.rank, 2 * world.rank + 2)
        F.mse_loss(wrapped(inputs[own]), targets[own]).backward()
        optimizer.step()
    torch.testing.assert_close(list(wrapped.parameters()), list(plain().parameters()))


def pipeline() -> None:
    """Four stages, the last of which does nothing but pass on."""
    stages = nn.ModuleList([*model(), nn.Identity()])
    pipe = ax.Pipeline.from_modules(
        stages, schedule=ax.PipelineSchedule.ONE_F_ONE_B, num_microbatches=4, loss_fn=F.mse_loss
    )
    parameters = list(pipe.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for _ in range(STEPS):
        pipe.zero_grad()
        pipe.train_step(*batch())
        if optimizer:
            optimizer.step()
    whole = {tuple(parameter.shape): parameter for parameter in plain().parameters()}
    for parameter in parameters:
        torch.testing.assert_close(parameter, whole[tuple(parameter.shape)])


def tensor_parallel() -> None:
    """A column-parallel and a row-parallel layer; the gradient of their input is that of the whole layers."""
    whole = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    for parameter in whole.parameters():
        ax.broadcast(parameter.data)
    divided = nn.Sequential(
        ax.ColumnParallelLinear.from_linear(whole[0]), nn.GELU(), ax.RowParallelLinear.from_linear(whole[2])
    )
    inputs, targets = batch()
    found = []
    for module in (whole, divided):
        x = inputs.clone().requires_grad_()
        output = module(x)
        F.mse_loss(output, targets).backward()
        found.append((output.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0])


if __name__ == "__main__":
    main()
