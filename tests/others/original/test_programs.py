"""The training loops of the original's README, module docs and guide, compared with one process in plain torch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch
from helpers.compare import assert_close
from helpers.networks import filled
from helpers.settings import each_pair
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import CPUOffload, GradientSynchronizer, GradSyncStrategy, PipelineSchedule, ShardingStrategy

STEPS, SAMPLES, WIDTH = 3, 8, 12


def network(blocks: int = 1) -> nn.Sequential:
    middle = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return filled(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), *middle, nn.Linear(WIDTH, 3)).double())


def sgd(model: nn.Module | Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def steps(optimizer: torch.optim.Optimizer, rank: int = 0, size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one rank's samples of each batch, after `zero_grad` and before `step`."""
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        yield x.chunk(size)[rank], (x[:, :3] * x[:, 3:]).chunk(size)[rank]
        optimizer.step()


def trained_alone(
    model: nn.Module, clip: float = float("inf"), loss: Callable[..., Tensor] = F.mse_loss
) -> dict[str, Tensor]:
    """Return the state after training in a single process on the whole batches."""
    for x, y in steps(sgd(model)):
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return model.state_dict()


def assert_trained(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert_close(found, expected, 1e-9)


# ---- data parallelism -------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("strategy", "halves"), [*((each, 1) for each in GradSyncStrategy), ("overlapped", 2)])
def test_data_parallel(world, strategy, halves) -> None:
    """With NO_SYNC the call of `sync_gradients()` alone averages. The ranks begin with weights of their own.

    A batch may come in two halves, and gradients are then averaged in each backward, as in the guide.
    """
    ddp = ax.DistributedDataParallel(network(), world.default_group, sync_strategy=strategy)
    with torch.no_grad():
        ddp.module[0].weight += world.rank
    ddp.sync_parameters()
    ddp.train()
    for x, y in steps(sgd(ddp), world.rank, world.size):
        for part in zip(x.chunk(halves), y.chunk(halves), strict=True):
            (F.mse_loss(ddp(part[0]), part[1]) / halves).backward()
        ddp.sync_gradients()
    assert_trained(ddp.state_dict(), trained_alone(network()))


def averaged_one_by_one(gradients: list[Tensor], group: ax.ProcessGroup) -> list[Tensor]:
    for gradient in gradients:
        ax.sync_gradient(gradient, group)
    return gradients


def averaged_as_a_list(gradients: list[Tensor], group: ax.ProcessGroup) -> list[Tensor]:
    ax.sync_gradients(gradients, group)
    return gradients


def averaged_in_a_bucket(gradients: list[Tensor], group: ax.ProcessGroup) -> list[Tensor]:
    bucket = ax.GradientBucket(1000)
    assert all(bucket.add(gradient) for gradient in gradients)
    group.backend.all_reduce(bucket.data, ax.ReduceOp.AVERAGE)
    return bucket.extract()


def averaged_by_a_synchronizer(gradients: list[Tensor], group: ax.ProcessGroup) -> list[Tensor]:
    synchronizer = GradientSynchronizer(GradSyncStrategy.SYNCHRONOUS, 25_000_000)
    synchronizer.prepare(10)  # more than there are
    for index in reversed(range(len(gradients))):
        synchronizer.add_gradient(index, gradients[index])
    synchronizer.sync_all(group)
    averages = synchronizer.gradients()
    synchronizer.clear()
    return averages


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "average", [averaged_one_by_one, averaged_as_a_list, averaged_in_a_bucket, averaged_by_a_synchronizer]
)
def test_without_a_wrapper(world, average) -> None:
    model = network()
    for x, y in steps(sgd(model), world.rank, world.size):
        F.mse_loss(model(x), y).backward()
        averages = average([parameter.grad for parameter in model.parameters()], world.default_group)
        for parameter, gradient in zip(model.parameters(), averages, strict=True):
            parameter.grad = gradient
    assert_trained(model.state_dict(), trained_alone(network()))


# ---- pipelines --------------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
def test_pipeline(world, schedule) -> None:
    whole = network(blocks=3)
    stages = ax.pipeline.split_module(whole, world.size)
    pipeline = ax.Pipeline.from_modules(
        stages, world.default_group, schedule=schedule, num_microbatches=4, loss_fn=F.mse_loss
    )
    for x, y in steps(sgd(pipeline)):
        pipeline.train_step(x, y)
    own = {name: value for name, value in whole.named_parameters() if value in {*stages[world.rank].parameters()}}
    expected = trained_alone(network(blocks=3))
    assert_trained(own, {name: expected[name] for name in own})


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


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_divided_layers(world) -> None:
    model = Divided(world.default_group)
    for x, y in steps(sgd(model)):
        summed(model(x), y).backward()
    assert_trained(ax.tensor.full_state_dict(model), trained_alone(filled(Whole()), loss=summed))


def groups_of(world: ax.World, sizes: tuple[int, int, int]) -> Iterator[ax.ProcessGroup]:
    """Yield this rank's groups for dp x pp x tp, made with `new_group` as in the original's guide."""
    grid = torch.arange(world.size).view(sizes)
    for axis in range(3):
        rows = grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        groups = [world.new_group(row) for row in rows]
        yield next(group for group in groups if group.contains(world.rank))


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
    for x, y in steps(sgd(pipeline), dp.rank, dp.size):
        pipeline.train_step(x, y)
    whole = nn.Sequential(*(filled(Whole()) for _ in blocks))
    trained_alone(whole, loss=summed)
    assert_trained(ax.tensor.full_state_dict(blocks[pp.rank]), whole[pp.rank].state_dict())


# ---- fully sharded data parallelism -----------------------------------------------------------------------


@pytest.mark.ranks(2)
@each_pair(strategy=list(ShardingStrategy), cpu_offload=list(CPUOffload), by_hand=[True, False])
def test_fully_sharded(world, strategy, cpu_offload, by_hand) -> None:
    fsdp = ax.FullyShardedDataParallel(
        network(blocks=2), world.default_group, sharding_strategy=strategy, cpu_offload=cpu_offload
    )
    for x, y in steps(sgd(fsdp), world.rank, world.size):
        if by_hand:
            fsdp.gather_parameters()
            assert [p.shape for p in fsdp.module.parameters()] == [p.shape for p in network(blocks=2).parameters()]
        F.mse_loss(fsdp(x), y).backward()
        if by_hand:
            fsdp.reshard_parameters()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm(1.0)
    assert_trained(fsdp.full_state_dict(), trained_alone(network(blocks=2), clip=1.0))


def trained_alone_in_bfloat16(parts: int) -> dict[str, Tensor]:
    """Gradients of each rank's samples, computed in bfloat16 and averaged in float32, as its README asks for."""
    master = network().float()
    for x, y in steps(sgd(master)):
        for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            low = copy.deepcopy(master).bfloat16()
            F.mse_loss(low(own_x.bfloat16()), own_y.bfloat16()).backward()
            for parameter, lower in zip(master.parameters(), low.parameters(), strict=True):
                share = lower.grad.float() / parts
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
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
    for x, y in steps(sgd(fsdp), world.rank, world.size):
        fsdp.gather_parameters()
        F.mse_loss(fsdp(x.float()), y.bfloat16()).backward()
        fsdp.reshard_parameters()
        fsdp.sync_gradients()
        fsdp.clip_grad_norm(1.0)
    assert_close(fsdp.full_state_dict(), trained_alone_in_bfloat16(world.size), 1e-4)
    assert fsdp.memory_estimate().memory_savings() == pytest.approx(1 - 1 / world.size, abs=0.1)
