"""FullyShardedDataParallel against one process on the joined batch: parameters after 20 steps of AdamW."""

from __future__ import annotations

import pytest
import torch
from models import ZOO, assert_close, assert_same_on_all_ranks, built, loss_of, part_of, trained_alone
from sharded import KINDS, STRATEGIES, Blocks, adamw, alone, data_for, new_group, train
from torch import nn

import axonmpi as ax
from axonmpi import ShardingStrategy


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (3, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_equals_one_process(world, strategy, kind, accumulation, clip):
    group = world.default_group
    model = ax.FSDP(built(KINDS[kind]), group, sharding_strategy=strategy)
    train(model, group, accumulation=accumulation, clip=clip)
    state = model.full_state_dict()
    assert_close(state, alone(KINDS[kind], accumulation, clip))
    assert_same_on_all_ranks(world, state)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("kind", "shard_by"), [("blocks", "elements"), ("tied", "elements"), ("frozen", "parameters")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_placement_equals_one_process(world, placement, strategy, kind, shard_by):
    with new_group(world) as group:
        model = ax.FSDP(built(KINDS[kind]), group, sharding_strategy=strategy, shard_by=shard_by)
        train(model, group, accumulation=2, clip=0.05)
        state = model.full_state_dict()
        assert_close(state, alone(KINDS[kind], 2, 0.05))
        assert_same_on_all_ranks(world, state)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_nodes_of_different_size_equal_one_process(world, monkeypatch, strategy):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=strategy)
        train(model, group, accumulation=2)
        assert_close(model.full_state_dict(), alone(Blocks, 2))


@pytest.mark.ranks(4)
def test_an_explicit_pair_of_groups(world):
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = [[world.new_group(ranks) for ranks in side] for side in (rows, columns)]
    shard, replicas = (next(group for group in side if group.contains(world.rank)) for side in groups)
    model = ax.FSDP(built(Blocks), (shard, replicas), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert model.replicate_group is replicas
    train(model, world.default_group, clip=0.05)
    assert_close(model.full_state_dict(), alone(Blocks, 1, 0.05))
    held = sum(part.numel() for part in model.parameters())
    total = sum(value.numel() for value in alone(Blocks, 1, 0.05).values())
    assert total // 2 - 64 <= held <= total // 2 + 64


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
@pytest.mark.parametrize("kind", ZOO)
def test_each_kind_of_model_equals_one_process(world, kind, shard_by):
    group = world.default_group
    model = ax.FSDP(built(ZOO[kind]), group, shard_by=shard_by)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, group, optimizer=optimizer)
    assert_close(model.full_state_dict(), trained_alone(ZOO[kind]))


def rounded_alone(steps: int) -> dict[str, torch.Tensor]:
    """One process that computes in bfloat16 and keeps float32 parameters."""
    master = built(Blocks)
    optimizer = adamw(master.parameters())
    for step in range(steps):
        model = built(Blocks)
        model.load_state_dict(master.state_dict())
        model.bfloat16()
        inputs, targets = data_for(model, step)
        loss_of(model(inputs.bfloat16()).float(), targets).backward()
        for own, computed in zip(master.parameters(), model.parameters(), strict=True):
            own.grad = computed.grad.float()
        optimizer.step()
    return master.state_dict()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_equals_one_process_that_rounds_alike(world, placement, strategy):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=strategy, mixed_precision=True)
        assert {part.dtype for part in model.parameters()} == {torch.float32}
        optimizer = adamw(model.parameters())
        for step in range(10):
            optimizer.zero_grad()
            inputs, targets = part_of(data_for(model.module, step), group.rank, group.size)
            output = model(inputs)
            assert output.dtype is torch.bfloat16
            loss_of(output.float(), targets).backward()
            optimizer.step()
        state = model.full_state_dict()
        exact, rounded = alone(Blocks, steps=10), rounded_alone(10)
        for name, value in state.items():
            # AdamW makes a whole step of a gradient near zero, of either sign: the mean shows what that hides.
            assert (value - rounded[name]).abs().mean() <= 0.004, name
        far = sum(float((rounded[name] - exact[name]).abs().sum()) for name in exact)
        near = sum(float((value - rounded[name]).abs().sum()) for name, value in state.items())
        assert near <= 1.5 * far


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_dtypes_of_gradients(world, param_dtype, reduce_dtype):
    group = world.default_group
    precision = ax.MixedPrecision(param_dtype, reduce_dtype, buffer_dtype=torch.float64)
    model = ax.FSDP(built(BuffersToo), group, mixed_precision=precision)
    assert model.module.norm.running_mean.dtype is torch.float64
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(world.rank))
    loss = model.module.value(model, inputs)
    loss.backward()
    gradients = [part.grad for part in model.parameters() if part.numel()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    is_rounded = all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    assert is_rounded == (reduce_dtype is torch.bfloat16)


class BuffersToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 37)
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    @staticmethod
    def value(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()


class Bonus(nn.Module):
    """A block with a parameter that some ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.bonus = nn.Parameter(torch.ones(5))
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (self.bonus if self.uses else 1.0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_of_a_unit_that_some_ranks_do_not_use_count_as_zero(world, placement, strategy):
    def make() -> nn.Module:
        return nn.Sequential(Bonus(), Bonus(), Bonus(), nn.Linear(5, 3))

    plain = built(make)
    with new_group(world) as group:
        model = ax.FSDP(built(make), group, sharding_strategy=strategy, units=Bonus)
        for rank in range(world.size):
            inputs, targets = part_of(data_for(plain, 0), rank, world.size)
            for place in range(3):
                plain[place].uses = (rank + place) % 2 == 0
            (loss_of(plain(inputs), targets) / world.size).backward()
            if rank == world.rank:
                for place in range(3):
                    model.module[place].uses = plain[place].uses
                loss_of(model(inputs), targets).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        optimizer.step()
        assert_close(model.full_state_dict(), plain.state_dict())
