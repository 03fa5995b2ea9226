"""What `ddp.rs`, `fsdp.rs`, `pipeline.rs` and `lib.rs` check: the wrappers and their parts, each on its own."""

import inspect

import pytest
import torch
from helpers.compare import assert_close
from helpers.networks import filled
from torch import nn

import axonmpi as ax
from axonmpi import CPUOffload, GradSyncStrategy, PipelineMemoryStats, PipelineSchedule, ShardingStrategy

pytestmark = pytest.mark.ranks(2)
NAMES = (
    *("all_gather", "all_reduce_max", "all_reduce_mean", "all_reduce_min", "all_reduce_product", "all_reduce_sum"),
    *("barrier", "broadcast", "broadcast_from", "gather_tensor", "is_main_process", "rank", "reduce_scatter_mean"),
    *("reduce_scatter_sum", "scatter_tensor", "sync_gradient", "sync_gradients", "world_size", "Backend"),
    *("MockBackend", "ReduceOp", "CPUOffload", "ColumnParallelLinear", "DistributedDataParallel", "DDP", "FSDP"),
    *("FullyShardedDataParallel", "FSDPMemoryStats", "GradSyncStrategy", "GradientBucket", "GradientSynchronizer"),
    *("Pipeline", "PipelineMemoryStats", "PipelineSchedule", "PipelineStage", "ProcessGroup", "RowParallelLinear"),
    *("ShardingStrategy", "World", "NcclError"),
)
X = torch.linspace(-1, 1, 16).view(2, 8)


@pytest.mark.ranks(1)
def test_its_names_and_defaults_are_here() -> None:
    assert [name for name in NAMES if name not in ax.__all__] == []
    for make, argument, default in (
        (ax.Pipeline, "schedule", PipelineSchedule.ONE_F_ONE_B),
        (ax.Pipeline.from_modules, "schedule", PipelineSchedule.ONE_F_ONE_B),
        (ax.FullyShardedDataParallel, "sharding_strategy", ShardingStrategy.FULL_SHARD),
        (ax.FullyShardedDataParallel, "cpu_offload", CPUOffload.NONE),
        (ax.GradientSynchronizer, "strategy", GradSyncStrategy.SYNCHRONOUS),
    ):
        assert inspect.signature(make).parameters[argument].default is default


# ---- data parallelism ---------------------------------------------------------------------------------------


def test_a_replica(group) -> None:
    """In the original a linear layer ignores `train` and `eval`."""
    module = filled(nn.Linear(8, 4), start=group.rank)
    ddp = ax.DistributedDataParallel(module, group)
    assert (ddp.process_group, ddp.module, len(list(ddp.parameters()))) == (group, module, 2)
    with torch.no_grad():
        module.weight += group.rank
    ddp.sync_parameters()
    assert torch.equal(ddp(X), filled(nn.Linear(8, 4))(X))
    ddp.sync_gradients()  # there are none yet
    assert [parameter.grad for parameter in ddp.parameters()] == [None, None]
    assert (ddp.training, ddp.eval().module.training, ddp.train().module.training) == (True, False, True)


def test_buffers_of_its_own(group) -> None:
    ddp = ax.DDP(nn.BatchNorm1d(5), group, broadcast_buffers=False, gradient_as_bucket_view=False)
    x = torch.arange(10.0).view(2, 5) + group.rank
    ddp(x).square().sum().backward()
    assert torch.equal(ddp.module.running_mean, 0.1 * x.mean(dim=0))
    assert all(parameter.grad is not None for parameter in ddp.parameters())


def test_a_bucket_takes_what_fits_and_is_reduced_as_one(group) -> None:
    bucket, seen = ax.GradientBucket(5), []
    for gradient in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]), torch.tensor([[4.0], [5.0]])):
        seen.append((bucket.is_empty, bucket.add(gradient * group.rank), bucket.size, bucket.is_full))
    assert seen == [(True, True, 3, False), (False, False, 3, False), (False, True, 5, True)]
    group.all_reduce(bucket.data, ax.ReduceOp.AVERAGE)
    assert bucket.data.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    bucket.data[0] = 9.0  # the original's data_mut()
    assert [tensor.tolist() for tensor in bucket.extract()] == [[9.0, 1.0, 1.5], [[2.0], [2.5]]]
    bucket.clear()
    assert bucket.is_empty


@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_a_synchronizer_takes_what_was_added(group, strategy) -> None:
    synchronizer = ax.GradientSynchronizer(strategy, 100)
    synchronizer.prepare(10)
    synchronizer.sync_all(group)  # nothing to do
    assert (synchronizer.strategy, synchronizer.gradients()) == (strategy, [])
    synchronizer.clear()
    synchronizer.add_gradient(0, torch.tensor([1.0, 2.0]) * group.rank)
    synchronizer.sync_all(group)
    factor = group.rank if strategy is GradSyncStrategy.NO_SYNC else 0.5
    assert [each.tolist() for each in synchronizer.gradients()] == [[factor, 2 * factor]]


# ---- fully sharded data parallelism, divided layers ---------------------------------------------------------


def test_memory(group) -> None:
    fsdp = ax.FullyShardedDataParallel(nn.Linear(100, 50), group, sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert (fsdp.process_group, fsdp.strategy) == (group, ShardingStrategy.FULL_SHARD)
    for stats in (fsdp.memory_estimate(), fsdp.memory_stats()):
        assert (stats.total_params, stats.world_size, stats.total_memory_mb() > 0) == (5050, group.size, True)
    assert fsdp.memory_estimate().memory_savings() == pytest.approx(1 - 1 / group.size, abs=0.02)
    stats = ax.FSDPMemoryStats(
        total_params=1000, param_memory_bytes=2000, grad_memory_bytes=2000, optim_memory_bytes=4000, world_size=2
    )
    assert (stats.total_memory_mb(), stats.memory_savings()) == (8000 / 2**20, 0.5)


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts", "whole"])
def test_divided_layers(group, is_whole) -> None:
    """With `gather_output` the original stacks the parts; its rank 0 alone adds the bias of a layer cut by rows."""
    whole = filled(nn.Linear(8, 4))
    columns = ax.ColumnParallelLinear(8, 4, True, group, is_whole)
    rows = ax.RowParallelLinear(8, 4, True, group, not is_whole)
    for layer in (columns, rows):
        ax.tensor.load_full_state_dict(layer, whole.state_dict())
    expected = whole(X) if is_whole else whole(X).chunk(group.size, dim=1)[group.rank]
    assert_close(columns(X), expected)
    assert_close(rows(X if is_whole else X.chunk(group.size, dim=1)[group.rank]), whole(X))
    for kind in (ax.ColumnParallelLinear, ax.RowParallelLinear):
        layer = kind(8, 4, group)  # as in its guide
        assert (layer.process_group, layer.bias is not None) == (group, True)


# ---- pipelines ----------------------------------------------------------------------------------------------


class Counting(nn.Linear):
    """Keeps the sizes of the batches it has seen."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_batches_are_cut_and_joined(group, schedule) -> None:
    chunks = 1 if schedule in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B) else 2
    modules = [filled(Counting(), start) for start in range(chunks * group.size)]
    expected = nn.Sequential(*(filled(nn.Linear(8, 8), start) for start in range(len(modules))))(X)
    pipeline = ax.Pipeline.from_modules(modules, group, schedule=schedule, num_microbatches=2)
    assert (pipeline.num_stages, pipeline.schedule) == (len(modules), schedule)
    output = pipeline(X)
    assert sorted(module.batches for module in modules) == [[]] * (len(modules) - chunks) + [[1, 1]] * chunks
    assert_close(output, expected if pipeline.has_last_stage else None)
    assert not pipeline.eval().training


@pytest.mark.ranks(1, 2)
def test_a_pipeline_of_stages(group) -> None:
    """Several on one rank, too; the memory of GPipe is that of one rank, which the original multiplies."""
    stages = [ax.PipelineStage(nn.Flatten(), stage, stage % group.size) for stage in range(2)]
    assert [(stage.stage_id, stage.device_rank) for stage in stages] == [(0, 0), (1, group.size - 1)]
    pipeline = ax.Pipeline(stages, group, schedule=PipelineSchedule.GPIPE, num_microbatches=4)
    expected = torch.arange(16.0).view(4, 4) if pipeline.has_last_stage else None
    assert_close(pipeline.forward(torch.arange(16.0).view(4, 2, 2)), expected)
    for count, microbatches in ((4, 8), (4, 2), (1, 3)):
        assert PipelineMemoryStats.gpipe_peak_activations(count, microbatches) == microbatches
        assert PipelineMemoryStats.one_f_one_b_peak_activations(count, microbatches) == min(count, microbatches)
