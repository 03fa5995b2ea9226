"""State of a sharded model and its optimizer, whole and in parts, and the gradient's norm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from alongside import adamw_of, usual_step
from models import BatchNormalised, Nothing, assert_close, built, loss_of, part_of
from sharded import KINDS, Blocks, TiedBlocks, data_for, new_group
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


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Say whether names, their order, dtypes and all bits are the same."""
    return list(got) == list(expected) and all(
        torch.equal(value, got[key]) and value.dtype == got[key].dtype
        if isinstance(value, Tensor)
        else value == got[key]
        for key, value in expected.items()
    )


# ---- the model --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "shard_by"),
    [(Everything, "elements"), (Everything, "parameters"), (TiedBlocks, "elements"), (Nothing, "parameters")],
)
def test_full_state_dict_equals_that_of_the_model(world, setting, make, shard_by):
    with new_group(world) as group:
        plain = built(make)
        model = ax.FSDP(built(make), group, sharding_strategy=setting, shard_by=shard_by)
        assert same(model.full_state_dict(), plain.state_dict())
        on_first = model.full_state_dict(rank0_only=True)
        assert same(on_first, plain.state_dict()) if group.rank == 0 else on_first == {}
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


@pytest.mark.ranks(4)
def test_full_state_dict_on_the_first_of_all_replicas(world, monkeypatch):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        on_first = model.full_state_dict(rank0_only=True)
        assert same(on_first, built(Blocks).state_dict()) if group.rank == 0 else on_first == {}


@pytest.mark.ranks(2)
def test_full_state_dict_is_a_copy(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        for value in model.full_state_dict().values():
            value.fill_(7)
        assert same(model.full_state_dict(), built(Blocks).state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Everything, TiedBlocks])
def test_load_full_state_dict(world, setting, make):
    with new_group(world) as group:
        other = built(make, seed=1)
        other.epoch = 3
        model = ax.FSDP(built(make), group, sharding_strategy=setting)
        model.load_full_state_dict(other.state_dict() if group.rank == 0 else {})
        assert same(model.full_state_dict(), other.state_dict())
        assert make is TiedBlocks or model.module.epoch == 3


@pytest.mark.ranks(2)
def test_load_full_state_dict_and_compute(world, setting):
    with new_group(world) as group:
        other = built(Blocks, seed=1)
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        inputs, _ = data_for(other, 0)
        model(inputs)
        model.load_full_state_dict(other.state_dict() if group.rank == 0 else {})
        torch.testing.assert_close(model(inputs), other(inputs))
        assert same(model.full_state_dict(), other.state_dict())


@pytest.mark.ranks(2)
def test_a_state_dict_that_does_not_fit(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(BatchNormalised), group, sharding_strategy=setting)
        before = model.full_state_dict()
        wrong = {key: value + 1 for key, value in before.items()}
        wrong["conv.weight"] = torch.zeros(4, 2, 3, 4)
        wrong["norm.running_mean"] = torch.zeros(5)
        wrong["more"] = wrong.pop("head.bias")
        with pytest.raises(ValueError, match="state_dict does not fit the model") as caught:
            model.load_full_state_dict(wrong if group.rank == 0 else {})
        for text in (
            "conv.weight: expected [4, 2, 3, 3], got [4, 2, 3, 4]",
            "norm.running_mean: expected [4], got [5]",
            "missing: head.bias",
            "unexpected: more",
        ):
            assert text in str(caught.value)
        with pytest.raises(ValueError, match="wrong shapes"):
            model.load_full_state_dict(wrong if group.rank == 0 else {}, strict=False)
        assert same(model.full_state_dict(), before)


@pytest.mark.ranks(2)
def test_a_state_dict_of_some_of_the_model(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        given = {"head.weight": torch.full((3, 12), 2.0), "more": torch.zeros(1)} if group.rank == 0 else {}
        model.load_full_state_dict(given, strict=False)
        expected = built(Blocks).state_dict()
        expected["head.weight"].fill_(2)
        assert same(model.full_state_dict(), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_parts_go_out_and_in(world, setting, shard_by):
    with new_group(world) as group:
        options = {"sharding_strategy": setting, "shard_by": shard_by}
        model = ax.FSDP(built(BatchNormalised, seed=1), group, **options)
        parts = copy.deepcopy(model.state_dict())
        assert list(parts) == list(built(BatchNormalised).state_dict())
        other = ax.FSDP(built(BatchNormalised), group, **options)
        other.load_state_dict(parts)
        assert same(other.full_state_dict(), built(BatchNormalised, seed=1).state_dict())
        with pytest.raises(RuntimeError, match=r'Missing key.* in state_dict: "conv.weight"'):
            other.load_state_dict({key: value for key, value in parts.items() if key != "conv.weight"})


# ---- the optimizer ----------------------------------------------------------------------------------------------


def halves(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("bias")]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": rest, "lr": 5e-3}], lr=1e-2)


OPTIMIZERS = {
    "adamw": halves,
    "momentum": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad([p for p in m.parameters() if p.requires_grad], lr=0.05),
    "adafactor": lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.requires_grad], lr=0.01),
}

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


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers, rank: int = 0, size: int = 1) -> None:
    inner = model.module if isinstance(model, ax.FSDP) else model
    for number in numbers:
        usual_step(model, optimizer, part_of(data_for(inner, number), rank, size))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 1), (1, 2), (2, 3), (3, 1), (3, 0)])
def test_going_on_with_another_way_of_sharding(world, monkeypatch, before, after):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2" if world.size == 4 else "1")
    plain = built(Scalars)
    optimizer = halves(plain)
    steps(plain, optimizer, range(5))
    with new_group(world) as group:
        model = ax.FSDP(built(Scalars), group, **WAYS[before])
        optimizer = halves(model)
        steps(model, optimizer, range(3), group.rank, group.size)
        saved = model.full_state_dict(rank0_only=True), model.full_optimizer_state_dict(optimizer, rank0_only=True)
        assert bool(saved[1]) == (group.rank == 0)
        model = ax.FSDP(built(Scalars, seed=1), group, **WAYS[after])
        optimizer = halves(model)
        model.load_full_state_dict(saved[0])
        model.load_full_optimizer_state_dict(optimizer, saved[1])
        steps(model, optimizer, range(3, 5), group.rank, group.size)
        assert_close(model.full_state_dict(), plain.state_dict())


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", ["tied", "frozen"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_full_optimizer_state_equals_that_of_one_process(world, name, kind):
    plain = built(KINDS[kind])
    of_plain = OPTIMIZERS[name](plain)
    steps(plain, of_plain, range(3))
    model = ax.FSDP(built(KINDS[kind]), world.default_group)
    optimizer = OPTIMIZERS[name](model)
    steps(model, optimizer, range(3), world.rank, world.size)
    got = model.full_optimizer_state_dict(optimizer)
    names = {id(p): name for name, p in plain.named_parameters()}
    assert set(got["state"]) == {names[id(p)] for p in of_plain.state}
    for parameter, state in of_plain.state.items():
        own = got["state"][names[id(parameter)]]
        assert set(own) == set(state)
        for key, value in state.items():
            torch.testing.assert_close(own[key], value, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(got["param_groups"], of_plain.param_groups, strict=True):
        assert ours["params"] == [names[id(p)] for p in theirs["params"]]
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


@pytest.mark.ranks(1, 4)
def test_state_that_is_not_shaped_like_the_parameter(world):
    """Adafactor keeps sums of rows and columns of a matrix, which is whole on one rank."""
    plain = built(Blocks)
    optimizer = OPTIMIZERS["adafactor"](plain)
    steps(plain, optimizer, range(4))
    saved = None
    for number in (0, 2):
        model = ax.FSDP(built(Blocks), world.default_group, shard_by="parameters")
        optimizer = OPTIMIZERS["adafactor"](model)
        if saved is not None:
            model.load_full_state_dict(saved[0])
            model.load_full_optimizer_state_dict(optimizer, saved[1])
        steps(model, optimizer, range(number, number + 2), world.rank, world.size)
        saved = copy.deepcopy((model.full_state_dict(), model.full_optimizer_state_dict(optimizer)))
    assert_close(model.full_state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
def test_loading_replaces_the_whole_state_and_shares_nothing(world):
    model = ax.FSDP(built(Blocks))
    optimizer = adamw_of(model)
    fresh = model.full_optimizer_state_dict(optimizer)
    steps(model, optimizer, range(2), world.rank, world.size)
    saved = model.full_optimizer_state_dict(optimizer)
    copied = copy.deepcopy(saved)
    model.load_full_optimizer_state_dict(optimizer, saved)
    steps(model, optimizer, range(2), world.rank, world.size)
    for name, state in copied["state"].items():
        assert same(saved["state"][name], state), name
    model.load_full_optimizer_state_dict(optimizer, fresh)
    assert model.full_optimizer_state_dict(optimizer)["state"] == {}


@pytest.mark.ranks(1, 2)
def test_optimizers_that_do_not_fit(world):
    model = ax.FSDP(built(Blocks))
    with pytest.raises(ValueError, match="optimizer: it has parameters that are not of this model"):
        model.full_optimizer_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    saved = model.full_optimizer_state_dict(adamw_of(model))
    with pytest.raises(ValueError, match="optimizer: it has parameters that are not of this model"):
        model.load_full_optimizer_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), saved)
    with pytest.raises(ValueError, match="state_dict does not fit the optimizer: expected groups of"):
        model.load_full_optimizer_state_dict(halves(model), saved)


# ---- the norm ---------------------------------------------------------------------------------------------------


def both_with_gradients(group: ax.ProcessGroup, strategy: ShardingStrategy, scale: float = 1.0):
    plain = built(Blocks)
    model = ax.FSDP(built(Blocks), group, sharding_strategy=strategy)
    for module, rank, size in ((plain, 0, 1), (model, group.rank, group.size)):
        inputs, targets = part_of(data_for(plain, 0), rank, size)
        (loss_of(module(inputs), targets) * scale).backward()
    return model, plain


def joined(model: ax.FSDP) -> Tensor:
    """All gradients of all ranks that share them out, in some order."""
    own = [part.grad.flatten() for part in model.parameters() if part.grad is not None]
    everywhere = model.process_group.all_gather_object(torch.cat(own) if own else torch.zeros(0))
    return torch.cat(everywhere).sort().values


def in_order(plain: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in plain.parameters()]).sort().values


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [0.5, 1, 2.0, 3, math.inf])
def test_clipping_equals_one_process(world, setting, norm_type):
    with new_group(world) as group:
        model, plain = both_with_gradients(group, setting)
        for max_norm in (math.inf, 1e6, 0.03, 0.0):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            norm = model.clip_grad_norm(max_norm, norm_type)
            assert norm.dtype is torch.float32
            assert norm.shape == ()
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(joined(model), in_order(plain), rtol=1e-4, atol=1e-7)


@pytest.mark.ranks(4)
def test_clipping_where_ranks_have_nothing(world):
    model = ax.FSDP(built(lambda: nn.Linear(2, 1)))
    assert float(model.clip_grad_norm(1.0)) == 0.0
    model(torch.tensor([[3.0, 0.0]])).sum().backward()
    assert float(model.clip_grad_norm(1.0, math.inf)) == 3.0
    torch.testing.assert_close(model.clip_grad_norm(9.0), torch.tensor(math.sqrt(1 + 1 / 9)), atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank(world, norm_type, bad):
    model, plain = both_with_gradients(world.default_group, ShardingStrategy.FULL_SHARD)
    name, part = next((name, p) for name, p in model.named_parameters() if p.numel())
    name = world.default_group.broadcast_object(name)
    if world.rank == 0:
        part.grad[0] = bad
    dict(plain.named_parameters())[name].grad.view(-1)[0] = bad
    before = joined(model)
    with pytest.raises(RuntimeError, match=f"the norm of the gradient is {bad}, so it cannot be clipped"):
        model.clip_grad_norm(1.0, norm_type, error_if_nonfinite=True)
    torch.testing.assert_close(joined(model), before, equal_nan=True)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    torch.testing.assert_close(model.clip_grad_norm(1.0, norm_type), expected, equal_nan=True)
    torch.testing.assert_close(joined(model), in_order(plain), equal_nan=True)


@pytest.mark.ranks(1, 2)
def test_norms_that_cannot_be(world):
    model = ax.FSDP(built(Blocks))
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm: expected 0 or more, got"):
            model.clip_grad_norm(bad)
    for bad in (0, -2, math.nan, -math.inf):
        with pytest.raises(ValueError, match="norm_type: expected a positive number or infinity, got"):
            model.clip_grad_norm(1.0, bad)
