"""FullyShardedDataParallel with what else torch does with a model, its backward and its optimizers."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import torch
from alongside import adamw_of, assert_gradients, equals_alone, usual_step
from models import BatchNormalised, assert_close, batch_of, built, loss_of, part_of
from sharded import STRATEGIES, Blocks, TiedBlocks, data_for, new_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import ShardingStrategy


def again(function, x: Tensor, reentrant: bool) -> Tensor:
    """Compute once more in backward; mock ranks are threads, which would change each other's random numbers."""
    return checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)


class Block(nn.Module):
    """A block that may compute its inner part once more in backward, with a parameter of its own in it."""

    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.scale = nn.Parameter(torch.ones(2 * width))
        self.down = nn.Linear(2 * width, width)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        return x + again(self.inner, x, self.reentrant)


class Checkpointed(nn.Module):
    """Blocks that are checkpointed from outside, from inside, or both."""

    def __init__(self, outside: bool | None, inside: bool | None, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, inside) for _ in range(3))
        if shared:
            self.blocks[2] = self.blocks[0]
        self.last = nn.Linear(8, 3)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.outside is None else again(block, x, self.outside)
        return self.last(x)


# ---- computing once more in backward ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_units(world, setting, reentrant):
    equals_alone(world, lambda: Checkpointed(reentrant, None), sharding_strategy=setting)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_units(world, setting, reentrant):
    equals_alone(world, lambda: Checkpointed(None, reentrant), sharding_strategy=setting)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_checkpointing_around_and_inside_units(world, apart, outside, inside):
    equals_alone(world, lambda: Checkpointed(outside, inside))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_a_unit_that_is_called_twice(world, setting, reentrant):
    equals_alone(world, lambda: Checkpointed(reentrant, None, shared=True), sharding_strategy=setting)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_parts_of_the_outermost_unit(world, apart, reentrant):
    def make() -> nn.Module:
        return Checkpointed(reentrant, reentrant)

    equals_alone(world, make, units=["blocks.1"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_the_whole_model(world, apart, reentrant):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        inputs = batch[0].clone().requires_grad_()
        loss_of(again(model, inputs, reentrant), batch[1]).backward()
        optimizer.step()

    equals_alone(world, Blocks, step)


# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_autocast(world, setting):
    """The sum of what each rank's part gives in a model that is not wrapped: rounding depends on the part."""
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        for rank in range(group.size):
            inputs, targets = part_of(data_for(plain, 0), rank, group.size)
            for module in (plain, model) if rank == group.rank else (plain,):
                with torch.autocast("cpu", torch.bfloat16):
                    output = module(inputs)
                assert output.dtype is torch.bfloat16
                (loss_of(output.float(), targets) / (group.size if module is plain else 1)).backward()
        assert_gradients(model, plain)
        assert {part.grad.dtype for part in model.parameters() if part.numel()} == {torch.float32}


def scaled(scaler: torch.amp.GradScaler):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("fused", [True, False])
def test_gradient_scaler_equals_one_process(world, fused):
    scalers = []

    def optimizer_of(model):
        if isinstance(model, ax.FSDP):
            scalers.append(ax.ShardedGradScaler("cpu", model.process_group, init_scale=64.0, growth_interval=2))
        else:
            scalers.append(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(model, optimizer, batch):
        scaled(scalers[-1])(model, optimizer, batch)

    equals_alone(world, Blocks, step, optimizer_of)
    plain, sharded = scalers
    assert plain.get_scale() == sharded.get_scale() == 128.0


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("unscales", "bad"), [(True, torch.inf), (False, torch.inf), (True, torch.nan)])
def test_gradient_scaler_skips_a_step_on_all_ranks_if_one_rank_has_to(world, unscales, bad):
    group = world.default_group
    model = ax.FSDP(built(Blocks), group)
    optimizer = adamw_of(model)
    scaler = ax.ShardedGradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for number in range(4):
        before = model.full_state_dict()
        optimizer.zero_grad()
        inputs, targets = part_of(data_for(model.module, number), group.rank, group.size)
        scaler.scale(loss_of(model(inputs), targets)).backward()
        if number == 1 and group.rank == group.size - 1:
            next(part for part in model.parameters() if part.numel()).grad[0] = bad
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = any(not torch.equal(before[name], value) for name, value in model.full_state_dict().items())
        assert changed == (number != 1)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]


@pytest.mark.ranks(4)
def test_gradient_scaler_on_a_rank_that_has_no_part_of_anything(world):
    group = world.default_group
    model = ax.FSDP(built(lambda: nn.Linear(2, 1)), group)
    assert (sum(part.numel() for part in model.parameters()) == 0) == (group.rank >= 2)
    optimizer = adamw_of(model)
    scaler = ax.ShardedGradScaler(init_scale=8.0, growth_interval=1)
    for finite in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 2)).sum()).backward()
        if group.rank == 0 and not finite:
            model.module.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (16.0 if finite else 8.0)


@pytest.mark.ranks(2)
def test_a_gradient_scaler_that_is_off(world):
    scaler = ax.ShardedGradScaler(enabled=False)
    equals_alone(world, Blocks, scaled(scaler))


# ---- forwards and backwards in any number -----------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_several_forwards_before_one_backward(world, setting):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        losses = [loss_of(model(batch[0] * factor), batch[1]) for factor in (1.0, 0.5, -1.0)]
        (losses[0] + 2 * losses[1] + losses[2]).backward()
        optimizer.step()

    equals_alone(world, Blocks, step, sharding_strategy=setting)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [Blocks, TiedBlocks])
def test_several_forwards_and_as_many_backwards_later(world, apart, kind):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        losses = [loss_of(model(batch[0]), batch[1]) * factor for factor in (1.0, 0.5)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    equals_alone(world, kind, step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_without_no_sync(world, setting, set_to_none):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none)
        for factor in (1.0, 0.5, 0.25):
            (loss_of(model(batch[0]), batch[1]) * factor).backward()
        optimizer.step()

    equals_alone(world, Blocks, step, sharding_strategy=setting)


@pytest.mark.ranks(2)
def test_two_backwards_through_one_graph(world, placement):
    def step(model, optimizer, batch):
        model.zero_grad(set_to_none=False)
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        optimizer.step()

    equals_alone(world, Blocks, step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_between_forward_and_backward(world, setting, mode):
    outputs = {}

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        with mode():
            outputs.setdefault(type(model), []).append(model(batch[0]))
        loss = loss_of(model(batch[0]), batch[1])
        with mode():
            outputs[type(model)].append(model(-batch[0]))
        loss.backward()
        optimizer.step()

    equals_alone(world, Blocks, step, sharding_strategy=setting)
    for ours, theirs in zip(outputs[ax.FSDP], outputs[Blocks], strict=True):
        own = theirs.chunk(world.size)[world.rank]
        torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
def test_evaluation_between_steps(world, setting):
    def step(model, optimizer, batch):
        model.eval()
        with torch.no_grad():
            model(batch[0])
        model(batch[0])  # with a graph that no backward follows
        model.train()
        usual_step(model, optimizer, batch)
        model(batch[0])

    equals_alone(world, Blocks, step, sharding_strategy=setting)


# ---- gradients of inputs, and of gradients ----------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_gradients_of_inputs_alone_reduce_nothing(world, setting):
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        inputs, targets = part_of(data_for(plain, 0), group.rank, group.size)
        inputs.requires_grad_()
        (got,) = torch.autograd.grad(loss_of(model(inputs), targets), inputs)
        (expected,) = torch.autograd.grad(loss_of(plain(inputs), targets), inputs)
        torch.testing.assert_close(got, expected)
        assert all(part.grad is None for part in model.parameters())
        assert all(p.grad is None for p in plain.parameters())


@pytest.mark.ranks(2)
def test_gradients_of_inputs_and_parameters_in_one_step(world, apart):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        inputs = batch[0].clone().requires_grad_()
        (direction,) = torch.autograd.grad(loss_of(model(inputs), batch[1]) * len(inputs), inputs)
        loss_of(model(inputs.detach() + 0.1 * direction.sign()), batch[1]).backward()
        optimizer.step()

    equals_alone(world, Blocks, step, batches=range(2))


def penalised(model, optimizer, batch):
    """Train on a loss and the squares of its gradient with respect to the inputs."""
    optimizer.zero_grad()
    inputs = batch[0].clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    (output.square().mean() + gradient.square().sum() / len(inputs)).backward()
    optimizer.step()


@pytest.mark.ranks(1, 2)
def test_gradient_penalty(world, setting):
    if setting is ShardingStrategy.FULL_SHARD and os.environ["AXONMPI_RANKS_PER_NODE"] and world.size > 1:
        with pytest.raises(ValueError, match=r"create_graph=True: units take turns .*SHARD_GRAD_OP keeps them"):
            equals_alone(world, Blocks, penalised, batches=range(2), sharding_strategy=setting)
    else:
        equals_alone(world, Blocks, penalised, batches=range(2), sharding_strategy=setting)


@pytest.mark.ranks(2)
def test_gradient_penalty_in_another_dtype(world):
    precision = ax.MixedPrecision(torch.float64)
    with pytest.raises(ValueError, match="create_graph=True: units take turns"):
        equals_alone(world, Blocks, penalised, mixed_precision=precision)
    kept = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": precision}
    equals_alone(world, Blocks, penalised, batches=range(2), **kept)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.ranks(1, 2)
def test_gradients_that_keep_their_graph(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        inputs, targets = part_of(data_for(model.module, 0), group.rank, group.size)
        with pytest.raises(ValueError, match=r"backward\(create_graph=True\): p.grad would have no graph"):
            loss_of(model(inputs), targets).backward(create_graph=True)
        assert all(part.grad is None for part in model.parameters())


# ---- outputs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: Tensor
    others: dict[str, list[Tensor]]


class Structured(nn.Module):
    """A block that takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8)

    def forward(self, x: Result) -> Result:
        hidden = torch.tanh(self.linear(x.hidden))
        return Result(hidden, {"side": [*x.others["side"], self.side(hidden)]})


class StructuredModel(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Structured() for _ in range(3))
        self.last = nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | dict[str, Tensor] | Result:
        result = Result(self.first(x), {"side": []})
        for block in self.blocks:
            result = block(result)
        output = self.last(result.hidden + sum(result.others["side"]))
        if self.kind is tuple:
            return output, result.hidden
        return {"output": output, "unused": result.hidden} if self.kind is dict else Result(output, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [tuple, dict, Result])
def test_outputs_of_any_structure(world, apart, kind):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        result = model(batch[0])
        assert type(result) is kind
        output = {tuple: lambda r: r[0], dict: lambda r: r["output"], Result: lambda r: r.hidden}[kind](result)
        loss_of(output, batch[1]).backward()
        optimizer.step()

    equals_alone(world, lambda: StructuredModel(kind), step)


@pytest.mark.ranks(2)
def test_an_output_that_needs_no_gradient(world):
    model = ax.FSDP(built(lambda: nn.Embedding(4, 3)).requires_grad_(False))
    assert not model(torch.tensor([1, 2])).requires_grad


# ---- parameters that take no part -------------------------------------------------------------------------------


class Optional(nn.Module):
    """Uses some of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, None) for _ in range(3))
        self.never = nn.Parameter(torch.ones(40))
        self.last = nn.Linear(8, 3)
        self.uses = [0, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.uses:
            x = self.blocks[index](x)
        return self.last(x)


@pytest.mark.ranks(2)
def test_parameters_unused_on_all_ranks_have_no_gradient(world, setting):
    def step(model, optimizer, batch):
        usual_step(model, optimizer, batch)
        without = {name for name, p in model.named_parameters() if p.grad is None and p.numel()}
        assert without == {
            name for name, p in model.named_parameters() if ("blocks.1." in name or name == "never") and p.numel()
        }

    state = equals_alone(world, Optional, step, sharding_strategy=setting)
    assert torch.equal(state["never"], torch.ones(40))  # AdamW would have let it decay


class PassesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Undefined(Optional):
    """Backward comes to a parameter that it has no gradient for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(PassesNothing.apply(x, self.never))


@pytest.mark.ranks(2)
def test_undefined_gradients_are_none(world, setting):
    state = equals_alone(world, Undefined, sharding_strategy=setting)
    assert torch.equal(state["never"], torch.ones(40))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_used_on_some_ranks_count_as_zero_on_others(world, strategy):
    """On one node: elsewhere units are gathered by all ranks together, so all have to call the same ones."""
    plain = built(Optional)
    model = ax.FSDP(built(Optional), world.default_group, sharding_strategy=strategy)
    for rank in range(world.size):
        uses = [0, 1, 2] if rank == 0 else [0, 2]
        inputs, targets = part_of(data_for(plain, 0), rank, world.size)
        for module in (plain, model) if rank == world.rank else (plain,):
            (module if module is plain else module.module).uses = uses
            (loss_of(module(inputs), targets) / (world.size if module is plain else 1)).backward()
    assert_gradients(model, plain)


@pytest.mark.ranks(2)
def test_parameters_are_used_in_other_steps(world, setting):
    equals_alone(
        world,
        Optional,
        step_with(lambda n: [[0], [2, 1], [1, 1, 0], [0, 2]][n]),
        batches=range(4),
        sharding_strategy=setting,
    )


def step_with(uses_at):
    """Use other blocks in each step."""
    count = {}

    def step(model, optimizer, batch):
        inner = model.module if isinstance(model, ax.FSDP) else model
        inner.uses = uses_at(count.setdefault(type(model), 0))
        count[type(model)] += 1
        usual_step(model, optimizer, batch)

    return step


@pytest.mark.ranks(2)
def test_freezing_after_wrapping(world, setting):
    def step(model, optimizer, batch):
        inner = model.module if isinstance(model, ax.FSDP) else model
        inner.blocks[1].requires_grad_(not inner.blocks[1].norm.weight.requires_grad)
        usual_step(model, optimizer, batch)

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    equals_alone(world, Blocks, step, optimizer_of, batches=range(4), sharding_strategy=setting)


# ---- layers that do more than multiply --------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8 if i else 5, 8, batch_first=True) for i in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 4, -1)
        for layer in self.layers:
            x, _ = layer(x)
        return self.last(x[:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 32)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.first(x).unflatten(1, (4, 8)))
        x, _ = self.query(x, x, x)
        return self.last(x.mean(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("units", [None, [nn.LSTM]])
def test_recurrent_layers(world, placement, units):
    equals_alone(world, Recurrent, units=units)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("units", [None, [nn.MultiheadAttention]])
def test_attention(world, placement, units):
    def step(model, optimizer, batch):
        if units is None:
            model.eval()  # without gradients there is a shorter way, which reads the parameters of submodules
            with torch.no_grad():
                model(batch[0])
            model.train()
        usual_step(model, optimizer, batch)

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    equals_alone(world, Attentive, step, optimizer_of, units=units)


@pytest.mark.ranks(2)
def test_batch_norm_keeps_its_own_statistics(world, setting):
    plain = built(BatchNormalised)
    with new_group(world) as group:
        model = ax.FSDP(built(BatchNormalised), group, sharding_strategy=setting)
        inputs, _ = part_of(batch_of(plain, 0), group.rank, group.size)
        for module in (model, plain):
            module.train()
            module(inputs)
            module.eval()
        torch.testing.assert_close(model(inputs), plain(inputs))
        assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
        assert int(model.module.norm.num_batches_tracked) == 1


class Twice(nn.Module):
    """One block called twice, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, None) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in (0, 1, 0, 2, 0, 0):
            x = self.blocks[index](x)
        return self.last(x)


@pytest.mark.ranks(2)
def test_a_unit_that_is_called_several_times(world, setting):
    equals_alone(world, Twice, sharding_strategy=setting)


# ---- optimizers -------------------------------------------------------------------------------------------------


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in model.named_parameters() if not ("norm" in name or name.endswith("bias"))]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def by_dims(model: nn.Module) -> torch.optim.Optimizer:
    plain, decayed = ([p for p in model.parameters() if (p.ndim < 2) is is_plain] for is_plain in (True, False))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}])


def rate_by_parameter(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())])


OPTIMIZERS = {
    "by_name": by_name,
    "by_dims": by_dims,
    "rate_by_parameter": rate_by_parameter,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "named": lambda model: torch.optim.NAdam(model.named_parameters(), lr=1e-2),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_optimizer(world, kind, shard_by):
    equals_alone(world, Blocks, optimizer_of=OPTIMIZERS[kind], shard_by=shard_by)


class Both:
    """Two optimizers, for matrices and for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        self.own = [
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.AdamW(rest, lr=1e-2),
        ]

    def zero_grad(self) -> None:
        for optimizer in self.own:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.own:
            optimizer.step()


@pytest.mark.ranks(1, 4)
def test_an_optimizer_of_matrices(world, placement):
    """Newton-Schulz iterations in bfloat16 magnify rounding."""
    equals_alone(world, Blocks, optimizer_of=Both, shard_by="parameters", tolerance=2e-3)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_parts_keep_their_dimensions_whatever_a_rank_has_of_a_parameter(world, shard_by):
    model = ax.FSDP(built(Blocks), world.default_group, shard_by=shard_by)
    plain = built(Blocks)
    for (name, part), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert part.dim() == whole.dim(), name
        assert part.numel() < whole.numel() or part.shape == whole.shape
        assert shard_by == "elements" or part.numel() in (0, whole.numel())


@pytest.mark.ranks(2)
def test_a_scheduler_and_closures(world):
    def step(model, optimizer, batch):
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)

    equals_alone(world, Blocks, step)


# ---- hooks ------------------------------------------------------------------------------------------------------


def triple(parameter: Tensor) -> None:
    parameter.grad = parameter.grad * 3


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that takes notice of how large gradients are."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Hooked(nn.Module):
    """Puts hooks on its parameters in its forward, where they are whole."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HookedBlock() for _ in range(depth))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class HookedBlock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            for parameter in (self.weight, self.bias):
                parameter.register_post_accumulate_grad_hook(triple)
        return super().forward(x)


@pytest.mark.ranks(2)
def test_hooks_on_whole_parameters_come_before_the_average(world, setting):
    equals_alone(world, Hooked, optimizer_of=sgd_of, sharding_strategy=setting)


@pytest.mark.ranks(2)
def test_hooks_on_parts_see_the_average(world, setting):
    def step(model, optimizer, batch):
        if not hasattr(optimizer, "hooked"):
            optimizer.hooked = True
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(triple)
        usual_step(model, optimizer, batch)

    equals_alone(world, Optional, step, sgd_of, sharding_strategy=setting)


@pytest.mark.ranks(2)
def test_hooks_on_parts_may_remove_themselves(world):
    def step(model, optimizer, batch):
        for parameter in model.parameters():
            handles = []

            def triple_once(hooked, handles=handles):
                triple(hooked)
                handles[0].remove()

            handles.append(parameter.register_post_accumulate_grad_hook(triple_once))
            handles.append(parameter.register_post_accumulate_grad_hook(lambda _: None))
        usual_step(model, optimizer, batch)

    equals_alone(world, Optional, step, sgd_of)


@pytest.mark.ranks(2)
def test_a_hook_that_raises_leaves_nothing_for_the_next_backward(world):
    def fail(_: Tensor) -> None:
        raise ArithmeticError

    def step(model, optimizer, batch):
        handles = [parameter.register_post_accumulate_grad_hook(fail) for parameter in model.parameters()]
        with pytest.raises(ArithmeticError):
            (3 * loss_of(model(batch[0]), batch[1])).backward()
        for handle in handles:
            handle.remove()
        usual_step(model, optimizer, batch)

    equals_alone(world, Blocks, step, sgd_of)


@pytest.mark.ranks(1, 2)
def test_hooks_on_parts_that_would_not_be_called_are_refused(world, setting):
    model = ax.FSDP(built(Optional), sharding_strategy=setting)
    model.module.first.weight.register_hook(lambda gradient: 3 * gradient)
    inputs, _ = batch_of(model, 0)
    with pytest.raises(ValueError, match=r"first.weight' has a hook .*register_post_accumulate_grad_hook"):
        model(inputs)


@pytest.mark.ranks(1, 2)
def test_steps_with_a_compiled_block_are_those_of_one_process(world):
    if world.default_group.backend.__class__ is ax.MockBackend and world.size > 1:
        pytest.skip("torch compiles in one thread of a process at a time")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    module = copy.deepcopy(plain)
    module[0].compile(backend="eager")
    model = ax.FSDP(module)
    own, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    x = torch.randn(4 * world.size, 8)
    for _ in range(3):
        model(x.tensor_split(world.size)[world.rank]).square().mean().backward()
        plain(x).square().mean().backward()
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.full_state_dict(), dict(plain.state_dict()))
