"""FullyShardedDataParallel with what else torch does with a model, its backward and its optimizers."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compare import assert_close, assert_gradients, refused
from helpers.models import (
    Blocks,
    PassesNothing,
    TiedBlocks,
    batch_norm,
    batch_of,
    built,
    equals_alone,
    fail,
    in_turn,
    own_data,
    own_loss,
    part_of,
)
from helpers.settings import all_pairs
from helpers.steps import (
    accumulates_averages,
    adamw,
    again,
    asks_for_gradients_of_inputs,
    checkpoints_the_model,
    evaluates_between_steps,
    forwards_and_backwards_later,
    forwards_before_one_backward,
    goes_backward_twice,
    loss_of,
    optimizer_of,
    penalised,
    sgd,
    usual_step,
)
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import ShardingStrategy

# ---- models -----------------------------------------------------------------------------------------------------


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


class Chosen(nn.Module):
    """Calls some of its blocks, once or several times; checkpoints them from outside, from inside, or both."""

    def __init__(self, *uses: int, outside: bool | None = None, inside: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, inside) for _ in range(3))
        self.never = nn.Parameter(torch.ones(40))
        self.last = nn.Linear(8, 3)
        self.uses, self.outside = uses, outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.uses:
            block = self.blocks[index]
            x = block(x) if self.outside is None else again(block, x, self.outside)
        return self.last(x)


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


class Undefined(Chosen):
    """Backward comes to a parameter that it has no gradient for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(PassesNothing.apply(x, self.never))


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


def triple(parameter: Tensor) -> None:
    parameter.grad = parameter.grad * 3


def hook_wholes(module: nn.Module, _args: object) -> None:
    """Put hooks on parameters in a forward, where they are whole; once."""
    if not hasattr(module, "is_hooked"):
        module.is_hooked = True
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(triple)


def hooked_blocks() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.up.register_forward_pre_hook(hook_wholes)
    return model


# ---- steps ------------------------------------------------------------------------------------------------------


def inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, ax.FSDP) else model


def takes_a_structure(model, optimizer, batch):
    optimizer.zero_grad()
    result = model(batch[0])
    kind = type(result)
    assert kind is inner(model).kind
    output = {tuple: lambda r: r[0], dict: lambda r: r["output"], Result: lambda r: r.hidden}[kind](result)
    loss_of(output, batch[1]).backward()
    optimizer.step()


def leaves_a_block_out(model, optimizer, batch):
    usual_step(model, optimizer, batch)
    unused = {
        name for name, p in model.named_parameters() if ("blocks.1." in name or name == "never") and p.numel()
    }
    assert {name for name, p in model.named_parameters() if p.grad is None and p.numel()} == unused


def uses_other_blocks(model, optimizer, batch):
    for uses in ([0], [2, 1], [1, 1, 0], [0, 2]):
        inner(model).uses = uses
        usual_step(model, optimizer, batch)


def freezes_and_thaws(model, optimizer, batch):
    block = inner(model).blocks[1]
    for _ in range(2):
        block.requires_grad_(not block.norm.weight.requires_grad)
        usual_step(model, optimizer, batch)


def evaluates_first(model, optimizer, batch):
    """Without gradients attention has a shorter way, which reads the parameters of submodules."""
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model.train()
    usual_step(model, optimizer, batch)


def sees_averages(model, optimizer, batch):
    """Of two hooks on each part the first removes itself."""
    for parameter in model.parameters():
        handles = []

        def triple_once(hooked, handles=handles):
            triple(hooked)
            handles.pop().remove()

        handles.append(parameter.register_post_accumulate_grad_hook(triple_once))
        parameter.register_post_accumulate_grad_hook(triple)
    usual_step(model, optimizer, batch)


def fails_in_a_hook(model, optimizer, batch):
    handles = [parameter.register_post_accumulate_grad_hook(fail) for parameter in model.parameters()]
    refused(ArithmeticError, ((3 * loss_of(model(batch[0]), batch[1])).backward, "in the middle"))
    for handle in handles:
        handle.remove()
    usual_step(model, optimizer, batch)


# ---- each of them -----------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A model, what is done with it, an optimizer, and options of the wrapper."""

    make: Any
    step: Any = usual_step
    optimizer: Any = sgd
    options: Any = None


CHECKPOINTS = all_pairs(
    outside=[True, False, None],
    inside=[True, False, None],
    uses=[(0, 1, 2), (0, 1, 0)],
    units=[None, ["blocks.1"]],
    setting=["apart", "one_node", "kept", "replicas"],
)
"""Outside of blocks and inside of them: whether checkpoints are reentrant, None for no checkpoint."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("setting", "row"), [(row.pop("setting"), row) for row in CHECKPOINTS], indirect=["setting"]
)
def test_checkpoints_equal_one_process(world, setting, row):
    make = partial(Chosen, *row["uses"], outside=row["outside"], inside=row["inside"])
    equals_alone(world, make, units=row["units"], sharding_strategy=setting)


WAYS = {
    **{f"checkpoints {a} of all": Way(Blocks, partial(checkpoints_the_model, reentrant=a)) for a in (True, False)},
    "forwards before one backward": Way(Blocks, forwards_before_one_backward),
    "forwards and backwards later": Way(Blocks, forwards_and_backwards_later),
    "the same with ties": Way(TiedBlocks, forwards_and_backwards_later),
    "accumulation": Way(Blocks, accumulates_averages),
    "accumulation in zeros": Way(Blocks, partial(accumulates_averages, set_to_none=False)),
    "two backwards": Way(Blocks, goes_backward_twice),
    "evaluation": Way(Blocks, evaluates_between_steps),
    "gradients of inputs": Way(Blocks, asks_for_gradients_of_inputs),
    **{kind.__name__: Way(partial(StructuredModel, kind), takes_a_structure) for kind in (tuple, dict, Result)},
    "unused": Way(partial(Chosen, 0, 2), leaves_a_block_out),
    "undefined": Way(partial(Undefined, 0, 2)),
    "other blocks": Way(Chosen, uses_other_blocks, optimizer_of("AdamW", lr=1e-2)),
    "frozen later": Way(Blocks, freezes_and_thaws, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)),
    "recurrent": Way(Recurrent),
    "recurrent units": Way(Recurrent, options={"units": [nn.LSTM]}),
    "attention": Way(Attentive, evaluates_first),
    "attention units": Way(Attentive, options={"units": [nn.MultiheadAttention]}),
    "called several times": Way(partial(Chosen, 0, 1, 0, 2, 0, 0)),
    "hooks on wholes": Way(hooked_blocks),
    "hooks on parts": Way(partial(Chosen, 0, 2), sees_averages),
    "hooks that raise": Way(Blocks, fails_in_a_hook),
}


@pytest.mark.ranks(2)
@in_turn("way", WAYS)
def test_each_way_equals_one_process(world, setting, way):
    make, step, optimizer, options = WAYS[way]
    state = equals_alone(world, make, step, optimizer, sharding_strategy=setting, **(options or {}))
    if "never" in state:
        assert torch.equal(state["never"], torch.ones(40))  # an optimizer would have let it decay


# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart"], indirect=True)
def test_autocast(world, model):
    """The sum of what each rank's part gives in a model that is not wrapped: rounding depends on the part."""
    plain = built(Blocks)
    for rank in range(world.size):
        inputs, targets = part_of(batch_of(plain, 0), rank, world.size)
        for module in (plain, model)[: 1 + (rank == world.rank)]:
            with torch.autocast("cpu", torch.bfloat16):
                output = module(inputs)
            assert output.dtype is torch.bfloat16
            (loss_of(output.float(), targets) / (world.size if module is plain else 1)).backward()
    assert_gradients(model, plain)
    assert {part.grad.dtype for part in model.parameters() if part.numel()} == {torch.float32}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fused", "enabled"), [(True, True), (False, True), (False, False)])
def test_gradient_scaler_equals_one_process(world, fused, enabled):
    scalers = []

    def optimizer_of(model):
        kind = ax.ShardedGradScaler if isinstance(model, ax.FSDP) else torch.amp.GradScaler
        scalers.append(kind("cpu", init_scale=64.0, growth_interval=2, enabled=enabled))
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        scalers[-1].scale(loss_of(model(batch[0]), batch[1])).backward()
        scalers[-1].step(optimizer)
        scalers[-1].update()

    equals_alone(world, Blocks, step, optimizer_of)
    assert [scaler.get_scale() for scaler in scalers] == [128.0 if enabled else 1.0] * 2


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("unscales", "bad"), [(True, torch.inf), (False, torch.nan)])
def test_gradient_scaler_skips_a_step_on_all_ranks_if_one_rank_has_to(world, unscales, bad):
    model = ax.FSDP(built(lambda: nn.Linear(5, 3)))
    assert all(part.numel() == 0 for part in model.parameters()) == (world.rank > 1)  # ranks without a part
    optimizer = adamw(model)
    scaler = ax.ShardedGradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for number in range(4):
        before = model.full_state_dict()
        optimizer.zero_grad()
        scaler.scale(own_loss(model, world, number)).backward()
        if number == 1 and world.rank == 1:
            shard = next(part for part in model.parameters() if part.numel()).grad
            shard.as_subclass(torch.Tensor)[0] = bad
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = any(not torch.equal(before[name], value) for name, value in model.full_state_dict().items())
        assert changed == (number != 1)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]


# ---- forwards without a backward, and gradients of gradients ----------------------------------------------------


@pytest.mark.ranks(2)
@in_turn("mode", [torch.no_grad, torch.inference_mode])
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
        torch.testing.assert_close(ours, theirs.chunk(world.size)[world.rank], atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(2)
def test_gradients_of_inputs_alone_reduce_nothing(world, model):
    plain = built(Blocks)
    inputs, targets = own_data(model, world)
    inputs.requires_grad_()
    got, expected = (torch.autograd.grad(loss_of(module(inputs), targets), inputs) for module in (model, plain))
    torch.testing.assert_close(got, expected)
    assert all(part.grad is None for part in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [False, ax.MixedPrecision(torch.float64)])
def test_gradient_penalty(world, wrap, precision):
    """Refused where units take turns in memory, as they do in another dtype on one node."""
    model = wrap(built(Blocks), mixed_precision=precision)
    takes_turns = model.needs_whole_backward and model.sharding_strategy is ShardingStrategy.FULL_SHARD
    options = {"sharding_strategy": model.sharding_strategy, "mixed_precision": precision}
    if takes_turns:
        with pytest.raises(ValueError, match=r"create_graph=True: units take turns .*SHARD_GRAD_OP keeps them"):
            equals_alone(world, Blocks, penalised, **options)
    elif model.process_group.size > 1 or not precision:
        equals_alone(world, Blocks, penalised, **options)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart"], indirect=True)
def test_gradients_that_keep_their_graph(world, model):
    with pytest.raises(ValueError, match=r"backward\(create_graph=True\): p.grad would have no graph"):
        own_loss(model, world).backward(create_graph=True)
    assert all(part.grad is None for part in model.parameters())


# ---- others -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_an_output_that_needs_no_gradient(world):
    model = ax.FSDP(built(lambda: nn.Embedding(4, 3)).requires_grad_(False))
    assert not model(torch.tensor([1, 2])).requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["apart", "replicas"], indirect=True)
def test_batch_norm_keeps_its_own_statistics(world, wrap):
    plain, model = built(batch_norm), wrap(built(batch_norm))
    inputs, _ = own_data(model, world)
    for module in (model, plain):
        module(inputs)
        module.eval()
    torch.testing.assert_close(model(inputs), plain(inputs))
    assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert int(model.module.norm.num_batches_tracked) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_parts_keep_their_dimensions_whatever_a_rank_has_of_a_parameter(world, shard_by):
    model = ax.FSDP(built(Blocks), shard_by=shard_by)
    for part, whole in zip(model.parameters(), Blocks().parameters(), strict=True):
        assert part.dim() == whole.dim()
        assert part.numel() < whole.numel() or part.shape == whole.shape


@pytest.mark.ranks(2)
def test_hooks_on_parts_that_would_not_be_called_are_refused(wrap):
    model = wrap(built(Chosen))
    model.module.first.weight.register_hook(lambda gradient: 3 * gradient)
    with pytest.raises(ValueError, match=r"first.weight' has a hook .*register_post_accumulate_grad_hook"):
        model(batch_of(model.module, 0)[0])


def with_a_compiled_layer() -> nn.Module:
    model = Blocks()
    model.first.compile(backend="eager")
    return model


@pytest.mark.ranks(1, 2)
@pytest.mark.real_ranks
def test_steps_with_a_compiled_layer(world):
    if isinstance(world.default_group.backend, ax.MockBackend) and world.size > 1:
        pytest.skip("torch compiles in one thread of a process at a time")
    equals_alone(world, with_a_compiled_layer)
