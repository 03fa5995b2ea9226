"""What `fsdp.rs` checks: the sharded wrapper, its memory, and layers divided by columns and rows."""

from __future__ import annotations

import inspect

import pytest
import torch
from networks import filled
from torch import nn

import axonmpi as ax
from axonmpi import CPUOffload, ShardingStrategy

pytestmark = pytest.mark.ranks(1, 2)


def test_defaults(group) -> None:
    fsdp = ax.FullyShardedDataParallel(nn.Linear(10, 5), group)
    assert fsdp.strategy is ShardingStrategy.FULL_SHARD
    assert fsdp.process_group is group
    arguments = inspect.signature(ax.FullyShardedDataParallel).parameters
    assert arguments["cpu_offload"].default is CPUOffload.NONE


def test_forward_between_gather_and_reshard(group) -> None:
    module = filled(nn.Linear(4, 2))
    expected = module(torch.ones(1, 4))
    fsdp = ax.FullyShardedDataParallel(module, group)
    fsdp.gather_parameters()
    torch.testing.assert_close(fsdp(torch.ones(1, 4)), expected)
    assert [tuple(parameter.shape) for parameter in fsdp.module.parameters()] == [(2, 4), (2,)]
    fsdp.reshard_parameters()
    torch.testing.assert_close(fsdp(torch.ones(1, 4)), expected)


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("cpu_offload", CPUOffload)
def test_the_builder_is_keywords(group, strategy, cpu_offload) -> None:
    fsdp = ax.FullyShardedDataParallel(
        nn.Linear(10, 5), group, sharding_strategy=strategy, cpu_offload=cpu_offload, mixed_precision=True
    )
    assert fsdp.strategy is strategy
    assert fsdp(torch.ones(1, 10)).shape == (1, 5)


def test_memory(group) -> None:
    fsdp = ax.FullyShardedDataParallel(nn.Linear(100, 50), group)
    for stats in (fsdp.memory_estimate(), fsdp.memory_stats()):
        assert stats.total_params == 5050
        assert stats.world_size == group.size
        assert stats.total_memory_mb() > 0.0
    assert fsdp.memory_estimate().memory_savings() == pytest.approx(1 - 1 / group.size, abs=0.02)
    stats = ax.FSDPMemoryStats(
        total_params=1000, param_memory_bytes=2000, grad_memory_bytes=2000, optim_memory_bytes=4000, world_size=2
    )
    assert (stats.total_memory_mb(), stats.memory_savings()) == (8000 / 2**20, 0.5)


@pytest.mark.parametrize("gather_output", [False, True])
def test_a_layer_divided_by_columns(group, gather_output) -> None:
    """With `gather_output` the original stacks the parts: [W, B, features]."""
    whole = filled(nn.Linear(8, 4))
    layer = ax.ColumnParallelLinear(8, 4, True, group, gather_output)
    ax.tensor.load_full_state_dict(layer, whole.state_dict())
    x = torch.linspace(-1, 1, 16).view(2, 8)
    expected = whole(x) if gather_output else whole(x).chunk(group.size, dim=1)[group.rank]
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_a_layer_divided_by_rows(group, input_is_parallel) -> None:
    """In the original rank 0 alone adds the bias, to its own output."""
    whole = filled(nn.Linear(8, 4))
    layer = ax.RowParallelLinear(8, 4, True, group, input_is_parallel)
    ax.tensor.load_full_state_dict(layer, whole.state_dict())
    x = torch.linspace(-1, 1, 16).view(2, 8)
    given = x.chunk(group.size, dim=1)[group.rank] if input_is_parallel else x
    torch.testing.assert_close(layer(given), whole(x))


def test_the_group_stands_third_in_its_guide(group) -> None:
    for kind in (ax.ColumnParallelLinear, ax.RowParallelLinear):
        layer = kind(8, 4, group)
        assert layer.process_group is group
        assert layer.bias is not None
