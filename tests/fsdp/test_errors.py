"""What FullyShardedDataParallel refuses: wrong arguments, models that differ, parameters where they are not."""

import contextlib
import copy
import pickle
import re

import pytest
import torch
from helpers.compare import assert_close, assert_gradients, refused
from helpers.limits import limit
from helpers.models import (
    Blocks,
    MayFail,
    batch_of,
    built,
    frozen_blocks,
    in_turn,
    joined_loss,
    new_group,
    own_data,
    own_loss,
    train,
)
from helpers.steps import adamw, loss_of, usual_step
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import MixedPrecision, ScatteredParameterError, ShardingStrategy
from axonmpi.errors import DtypeError, RankFailedError
from axonmpi.fsdp.unit import LentBuffer, Unit
from axonmpi.testing import run_ranks

# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sharding_strategy": "all"}, ValueError, "sharding_strategy: .*FULL_SHARD .'full'.*, got 'all'"),
        ({"cpu_offload": True}, TypeError, "cpu_offload: expected .* NONE, PARAMS, FULL, got True"),
        ({"shard_by": "rows"}, ValueError, "shard_by: expected 'elements' or 'parameters', got 'rows'"),
        ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision: expected True, False or a Mixed"),
        ({"process_group": 3}, TypeError, "process_group: expected an axonmpi.ProcessGroup or None, got int"),
        ({"process_group": (1, 2)}, TypeError, "process_group: a pair of groups is for .*HYBRID_SHARD alone"),
        ({"units": 3}, TypeError, "units: expected module classes, names .* or functions .*, got 3"),
        ({"units": ["blocks.*", 3]}, TypeError, "units: expected .* got 3"),
        ({"units": int}, TypeError, "units: expected .* got <class 'int'>"),
        ({"units": "block"}, ValueError, "units: 'block' matches no submodule with parameters; there are 'first'"),
        ({"units": [nn.LSTM]}, ValueError, "units: .*LSTM.* matches no submodule with parameters; .* more$"),
        ({"units": nn.GELU}, ValueError, "units: .*GELU.* matches no submodule with parameters"),
    ],
)
def test_wrong_options(world, options, error, message):
    refused(error, (lambda: ax.FSDP(built(Blocks), **options), message))


@pytest.mark.ranks(2)
def test_groups_that_cannot_be(world):
    group, first = world.default_group, world.new_group([0])
    for pair in [(group,), (group, group, group), (group, 3)]:
        with pytest.raises(TypeError, match="process_group"):
            ax.FSDP(built(Blocks), pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    if world.rank == 1:
        refused(ValueError, (lambda: ax.FSDP(built(Blocks), first), "rank 1"))


@pytest.mark.ranks(3)
def test_replicas_on_nodes_of_different_size(world, monkeypatch):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    with new_group(world) as group, pytest.raises(ValueError, match=r"as many ranks on each node, got \[2, 1\]"):
        ax.FSDP(built(Blocks), group, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_dtypes_that_do_not_fit(field):
    with pytest.raises(DtypeError, match=rf"{field}: expected torch.bfloat16, .* or None, got torch.int32"):
        MixedPrecision(**{field: torch.int32})


@pytest.mark.ranks(2)
def test_modules_that_cannot_be_wrapped(usual):
    refused(TypeError, (lambda: ax.FSDP(F.relu), "module: expected a torch.nn.Module, got function"))
    empty, inner = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, affine=False)), nn.Sequential(nn.Linear(2, 2), usual)
    refused(
        ValueError,
        (lambda: ax.FSDP(empty), "module: it has no parameters, so there is nothing to shard"),
        (lambda: ax.FSDP(nn.LazyLinear(3)), "'weight' has no shape yet: run one forward before"),
        (lambda: ax.FSDP(usual), "module: it is wrapped in FullyShardedDataParallel already"),
        (lambda: ax.FSDP(inner), "module: 1 is wrapped in FullyShardedDataParallel already"),
    )


# ---- ranks that differ ------------------------------------------------------------------------------------------


OTHERS = {
    "deeper": (lambda: Blocks(5), {}, r"'units'.*blocks.4"),
    "wider": (lambda: Blocks(4, 16), {}, r"'scale'.*\[16\]"),
    "dtype": (lambda: Blocks().double(), {}, r"float64"),
    "frozen": (frozen_blocks, {}, r"first.weight.*frozen"),
    "strategy": (Blocks, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, r"'sharding_strategy'.*SHARD_GRAD"),
    "replicas": (
        Blocks,
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        r"'sharding_strategy'.*HYBRID_SHARD",
    ),
    "no_shard": (Blocks, {"sharding_strategy": ShardingStrategy.NO_SHARD}, r"'sharding_strategy'.*NO_SHARD"),
    "precision": (Blocks, {"mixed_precision": True}, r"'mixed_precision'.*bfloat16"),
    "shard_by": (Blocks, {"shard_by": "parameters"}, r"'shard_by'.*parameters"),
    "units": (Blocks, {"units": "blocks.1"}, r"'units'.*blocks.1"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "other",
    [pytest.param(name, marks=[pytest.mark.real_ranks] * (name == "replicas")) for name in OTHERS],
)
def test_ranks_that_differ_are_named(world, other):
    make, options, message = OTHERS[other]
    make, options = (make, options) if world.rank == 1 else (Blocks, {})
    with pytest.raises(ValueError, match="not the same on all ranks") as caught:
        ax.FSDP(built(make), **options)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value
    assert re.search(r"ranks 0, 2: .*rank 1: ", str(caught.value), re.DOTALL)


# ---- changes of the model after wrapping ------------------------------------------------------------------------


CHANGES = {
    "replaced": (
        lambda model: setattr(model.first, "weight", nn.Parameter(torch.ones(12, 5))),
        r"replaced or changed after wrapping: .*got torch.float32 \[12, 5\]",
    ),
    "removed": (
        lambda model: model.first.register_parameter("weight", None),
        r"replaced or changed after wrapping: .*got nothing",
    ),
    "added": (
        lambda model: setattr(model, "head", nn.Linear(12, 3)),
        r"was added after wrapping: .*not sharded",
    ),
    "converted": (
        lambda model: model.double(),
        r"changed in shape or dtype after wrapping: .*expected .*torch.float32.*got torch.float64",
    ),
    "unfrozen": (
        lambda model: model.first.weight.requires_grad_(True),
        r"was frozen when the model was wrapped",
    ),
}


@pytest.mark.ranks(2)
@in_turn("change", CHANGES)
def test_parameters_that_were_changed(world, wrap, change):
    model, (make_change, message) = wrap(built(frozen_blocks)), CHANGES[change]
    inputs, targets = own_data(model, world)
    usual_step(model, adamw(model), (inputs, targets))
    make_change(model.module)
    refused(ValueError, (lambda: model(inputs), f"parameter '(first.weight|scale|head.weight)' .*{message}"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_forward", [True, False])
def test_values_that_were_put_elsewhere_are_taken(model, in_forward):
    plain = built(Blocks)
    for module in (model, plain):
        for part in module.parameters():
            part.data = part.data * 0.5
    inputs, _ = batch_of(plain, 0)
    if in_forward:
        torch.testing.assert_close(model(inputs), plain(inputs))
    assert_close(model.full_state_dict(), plain.state_dict(), 0.0)


@pytest.mark.ranks(1)
def test_copies(usual):
    sharded = r"sharded module cannot be copied or pickled: .*full_state_dict\(\)"
    refused(
        TypeError,
        (lambda: copy.deepcopy(usual), "cannot be copied: wrap a copy of the model instead"),
        (lambda: pickle.dumps(usual), r"cannot be pickled: save its .full_state_dict\(\) instead"),
        (lambda: copy.deepcopy(usual.module), sharded),
        (lambda: pickle.dumps(usual.module.first), sharded),
    )


# ---- parameters that are not gathered ---------------------------------------------------------------------------


class Borrows(Blocks):
    """Multiplies with the matrix of a block, which is no parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.blocks[1].up.weight[:3, :3])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart", "kept"], indirect=True)
def test_parameters_outside_of_the_forward_of_their_unit(wrap):
    model = wrap(built(Borrows))
    inputs, _ = batch_of(model.module, 0)
    with pytest.raises(ScatteredParameterError, match=r"'blocks.1.up.weight' belongs to unit 'blocks.1' and was"):
        model(inputs)
    model = wrap(built(Borrows), units=[])
    torch.testing.assert_close(model(inputs), built(Borrows)(inputs))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart", "kept"], indirect=True)
def test_submodules_called_by_themselves(model):
    plain = built(Blocks)
    first, up = model.module.first, model.module.blocks[1].up
    refused(
        ScatteredParameterError,
        (lambda: first(torch.ones(2, 5)), "belongs to .*the outermost unit and was used outside"),
        (lambda: up(torch.ones(2, 12)), "belongs to .*'blocks.1' and was used outside"),
    )
    got, _ = model.module.blocks[1](torch.ones(2, 12))  # a unit is gathered
    torch.testing.assert_close(got, plain.blocks[1](torch.ones(2, 12))[0])
    inputs, _ = batch_of(plain, 0)
    torch.testing.assert_close(model.module(inputs), plain(inputs))


def test_units_that_are_needed_at_the_same_time():
    lent = LentBuffer(torch.empty(0))
    first, second = (Unit(name, nn.Identity(), [], lent) for name in ("blocks.0", "blocks.2"))
    first.gather()
    second.gather()
    second.active = 1
    refused(ValueError, (first.gather, r"units 'blocks.2' and 'blocks.0' are needed at the same time"))


class Remembers(nn.Module):
    """A block that hands on a tensor without returning it."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8).requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        output = torch.tanh(self.linear(x))
        self.kept = self.side(output).square()
        return output


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trains", [True, False])
def test_what_reaches_the_loss_without_being_returned(world, wrap, trains):
    """Wrong gradients are never taken for right ones."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), *(Remembers(trains) for _ in range(4)), nn.Linear(8, 3))

    def aside(module: nn.Module) -> Tensor:
        return torch.stack([block.kept.mean() for block in module[1:5]]).sum()

    plain, model = built(make), wrap(built(make), units=Remembers)
    (joined_loss(plain) + aside(plain)).backward()
    loss = own_loss(model, world) + aside(model.module)
    takes_turns = model.needs_whole_backward and model.sharding_strategy is ShardingStrategy.FULL_SHARD
    message = "reaches the loss other than through what it|modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message) if takes_turns else contextlib.nullcontext():
        loss.backward()
    if not takes_turns:
        assert_gradients(model, plain)


# ---- order ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_step_between_forward_and_backward(world, model):
    optimizer = train(model, world, 1, adamw)
    loss = own_loss(model, world)
    optimizer.step()
    refused(RuntimeError, (loss.backward, r"modified by an inplace|changed between forward and"))


@pytest.mark.ranks(1)
def test_estimates_of_worlds_that_cannot_be(usual):
    estimate, message = usual.memory_estimate, r"world_size: expected at least 1"
    refused(
        ValueError,
        (lambda: estimate(world_size=0), message),
        (lambda: estimate(world_size=-4), message),
        (lambda: estimate(world_size=6, ranks_per_node=4), "world_size: expected a multiple of ranks_per_node"),
    )


# ---- exceptions -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@in_turn("place", ["forward", "backward"])
def test_training_goes_on_after_an_exception_on_all_ranks(world, wrap, place):
    plain, model = built(MayFail), wrap(built(MayFail))
    for _ in range(2):
        model.module.fails = place
        refused(ArithmeticError, (lambda: own_loss(model, world).backward(), "in the middle"))
        model.module.fails = ""
        for module, (inputs, targets) in ((model, own_data(model, world)), (plain, batch_of(plain, 0))):
            module.zero_grad()
            loss_of(module(inputs), targets).backward()
        assert_gradients(model, plain)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_on_one_rank_releases_the_others(monkeypatch, place, strategy):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1" if place == "forward" else "")
    released = []

    def step(world: ax.World) -> None:
        model = ax.FSDP(built(MayFail), sharding_strategy=strategy)
        model.module.fails = place if world.rank == 1 else ""
        try:
            usual_step(model, adamw(model), own_data(model, world))
            world.default_group.barrier()
        except RankFailedError:
            released.append(world.rank)
            raise

    refused(ArithmeticError, (lambda: run_ranks(3, step, timeout=limit(30)), "in the middle"))
    assert sorted(released) == [0, 2]
