"""State of a sharded model and its optimizer, whole and in parts, and the gradient's norm."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers.compare import assert_close, assert_equal, assert_gradients, refused
from helpers.models import (
    Blocks,
    Nothing,
    TiedBlocks,
    batch_norm,
    batch_of,
    built,
    frozen_blocks,
    in_turn,
    joined_loss,
    new_group,
    own_data,
    own_loss,
    train,
    trained_alone,
)
from helpers.steps import adamw, optimizer_of, sgd, usual_step
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import ShardingStrategy


class Everything(nn.Module):
    """Tied layers, buffers that are saved and not, several dtypes, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.blocks[2] = self.blocks[0]
        self.wide = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(()))
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.last = nn.Linear(5, 6, bias=False)
        self.last.weight = self.embedding.weight
        self.epoch = 0

    def get_extra_state(self) -> int:
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        self.epoch = state


# ---- the model --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@in_turn(
    "case",
    [(Everything, "elements"), (Everything, "parameters"), (TiedBlocks, "elements"), (Nothing, "parameters")],
)
def test_full_state_goes_out_and_in(world, wrap, case):
    make, shard_by = case
    plain, other = built(make), built(make, seed=1)
    other.epoch = 3
    model = wrap(built(make, seed=world.rank), shard_by=shard_by)  # rank 0's values count
    state = model.full_state_dict()
    assert_equal(state, plain.state_dict())
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(7)  # a copy
    assert_equal(model.full_state_dict(rank0_only=True), plain.state_dict() if world.rank == 0 else {})
    model.load_full_state_dict(other.state_dict() if world.rank == 0 else {})
    assert_equal(model.full_state_dict(), other.state_dict())
    assert make is not Everything or model.module.epoch == 3


@pytest.mark.ranks(2)
def test_load_full_state_dict_and_compute(world, model):
    other = built(Blocks, seed=1)
    inputs, _ = batch_of(other, 0)
    model(inputs)
    model.load_full_state_dict(other.state_dict() if world.rank == 0 else {})
    torch.testing.assert_close(model(inputs), other(inputs))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["apart", "replicas"], indirect=True)
def test_a_state_dict_that_does_not_fit(world, wrap):
    model = wrap(built(batch_norm))
    before = model.full_state_dict()
    shapes = {"conv.weight": torch.zeros(4, 2, 3, 4), "norm.running_mean": torch.zeros(5)}
    wrong = (
        {key: value + 1 for key, value in before.items() if key != "head.bias"} | shapes | {"more": torch.ones(1)}
    )
    load = partial(model.load_full_state_dict, wrong if world.rank == 0 else {})
    refused(
        ValueError,
        (load, r"does not fit the model(.|\n)*conv.weight: expected \[4, 2, 3, 3\], got \[4, 2, 3, 4\]"),
        (load, r"norm.running_mean: expected \[4\], got \[5\]"),
        (load, "missing: head.bias"),
        (load, "unexpected: more"),
        (partial(load, strict=False), "wrong shapes"),
    )
    assert_equal(model.full_state_dict(), before)
    some = {"head.weight": torch.full((3, 4), 2.0), "more": torch.zeros(1)} if world.rank == 0 else {}
    model.load_full_state_dict(some, strict=False)
    assert_equal(model.full_state_dict(), {**before, "head.weight": torch.full((3, 4), 2.0)})


@pytest.mark.ranks(2)
@in_turn("shard_by", ["elements", "parameters"])
def test_parts_go_out_and_in(wrap, shard_by):
    model, other = (wrap(built(batch_norm, seed=seed), shard_by=shard_by) for seed in (1, 0))
    parts = copy.deepcopy(model.state_dict())
    other.load_state_dict(parts)
    assert_equal(other.full_state_dict(), built(batch_norm, seed=1).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.* in state_dict: "conv.weight"'):
        other.load_state_dict({key: value for key, value in parts.items() if key != "conv.weight"})


# ---- the optimizer ----------------------------------------------------------------------------------------------


def halves(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("bias")]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": rest, "lr": 5e-3}], lr=1e-2)


WAYS = [
    {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    {"sharding_strategy": ShardingStrategy.FULL_SHARD, "shard_by": "parameters"},
    {"sharding_strategy": ShardingStrategy.NO_SHARD, "units": []},
    {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
]


class Scalars(Blocks):
    """With parameters of one element, with and without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.single + self.one


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("before", "after", "make"),
    [
        pytest.param(0, 1, halves, marks=pytest.mark.real_ranks),
        *[(1, 2, halves), (2, 3, halves), (3, 0, halves)],
        # keeps sums of rows and columns of a matrix, which is whole on one rank
        (1, 1, optimizer_of("Adafactor", lr=0.01)),
    ],
)
def test_going_on_with_another_way_of_sharding(world, monkeypatch, before, after, make):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2" if world.size == 4 else "1")
    with new_group(world) as group:
        model = ax.FSDP(built(Scalars), group, **WAYS[before])
        optimizer = train(model, world, 2, make)
        saved = model.full_state_dict(rank0_only=True), model.full_optimizer_state_dict(optimizer, rank0_only=True)
        assert [bool(each) for each in saved] == [world.rank == 0] * 2
        model = ax.FSDP(built(Scalars, seed=1), group, **WAYS[after])
        optimizer = make(model)
        model.load_full_state_dict(saved[0])
        model.load_full_optimizer_state_dict(optimizer, saved[1])
        for number in (2, 3):
            usual_step(model, optimizer, own_data(model, world, number))
        assert_close(model.full_state_dict(), trained_alone(Scalars, 4, make).state_dict())


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("make", "make_optimizer"),
    [(TiedBlocks, halves), (frozen_blocks, sgd), (TiedBlocks, optimizer_of("Adagrad", lr=0.05))],
)
def test_full_optimizer_state_equals_that_of_one_process(world, make, make_optimizer):
    plain, model = built(make), ax.FSDP(built(make))
    of_plain = make_optimizer(plain)
    for number in range(2):
        usual_step(plain, of_plain, batch_of(plain, number))
    got = model.full_optimizer_state_dict(train(model, world, 2, make_optimizer))
    names = {p: name for name, p in plain.named_parameters()}
    assert set(got["state"]) == {names[p] for p in of_plain.state}
    for parameter, state in of_plain.state.items():
        torch.testing.assert_close(got["state"][names[parameter]], dict(state), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(got["param_groups"], of_plain.param_groups, strict=True):
        assert ours == {**theirs, "params": [names[p] for p in theirs["params"]]}


@pytest.mark.ranks(2)
def test_loading_replaces_the_whole_state_and_shares_nothing(world, usual):
    fresh = usual.full_optimizer_state_dict(adamw(usual))
    optimizer = train(usual, world, 1, adamw)
    saved = usual.full_optimizer_state_dict(optimizer)
    copied = copy.deepcopy(saved)
    usual.load_full_optimizer_state_dict(optimizer, saved)
    usual_step(usual, optimizer, own_data(usual, world, 1))
    assert_equal(saved["state"], copied["state"])
    usual.load_full_optimizer_state_dict(optimizer, fresh)
    assert usual.full_optimizer_state_dict(optimizer)["state"] == {}


@pytest.mark.ranks(2)
def test_optimizers_that_do_not_fit(usual):
    saved, load = usual.full_optimizer_state_dict(adamw(usual)), usual.load_full_optimizer_state_dict
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    refused(
        ValueError,
        (lambda: usual.full_optimizer_state_dict(other), "optimizer: it has parameters that are not of this model"),
        (lambda: load(other, saved), "optimizer: it has parameters that are not of this model"),
        (lambda: load(halves(usual), saved), "state_dict does not fit the optimizer: expected groups of"),
    )


# ---- the norm ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@in_turn("norm_type", [0.5, 1, 2.0, 3, math.inf])
def test_clipping_equals_one_process(world, model, norm_type):
    plain = built(Blocks)
    joined_loss(plain).backward()
    own_loss(model, world).backward()
    for max_norm in (math.inf, 1e6, 0.03, 0.0):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        norm = model.clip_grad_norm(max_norm, norm_type)
        assert (norm.dtype, norm.shape) == (torch.float32, ())
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        assert_gradients(model, plain, 3e-6)


@pytest.mark.ranks(4)
def test_clipping_where_ranks_have_nothing(world):
    model = ax.FSDP(built(lambda: nn.Linear(2, 1)))
    assert float(model.clip_grad_norm(1.0)) == 0.0
    model(torch.tensor([[3.0, 0.0]])).sum().backward()
    assert float(model.clip_grad_norm(1.0, math.inf)) == 3.0
    torch.testing.assert_close(model.clip_grad_norm(9.0), torch.tensor(math.sqrt(1 + 1 / 9)), atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("norm_type", "bad"), [(2, math.nan), (math.inf, math.inf)])
def test_a_gradient_that_is_not_finite_on_one_rank(world, usual, norm_type, bad):
    own_loss(usual, world).backward()
    gradients = [p.grad for p in usual.parameters() if p.grad is not None]
    if world.rank == 0:
        gradients[0].as_subclass(torch.Tensor)[0] = bad
    before = [gradient.clone() for gradient in gradients]
    with pytest.raises(RuntimeError, match=f"the norm of the gradient is {bad}, so it cannot be clipped"):
        usual.clip_grad_norm(1.0, norm_type, error_if_nonfinite=True)
    torch.testing.assert_close(gradients, before, equal_nan=True)
    assert not math.isfinite(usual.clip_grad_norm(1.0, norm_type))
