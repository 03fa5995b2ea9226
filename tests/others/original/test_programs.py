"""The training loops of the original's README, module docs and guide, compared with one process in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers.networks import filled
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import CPUOffload, GradientSynchronizer, GradSyncStrategy, PipelineSchedule, ShardingStrategy

STEPS, SAMPLES, WIDTH = 3, 8, 12


def network(blocks: int = 1) -> nn.Sequential:
    middle = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return filled(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), *middle, nn.Linear(WIDTH, 3)).double())


def batches() -> Iterable[tuple[Tensor, Tensor]]:
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        yield x, x[:, :3] * x[:, 3:]


def own_part(world: ax.World) -> Iterable[tuple[Tensor, Tensor]]:
    """A rank's samples of each batch."""
    for x, y in batches():
        yield x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank]


def sgd(model: nn.Module | Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained_alone(model: nn.Module, clip: float = float("inf")) -> dict[str, Tensor]:
    """What a single process with the whole batches gets."""
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def assert_trained(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


# ---- data parallelism -------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_data_parallel(world, strategy) -> None:
    """With NO_SYNC the call of `sync_gradients()` alone averages. The ranks begin with weights of their own."""
    ddp = ax.DistributedDataParallel(network(), world.default_group, sync_strategy=strategy)
    with torch.no_grad():
        ddp.module[0].weight += world.rank
    ddp.sync_parameters()
    optimizer = sgd(ddp)
    ddp.train()
    for x, y in own_part(world):
        loss = F.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        ddp.sync_gradients()
        optimizer.step()
    assert_trained(ddp.state_dict(), trained_alone(network()))


@pytest.mark.ranks(2)
def test_data_parallel_with_accumulated_gradients(world) -> None:
    """A batch in two halves, and gradients are averaged in each backward, as in the guide."""
    ddp = ax.DDP(network(), world.default_group)
    optimizer = sgd(ddp)
    for x, y in own_part(world):
        for part in (0, 1):
            (F.mse_loss(ddp(x.chunk(2)[part]), y.chunk(2)[part]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained(ddp.module.state_dict(), trained_alone(network()))


def averaged_one_by_one(model: nn.Module, group: ax.ProcessGroup) -> None:
    for parameter in model.parameters():
        ax.sync_gradient(parameter.grad, group)


def averaged_as_a_list(model: nn.Module, group: ax.ProcessGroup) -> None:
    ax.sync_gradients([parameter.grad for parameter in model.parameters()], group)


def averaged_in_a_bucket(model: nn.Module, group: ax.ProcessGroup) -> None:
    bucket = ax.GradientBucket(1000)
    for parameter in model.parameters():
        assert bucket.add(parameter.grad)
    group.backend.all_reduce(bucket.data, ax.ReduceOp.AVERAGE)
    for parameter, gradient in zip(model.parameters(), bucket.extract(), strict=True):
        parameter.grad = gradient


def averaged_by_a_synchronizer(model: nn.Module, group: ax.ProcessGroup) -> None:
    synchronizer = GradientSynchronizer(GradSyncStrategy.SYNCHRONOUS, 25_000_000)
    synchronizer.prepare(10)  # more than there are
    parameters = list(model.parameters())
    for index in reversed(range(len(parameters))):
        synchronizer.add_gradient(index, parameters[index].grad)
    synchronizer.sync_all(group)
    for parameter, gradient in zip(parameters, synchronizer.gradients(), strict=True):
        parameter.grad = gradient
    synchronizer.clear()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "average", [averaged_one_by_one, averaged_as_a_list, averaged_in_a_bucket, averaged_by_a_synchronizer]
)
def test_without_a_wrapper(world, average: Callable[[nn.Module, ax.ProcessGroup], None]) -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in own_part(world):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        average(model, world.default_group)
        optimizer.step()
    assert_trained(model.state_dict(), trained_alone(network()))


# ---- pipelines --------------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
def test_pipeline(world, schedule) -> None:
    stages = ax.pipeline.split_module(network(blocks=3), world.size)
    pipeline = ax.Pipeline.from_modules(
        stages, world.default_group, schedule=schedule, num_microbatches=4, loss_fn=F.mse_loss
    )
    optimizer = sgd(pipeline)
    for x, y in batches():
        optimizer.zero_grad()
        pipeline.train_step(x, y)
        optimizer.step()
    expected = iter(trained_alone(network(blocks=3)).values())
    for rank, stage in enumerate(stages):
        for parameter in stage.parameters():
            value = next(expected)
            if rank == world.rank:
                torch.testing.assert_close(parameter.detach(), value, rtol=1e-9, atol=1e-12)


# ---- divided layers, and several kinds of parallelism -------------------------------------------------------


class Whole(nn.Module):
    """One layer after the other, with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Linear(6, WIDTH, dtype=torch.float64)
        self.row = nn.Linear(WIDTH, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.row(F.gelu(self.column(x)))


class Divided(Whole):
    """Column, activation, row: what the original's guide shows."""

    def __init__(self, group: ax.ProcessGroup) -> None:
        super().__init__()
        filled(self)
        self.column = ax.ColumnParallelLinear.from_linear(self.column, group)
        self.row = ax.RowParallelLinear.from_linear(self.row, group)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, :3] + output[:, 3:], target)


def trained_whole(blocks: int) -> list[dict[str, Tensor]]:
    model = nn.Sequential(*(filled(Whole()) for _ in range(blocks)))
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        summed(model(x), y).backward()
        optimizer.step()
    return [block.state_dict() for block in model]


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_divided_layers(world) -> None:
    model = Divided(world.default_group)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        summed(model(x), y).backward()
        optimizer.step()
    (expected,) = trained_whole(1)
    assert_trained(ax.tensor.full_state_dict(model), expected)


def groups_of(world: ax.World, sizes: tuple[int, int, int]) -> tuple[ax.ProcessGroup, ...]:
    """This rank's groups for dp x pp x tp, made with `new_group` as in the original's guide."""
    grid = torch.arange(world.size).view(sizes)
    mine = []
    for axis in range(3):
        rows = grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        groups = [world.new_group(row) for row in rows]
        mine.append(next(group for group in groups if group.contains(world.rank)))
    return tuple(mine)


@pytest.mark.real_ranks
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1), (1, 2, 2)], ids=["dp-tp", "dp-pp", "pp-tp"])
@pytest.mark.ranks(4)
def test_several_kinds_together(world, sizes) -> None:
    check_together(world, sizes)


@pytest.mark.ranks(8)
def test_all_kinds_together(world) -> None:
    check_together(world, (2, 2, 2))


def check_together(world: ax.World, sizes: tuple[int, int, int]) -> None:
    """Stages of divided layers, each replicated: a pipeline of DDP of tensor parallelism."""
    dp, pp, tp = groups_of(world, sizes)
    blocks = [Divided(tp) for _ in range(pp.size)]
    stages = [
        ax.DistributedDataParallel(block, dp) if stage == pp.rank else None for stage, block in enumerate(blocks)
    ]
    pipeline = ax.Pipeline.from_modules(stages, pp, num_microbatches=2, loss_fn=summed)
    optimizer = sgd(pipeline)
    for x, y in batches():
        optimizer.zero_grad()
        pipeline.train_step(x.chunk(dp.size)[dp.rank], y.chunk(dp.size)[dp.rank])
        optimizer.step()
    assert_trained(ax.tensor.full_state_dict(blocks[pp.rank]), trained_whole(pp.size)[pp.rank])


# ---- fully sharded data parallelism -----------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "cpu_offload", "by_hand"),
    [
        (strategy, cpu_offload, (number + other) % 2 == 0)
        for number, strategy in enumerate(ShardingStrategy)
        for other, cpu_offload in enumerate(CPUOffload)
    ],
)
def test_fully_sharded(world, strategy, cpu_offload, by_hand) -> None:
    """Every two settings together."""
    fsdp = ax.FullyShardedDataParallel(
        network(blocks=2), world.default_group, sharding_strategy=strategy, cpu_offload=cpu_offload
    )
    optimizer = sgd(fsdp)
    for x, y in own_part(world):
        optimizer.zero_grad()
        if by_hand:
            fsdp.gather_parameters()
        F.mse_loss(fsdp(x), y).backward()
        if by_hand:
            fsdp.reshard_parameters()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm(1.0)
        optimizer.step()
    assert_trained(fsdp.full_state_dict(), trained_alone(network(blocks=2), clip=1.0))


def trained_alone_in_bfloat16(parts: int) -> dict[str, Tensor]:
    """Gradients of each rank's samples, computed in bfloat16 and averaged in float32, as its README asks for."""
    master = network().float()
    optimizer = sgd(master)
    for x, y in batches():
        optimizer.zero_grad()
        for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            low = copy.deepcopy(master).bfloat16()
            F.mse_loss(low(own_x.bfloat16()), own_y.bfloat16()).backward()
            for parameter, lower in zip(master.parameters(), low.parameters(), strict=True):
                share = lower.grad.float() / parts
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
    return master.state_dict()


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
def test_fully_sharded_with_all_of_its_readme(world) -> None:
    fsdp = ax.FullyShardedDataParallel(
        network().float(),
        world.default_group,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload.PARAMS,
        mixed_precision=True,
    )
    optimizer = sgd(fsdp)
    for x, y in own_part(world):
        optimizer.zero_grad()
        fsdp.gather_parameters()
        F.mse_loss(fsdp(x.float()), y.bfloat16()).backward()
        fsdp.reshard_parameters()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm(1.0)
        optimizer.step()
    found, expected = fsdp.full_state_dict(), trained_alone_in_bfloat16(world.size)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    assert fsdp.memory_estimate().memory_savings() == pytest.approx(1 - 1 / world.size, abs=0.1)
