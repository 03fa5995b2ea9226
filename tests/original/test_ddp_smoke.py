"""What `tests/ddp_smoke.rs` checks: data parallelism from end to end, on ranks with different data and weights."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from networks import filled
from torch import nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import ReduceOp

INPUTS = torch.linspace(-1, 1, 32).view(4, 2, 4).sin()
"""[rank, sample, feature]"""
TARGETS = torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2]])


def network(start: float) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), start)


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("op", "start", "step", "reduce"),
    [
        (ReduceOp.SUM, 1.0, 1.0, sum),
        (ReduceOp.AVERAGE, 0.0, 3.0, mean),
        (ReduceOp.MIN, 10.0, -1.0, min),
        (ReduceOp.MAX, 0.0, 1.0, max),
    ],
)
def test_all_reduce(group, op, start, step, reduce) -> None:
    tensor = torch.full((8,), start + step * group.rank)
    group.all_reduce(tensor, op)
    assert tensor.tolist() == [reduce(start + step * rank for rank in range(group.size))] * 8


@pytest.mark.ranks(1, 2, 3)
def test_broadcast(group) -> None:
    tensor = torch.full((6,), 100.0 * group.rank)
    group.broadcast(tensor)
    assert tensor.tolist() == [0.0] * 6


@pytest.mark.ranks(1, 2)
def test_all_ranks_get_the_weights_of_rank_0(world) -> None:
    ddp = ax.DDP(network(start=world.rank), world.default_group)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter += world.rank
    ddp.sync_parameters()
    assert torch.equal(values(ddp.module), values(network(start=0)))


@pytest.mark.ranks(1, 2, 4)
def test_a_step_is_that_of_one_process_with_all_data(world) -> None:
    ddp = ax.DDP(network(start=world.rank), world.default_group)
    ddp.sync_parameters()
    optimizer = torch.optim.SGD(ddp.module.parameters(), 0.01)
    optimizer.zero_grad()
    F.cross_entropy(ddp(INPUTS[world.rank]), TARGETS[world.rank]).backward()
    ddp.sync_gradients()
    optimizer.step()

    plain = network(start=0)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    F.cross_entropy(plain(INPUTS[: world.size].flatten(0, 1)), TARGETS[: world.size].flatten()).backward()
    optimizer.step()
    torch.testing.assert_close(values(ddp.module), values(plain))
    assert [torch.equal(each, values(ddp)) for each in ax.all_gather(values(ddp)[None])] == [True] * world.size
