"""What `lib.rs` checks: the parts together, as the names at the top of the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import axonmpi as ax

NAMES = (
    *("all_gather", "all_reduce_max", "all_reduce_mean", "all_reduce_min", "all_reduce_product", "all_reduce_sum"),
    *("barrier", "broadcast", "broadcast_from", "gather_tensor", "is_main_process", "rank", "reduce_scatter_mean"),
    *("reduce_scatter_sum", "scatter_tensor", "sync_gradient", "sync_gradients", "world_size", "Backend"),
    *("MockBackend", "ReduceOp", "CPUOffload", "ColumnParallelLinear", "DistributedDataParallel", "DDP", "FSDP"),
    *("FullyShardedDataParallel", "FSDPMemoryStats", "GradSyncStrategy", "GradientBucket", "GradientSynchronizer"),
    *("Pipeline", "PipelineMemoryStats", "PipelineSchedule", "PipelineStage", "ProcessGroup", "RowParallelLinear"),
    *("ShardingStrategy", "World", "NcclError"),
)


def test_its_names_are_here() -> None:
    assert [name for name in NAMES if name not in ax.__all__] == []


@pytest.mark.ranks(1, 2)
def test_a_whole_workflow(world) -> None:
    ddp = ax.DDP(nn.Linear(10, 5), world.default_group)
    assert ddp(torch.ones(1, 10)).shape == (1, 5)
    assert ddp.train().training
    ddp.sync_parameters()
    ddp.sync_gradients()  # there are none yet
    assert [parameter.grad for parameter in ddp.parameters()] == [None, None]


@pytest.mark.ranks(1, 2)
def test_keywords_of_the_wrapper(group) -> None:
    ddp = ax.DDP(nn.BatchNorm1d(5), group, broadcast_buffers=False, gradient_as_bucket_view=False)
    assert ddp.training
    x = torch.arange(10.0).view(2, 5) + group.rank
    ddp(x).square().sum().backward()
    assert torch.equal(ddp.module.running_mean, 0.1 * x.mean(dim=0))  # this rank's own
    assert all(parameter.grad is not None for parameter in ddp.parameters())


@pytest.mark.ranks(1, 2)
def test_a_bucket_is_reduced_as_one(group) -> None:
    bucket = ax.GradientBucket(1000)
    bucket.add(torch.tensor([1.0, 2.0]) * group.rank)
    bucket.add(torch.tensor([[3.0], [4.0], [5.0]]) * group.rank)
    assert bucket.size == 5
    group.all_reduce(bucket.data, ax.ReduceOp.AVERAGE)
    mean = (group.size - 1) / 2
    synced = bucket.extract()
    bucket.clear()
    assert bucket.is_empty
    assert [tensor.tolist() for tensor in synced] == [[mean, 2 * mean], [[3 * mean], [4 * mean], [5 * mean]]]


def test_one_group_for_each_mock_backend() -> None:
    groups = [ax.ProcessGroup(backend) for backend in ax.MockBackend.create_world(4)]
    assert [(group.rank, group.world_size) for group in groups] == [(rank, 4) for rank in range(4)]
