"""What FullyShardedDataParallel refuses: wrong arguments, models that differ, parameters where they are not."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from alongside import adamw_of, assert_gradients, usual_step
from models import built, loss_of, part_of
from sharded import Blocks, data_for, new_group
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import MixedPrecision, ShardingStrategy
from axonmpi.errors import DtypeError, RankFailedError
from axonmpi.fsdp import ScatteredParameterError
from axonmpi.testing import run_ranks

# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sharding_strategy": "all"},
            ValueError,
            "sharding_strategy: .*FULL_SHARD .'full'.*, got 'all'",
        ),
        (
            {"cpu_offload": True},
            TypeError,
            "cpu_offload: expected .* NONE, PARAMS, FULL, got True",
        ),
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
    with pytest.raises(error, match=message):
        ax.FSDP(built(Blocks), **options)


@pytest.mark.ranks(2)
def test_wrong_pairs_of_groups(world):
    group = world.default_group
    for pair in [(group,), (group, group, group), (group, 3)]:
        with pytest.raises(TypeError, match="process_group"):
            ax.FSDP(built(Blocks), pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.ranks(2)
def test_a_rank_outside_the_group(world):
    group = world.new_group([0])
    if world.rank == 0:
        ax.FSDP(built(Blocks), group)
    else:
        with pytest.raises(ValueError, match="rank 1"):
            ax.FSDP(built(Blocks), group)


@pytest.mark.ranks(3)
def test_replicas_on_nodes_of_different_size(world, monkeypatch):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    with new_group(world) as group, pytest.raises(ValueError, match=r"as many ranks on each node, got \[2, 1\]"):
        ax.FSDP(built(Blocks), group, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_dtypes_that_do_not_fit(field):
    with pytest.raises(DtypeError, match=rf"{field}: expected torch.bfloat16, .* or None, got torch.int32"):
        MixedPrecision(**{field: torch.int32})


@pytest.mark.ranks(1, 2)
def test_modules_that_cannot_be_wrapped(world):
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module, got function"):
        ax.FSDP(F.relu)
    with pytest.raises(ValueError, match="module: it has no parameters, so there is nothing to shard"):
        ax.FSDP(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, affine=False)))
    with pytest.raises(ValueError, match=r"'weight' has no shape yet: run one forward before"):
        ax.FSDP(nn.LazyLinear(3))
    model = ax.FSDP(built(Blocks))
    with pytest.raises(ValueError, match="module: it is wrapped in FullyShardedDataParallel already"):
        ax.FSDP(model)
    with pytest.raises(ValueError, match="module: 1 is wrapped in FullyShardedDataParallel already"):
        ax.FSDP(nn.Sequential(nn.Linear(2, 2), model))


# ---- ranks that differ ------------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    model = Blocks()
    model.head.bias.requires_grad_(False)
    return model


OTHERS = {
    "deeper": (lambda: Blocks(5), {}, r"'units'.*blocks.4"),
    "wider": (lambda: Blocks(4, 16), {}, r"'scale'.*\[16\]"),
    "dtype": (lambda: Blocks().double(), {}, r"float64"),
    "frozen": (frozen, {}, r"head.bias.*frozen"),
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
@pytest.mark.parametrize("other", OTHERS)
def test_ranks_that_differ_are_named(world, other):
    make, options, message = OTHERS[other]
    make, options = (make, options) if world.rank == 1 else (Blocks, {})
    with pytest.raises(ValueError, match="not the same on all ranks") as caught:
        ax.FSDP(built(make), **options)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value
    assert re.search(r"ranks 0, 2: .*rank 1: ", str(caught.value), re.DOTALL)


# ---- changes of the model after wrapping ------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_an_optimizer_of_before_wrapping(world):
    plain = built(Blocks)
    optimizer = adamw_of(plain)
    model = ax.FSDP(plain)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="this optimizer has parameter 'scale' as it was before the model was"):
        optimizer.step()
    usual_step(model, adamw_of(model), part_of(data_for(plain, 0), world.rank, world.size))


def replace(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.ones(12, 5))


def remove(model: nn.Module) -> None:
    model.first.register_parameter("weight", None)


def reshape(model: nn.Module) -> None:
    model.first.weight.data = model.first.weight.data.reshape(-1)


def convert(model: nn.Module) -> None:
    model.double()


def unfreeze(model: nn.Module) -> None:
    model.first.weight.requires_grad_(True)


CHANGES = {
    replace: r"replaced or changed after wrapping: .*got torch.float32 \[12, 5\]",
    remove: r"replaced or changed after wrapping: .*got nothing",
    reshape: r"changed in shape or dtype after wrapping: .*got torch.float32 \[\d+\]",
    convert: r"changed in shape or dtype after wrapping: .*expected .*torch.float32.*got torch.float64",
    unfreeze: r"was frozen when the model was wrapped",
}


def first_frozen() -> nn.Module:
    model = Blocks()
    model.first.weight.requires_grad_(False)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parameters_that_were_changed(world, setting, change):
    with new_group(world) as group:
        model = ax.FSDP(built(first_frozen), group, sharding_strategy=setting)
        inputs, targets = part_of(data_for(model.module, 0), group.rank, group.size)
        usual_step(model, adamw_of(model), (inputs, targets))
        change(model.module)
        with pytest.raises(ValueError, match=f"parameter '(first.weight|scale)' .*{CHANGES[change]}"):
            model(inputs)


@pytest.mark.ranks(2)
def test_values_that_were_put_elsewhere_are_taken(world, setting):
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        for module in (model, plain):
            for part in module.parameters():
                part.data = part.data * 0.5
        inputs, _ = data_for(plain, 0)
        torch.testing.assert_close(model(inputs), plain(inputs))


@pytest.mark.ranks(1, 2)
def test_copies(world):
    model = ax.FSDP(built(Blocks))
    with pytest.raises(TypeError, match="cannot be copied: wrap a copy of the model instead"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"cannot be pickled: save its .full_state_dict\(\) instead"):
        pickle.dumps(model)
    for function in (copy.deepcopy, pickle.dumps):
        for module in (model.module, model.module.first):
            with pytest.raises(
                TypeError, match=r"sharded module cannot be copied or pickled: .*full_state_dict\(\)"
            ):
                function(module)


# ---- parameters that are not gathered ---------------------------------------------------------------------------


class Borrows(Blocks):
    """Multiplies with the matrix of a block, which is no parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.blocks[1].up.weight[:3, :3])


@pytest.mark.ranks(2)
def test_parameters_outside_of_the_forward_of_their_unit(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Borrows), group, sharding_strategy=setting)
        inputs, _ = data_for(model.module, 0)
        with pytest.raises(
            ScatteredParameterError, match=r"'blocks.1.up.weight' belongs to unit 'blocks.1' and was"
        ):
            model(inputs)
        model = ax.FSDP(built(Borrows), group, sharding_strategy=setting, units=[])
        torch.testing.assert_close(model(inputs), built(Borrows)(inputs))


@pytest.mark.ranks(2)
def test_submodules_called_by_themselves(world, setting):
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        for module, unit in [(model.module.first, "the outermost unit"), (model.module.blocks[1].up, "'blocks.1'")]:
            with pytest.raises(ScatteredParameterError, match=rf"belongs to .*{unit} and was used outside"):
                module(torch.ones(2, module.in_features))
        got, _ = model.module.blocks[1](torch.ones(2, 12))  # a unit is gathered
        torch.testing.assert_close(got, plain.blocks[1](torch.ones(2, 12))[0])
        inputs, _ = data_for(plain, 0)
        torch.testing.assert_close(model.module(inputs), plain(inputs))


class Entangled(nn.Module):
    """The first block calls the last one, which is no submodule of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5)) for _ in range(3))
        hidden = [self.blocks[2]]
        self.blocks[0].register_forward_hook(lambda module, args, output: hidden[0](output))
        self.blocks[0][0].register_forward_hook(lambda module, args, output: hidden[0](output))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.ranks(2)
def test_units_that_are_needed_at_the_same_time(world, apart):
    with new_group(world) as group:
        model = ax.FSDP(built(Entangled), group)
        with pytest.raises(ValueError, match=r"units 'blocks.0' and 'blocks.2' are needed at the same time"):
            model(torch.ones(2, 5))


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


class Forgetful(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Remembers(trains) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def aside(self) -> Tensor:
        return torch.stack([block.kept.mean() for block in self.blocks]).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trains", [True, False])
def test_what_reaches_the_loss_without_being_returned(world, setting, trains):
    """Wrong gradients are never taken for right ones."""
    plain = built(lambda: Forgetful(trains))
    with new_group(world) as group:
        model = ax.FSDP(built(lambda: Forgetful(trains)), group, sharding_strategy=setting)
        inputs, targets = data_for(plain, 0)
        mine, wanted = part_of((inputs, targets), group.rank, group.size)
        (loss_of(plain(inputs), targets) + plain.aside()).backward()
        loss = loss_of(model(mine), wanted) + model.module.aside()
        refused = ""
        try:
            loss.backward()
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert setting is ShardingStrategy.FULL_SHARD
            assert re.search(
                "reaches the loss other than through what it|modified by an inplace operation", refused
            )
        else:
            assert_gradients(model, plain)


# ---- order ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_step_between_forward_and_backward(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        optimizer = adamw_of(model)
        inputs, targets = part_of(data_for(model.module, 0), group.rank, group.size)
        usual_step(model, optimizer, (inputs, targets))
        loss = loss_of(model(inputs), targets)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed between forward and"):
            loss.backward()


@pytest.mark.ranks(2)
def test_sparse_gradients(world):
    model = ax.FSDP(built(lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))))
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse, .*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.ranks(1, 2)
def test_estimates_of_worlds_that_cannot_be(world):
    model = ax.FSDP(built(Blocks))
    for options in ({"world_size": 0}, {"world_size": 6, "ranks_per_node": 4}, {"world_size": -4}):
        with pytest.raises(ValueError, match=r"world_size: expected (a multiple of ranks_per_node|at least 1)"):
            model.memory_estimate(**options)


# ---- exceptions -------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("in the middle of backward")
        return gradient, None


class MayFail(Blocks):
    """Fails in the middle of forward or backward, when told to."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            hidden, _ = block(hidden)
            if index == 1:
                hidden = Fails.apply(hidden, self.fails == "backward")
            if index == 1 and self.fails == "forward":
                raise ArithmeticError("in the middle of forward")
        return self.head(hidden * self.scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_training_goes_on_after_an_exception_on_all_ranks(world, setting, place):
    plain = built(MayFail)
    with new_group(world) as group:
        model = ax.FSDP(built(MayFail), group, sharding_strategy=setting)
        inputs, targets = data_for(plain, 0)
        mine, wanted = part_of((inputs, targets), group.rank, group.size)
        for _ in range(2):
            model.module.fails = place
            with pytest.raises(ArithmeticError, match=f"in the middle of {place}"):
                loss_of(model(mine), wanted).backward()
            model.module.fails = ""
            model.zero_grad()
            plain.zero_grad()
            loss_of(model(mine), wanted).backward()
            loss_of(plain(inputs), targets).backward()
            assert_gradients(model, plain)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("nodes", ["", "1"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_on_one_rank_releases_the_others(monkeypatch, place, nodes, strategy):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", nodes)
    released = []

    def train(world: ax.World) -> None:
        model = ax.FSDP(built(MayFail), world.default_group, sharding_strategy=strategy)
        model.module.fails = place if world.rank == 1 else ""
        try:
            usual_step(model, adamw_of(model), part_of(data_for(model.module, 0), world.rank, world.size))
            world.default_group.barrier()
        except RankFailedError:
            released.append(world.rank)
            raise

    with pytest.raises(ArithmeticError, match=f"in the middle of {place}"):
        run_ranks(3, train, timeout=30)
    assert sorted(released) == [0, 2]
