"""FullyShardedDataParallel against one process on the joined batch."""

import copy

import pytest
import torch
from helpers.compare import assert_gradients
from helpers.models import (
    STRATEGIES,
    ZOO,
    Blocks,
    Residual,
    TiedBlocks,
    batch_of,
    built,
    equals_alone,
    frozen_blocks,
    part_of,
)
from helpers.settings import all_pairs
from helpers.steps import accumulating_step, loss_of, sgd, usual_step
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import ShardingStrategy

ROWS = all_pairs(
    sharding_strategy=STRATEGIES,
    units=[None, [], [Residual, nn.Linear], lambda name, _: name not in ("blocks.0", "blocks.1.up")],
    ranks_per_node=["", "2", "1"],
    make=[Blocks, TiedBlocks, frozen_blocks],
    cpu_offload=list(ax.CPUOffload),
    shard_by=["elements", "parameters"],
    step=[usual_step, accumulating_step],
    overlaps=[True, False],
)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=[pytest.mark.real_ranks] * (number < 3),
            id=f"{number}-{'beside' if row['overlaps'] else 'in order'}",
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_each_pair_of_settings_equals_one_process(world, monkeypatch, shared_tmp_path, row):
    options = {**row, "offload_folder": shared_tmp_path}
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", options.pop("ranks_per_node"))
    equals_alone(world, **options)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_odd_numbers_of_ranks_equal_one_process(world, monkeypatch, strategy):
    """Three are on nodes of different size, where replicas need not be."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1" if strategy is ShardingStrategy.HYBRID_SHARD else "2")
    equals_alone(world, Blocks, accumulating_step, sharding_strategy=strategy)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("setting", "shard_by"), [("one_node", "elements"), ("apart", "parameters")], indirect=["setting"]
)
@pytest.mark.parametrize("kind", ZOO)
def test_each_kind_of_model_equals_one_process(world, setting, kind, shard_by):
    equals_alone(world, ZOO[kind], sharding_strategy=setting, shard_by=shard_by)


@pytest.mark.ranks(4)
def test_an_explicit_pair_of_groups(world):
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = [[world.new_group(ranks) for ranks in side] for side in (rows, columns)]
    shard, replicas = (next(group for group in side if group.contains(world.rank)) for side in groups)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(model, ax.FSDP):
            assert (model.process_group, model.replicate_group) == (shard, replicas)
            held, total = (sum(p.numel() for p in each.parameters()) for each in (model, Blocks()))
            assert total // 2 - 64 <= held <= total // 2 + 64
        return sgd(model)

    options = {"process_group": (shard, replicas), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    equals_alone(world, Blocks, accumulating_step, optimizer_of, **options)


# ---- mixed precision --------------------------------------------------------------------------------------------


def rounding_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Compute in bfloat16, and step with float32 parameters."""
    optimizer.zero_grad()
    inputs, targets = batch
    computing = model if isinstance(model, ax.FSDP) else copy.deepcopy(model).bfloat16()
    output = computing(inputs if computing is model else inputs.bfloat16())
    assert output.dtype is torch.bfloat16
    loss_of(output.float(), targets).backward()
    for own, computed in zip(model.parameters(), computing.parameters(), strict=True):
        assert own.dtype is torch.float32
        own.grad = computed.grad if own is computed else computed.grad.float()
    optimizer.step()


@pytest.mark.ranks(2)
def test_bfloat16_equals_one_process_that_rounds_alike(world, setting):
    options = {"mixed_precision": True, "sharding_strategy": setting}
    equals_alone(world, Blocks, rounding_step, steps=4, tolerance=2e-3, **options)


def with_buffer() -> nn.Module:
    layer = nn.Linear(6, 37)
    layer.register_buffer("shift", torch.zeros(2))
    return layer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_dtypes_of_gradients(world, param_dtype, reduce_dtype):
    precision = ax.MixedPrecision(param_dtype, reduce_dtype, buffer_dtype=torch.float64)
    model = ax.FSDP(built(with_buffer), mixed_precision=precision)
    assert model.module.shift.dtype is torch.float64
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(world.rank))
    model(inputs).float().square().mean().backward()
    gradients = [part.grad for part in model.parameters() if part.numel()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    is_rounded = all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    assert is_rounded == (reduce_dtype is torch.bfloat16)


# ---- what some ranks do not use ---------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """A block that ranks leave out, or a parameter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.bonus = nn.Parameter(torch.ones(5))
        self.uses = "all"

    def forward(self, x: Tensor) -> Tensor:
        if self.uses == "none":
            return x
        return torch.tanh(self.linear(x)) * (self.bonus if self.uses == "all" else 1.0)


@pytest.mark.ranks(3)
def test_what_some_ranks_do_not_use_counts_as_zero(world, wrap):
    """Units that are gathered, by all ranks together, have to be called by all."""

    def make() -> nn.Module:
        return nn.Sequential(Sometimes(), Sometimes(), Sometimes(), nn.Linear(5, 3))

    plain, model = built(make), wrap(built(make), units=Sometimes)
    uses = ["all", "part", "all" if model.needs_whole_backward else "none"]
    for rank in range(world.size):
        inputs, targets = part_of(batch_of(plain, 0), rank, world.size)
        for module, count in ((plain, world.size), (model.module, 1))[: 1 + (rank == world.rank)]:
            for place in range(3):
                module[place].uses = uses[(rank + place) % 3 if place < 2 else (2 if rank == 1 else 0)]
            (loss_of((plain if module is plain else model)(inputs), targets) / count).backward()
    assert_gradients(model, plain)
