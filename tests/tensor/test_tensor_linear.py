"""Divided linear layers against whole ones: values, gradients of inputs and of weights, however they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from divided import assert_close, part, randn, whole_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi.tensor import Shard
from axonmpi.tensor.regions import enter

ON_RANKS = pytest.mark.ranks(1, 2, 4)
EXAMPLES = settings(max_examples=12, deadline=None)
DTYPES = (torch.float32, torch.float64)


class MLP(nn.Module):
    """Two layers, whole or divided."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def whole_mlp(hidden: int, between: int, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> MLP:
    return MLP(
        whole_linear(hidden, between, bias=bias, dtype=dtype, seed=1),
        whole_linear(between, hidden, bias=bias, dtype=dtype, seed=2),
    )


def divided_mlp(whole: MLP, *, sequence_parallel: bool = False) -> MLP:
    options = {"sequence_parallel": sequence_parallel}
    return MLP(
        ax.ColumnParallelLinear.from_linear(whole.up, **options),
        ax.RowParallelLinear.from_linear(whole.down, **options),
    )


def assert_gradients(divided: nn.Module, whole: nn.Module, world: ax.World, dims: dict[str, int]) -> None:
    """Compare the gradients of all parameters; `dims` says along which dimension each is cut."""
    expected = dict(whole.named_parameters())
    for name, parameter in divided.named_parameters():
        gradient = expected[name].grad
        if gradient is not None and name in dims:
            gradient = part(gradient, world, dims[name])
        if gradient is None:
            assert parameter.grad is None, name
        else:
            assert_close(parameter.grad, gradient, name)


OF_MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@dataclass(frozen=True)
class Case:
    """Sizes; those that are cut are multiples of the number of ranks, as is the sequence."""

    batch: int
    length: int
    inputs: int
    outputs: int
    bias: bool
    sequence_parallel: bool
    whole: bool
    """Whether the outputs are gathered, or the inputs are not divided."""
    dtype: torch.dtype


cases = st.builds(
    Case,
    batch=st.integers(0, 3),
    length=st.integers(0, 3),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    bias=st.booleans(),
    sequence_parallel=st.booleans(),
    whole=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)

# ---- the layers --------------------------------------------------------------------------------------------------


@ON_RANKS
@EXAMPLES
@given(case=cases)
def test_column(world, case: Case) -> None:
    size, dtype = world.size, case.dtype
    linear = whole_linear(case.inputs, size * case.outputs, bias=case.bias, dtype=dtype)
    x = randn(case.batch, size * case.length, case.inputs, dtype=dtype).requires_grad_()
    expected = linear(x)
    weights = randn(*expected.shape, seed=2, dtype=dtype)
    (expected * weights).sum().backward()

    layer = ax.ColumnParallelLinear.from_linear(
        linear, gather_output=case.whole, sequence_parallel=case.sequence_parallel
    )
    own_x = (part(x, world, 1) if case.sequence_parallel else x.detach().clone()).requires_grad_()
    output = layer(own_x)
    own = (lambda tensor: tensor) if case.whole else (lambda tensor: part(tensor, world, -1))
    assert_close(output, own(expected))
    (output * own(weights)).sum().backward()
    assert_close(own_x.grad, part(x.grad, world, 1) if case.sequence_parallel else x.grad)
    assert_gradients(layer, linear, world, {"weight": 0, "bias": 0})


@ON_RANKS
@EXAMPLES
@given(case=cases)
def test_row(world, case: Case) -> None:
    size, dtype = world.size, case.dtype
    linear = whole_linear(size * case.inputs, case.outputs, bias=case.bias, dtype=dtype)
    x = randn(case.batch, size * case.length, size * case.inputs, dtype=dtype).requires_grad_()
    expected = linear(x)
    weights = randn(*expected.shape, seed=2, dtype=dtype)
    (expected * weights).sum().backward()

    layer = ax.RowParallelLinear.from_linear(
        linear, input_is_parallel=not case.whole, sequence_parallel=case.sequence_parallel
    )
    own_x = (x.detach().clone() if case.whole else part(x, world, -1)).requires_grad_()
    output = layer(own_x)
    own = (lambda tensor: part(tensor, world, 1)) if case.sequence_parallel else (lambda tensor: tensor)
    assert_close(output, own(expected))
    (output * own(weights)).sum().backward()
    assert_close(own_x.grad, x.grad if case.whole else part(x.grad, world, -1))
    assert_gradients(layer, linear, world, {"weight": 1})


@ON_RANKS
@EXAMPLES
@given(case=cases, dims=st.sampled_from([1, 2, 3, 4]))
def test_pair(world, case: Case, dims: int) -> None:
    """Inputs of one to four dimensions; the sequence is dim 1, or dim 0 of two."""
    size, dtype = world.size, case.dtype
    whole = whole_mlp(case.inputs, size * case.outputs, bias=case.bias, dtype=dtype)
    shape = {1: (), 2: (case.length,), 3: (case.batch, case.length), 4: (case.batch, case.length, 2)}[dims]
    sequence_parallel, dim = case.sequence_parallel and dims > 1, 0 if dims == 2 else 1
    if sequence_parallel:
        shape = tuple(length * size if at == dim else length for at, length in enumerate(shape))
    x = randn(*shape, case.inputs, dtype=dtype).requires_grad_()
    expected = whole(x)
    weights = randn(*expected.shape, seed=2, dtype=dtype)
    (expected * weights).sum().backward()

    options = {"sequence_parallel": sequence_parallel, "sequence_dim": dim - dims}
    divided = MLP(
        ax.ColumnParallelLinear.from_linear(whole.up, **options),
        ax.RowParallelLinear.from_linear(whole.down, **options),
    )
    own = (
        (lambda tensor: part(tensor, world, dim)) if sequence_parallel else (lambda tensor: tensor.detach().clone())
    )
    own_x = own(x).requires_grad_()
    output = divided(own_x)
    assert_close(output, own(expected))
    (output * own(weights)).sum().backward()
    assert_close(own_x.grad, own(x.grad))
    assert_gradients(divided, whole, world, OF_MLP)


class Siblings(nn.Module):
    """Three layers with one input, and what else is done with it."""

    def __init__(self, layers: list[nn.Module], output: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = layers
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.first(x) * torch.tanh(self.second(x)) + self.third(x)) + x


OF_SIBLINGS = {f"{name}.{kind}": 0 for name in ("first", "second", "third") for kind in ("weight", "bias")}
OF_SIBLINGS |= {"output.weight": 1}


def siblings(world: ax.World, sequence_parallel: bool) -> tuple[Siblings, Siblings]:
    whole = Siblings([whole_linear(6, 8, seed=seed) for seed in (1, 2, 3)], whole_linear(8, 6, seed=4))
    column, row = ax.ColumnParallelLinear.from_linear, ax.RowParallelLinear.from_linear
    layers = [column(layer, sequence_parallel=sequence_parallel) for layer in list(whole.children())[:3]]
    return whole, Siblings(layers, row(whole.output, sequence_parallel=sequence_parallel))


@ON_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_siblings_with_one_input(world, sequence_parallel: bool) -> None:
    whole, divided = siblings(world, sequence_parallel)
    for frozen in ((), ("first.weight",), ("third.weight", "second.weight"), ("first.weight", "first.bias")):
        for model in (whole, divided):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        x = randn(2, 8, 6).requires_grad_()
        whole(x).sin().sum().backward()
        own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
        divided(own_x).sin().sum().backward()
        assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad, str(frozen))
        assert_gradients(divided, whole, world, OF_SIBLINGS)


# ---- parameters --------------------------------------------------------------------------------------------------


@ON_RANKS
def test_first_values_are_those_of_torch_under_the_same_seed(world) -> None:
    ax.barrier()
    torch.manual_seed(7 + world.rank)
    ax.barrier()
    if world.rank == 0:
        torch.manual_seed(7)
    ax.barrier()
    column = ax.ColumnParallelLinear(6, 8)
    row = ax.RowParallelLinear(8, 6, bias=False, dtype=torch.float64)
    packed = ax.ColumnParallelLinear(4, 24, shard=Shard.packed(0, [8, 16], world.size))
    state = torch.get_rng_state()
    ax.barrier()
    generator_states = ax.all_gather_object(state.tolist())
    assert all(other == generator_states[0] for other in generator_states)
    if world.rank == 0:
        torch.manual_seed(7)
        whole = [nn.Linear(6, 8), nn.Linear(8, 6, bias=False, dtype=torch.float64), nn.Linear(4, 24)]
        assert torch.equal(torch.get_rng_state(), state)
    else:
        whole = []
    ax.barrier()
    for layer, linear in zip([column, row, packed], ax.broadcast_object(whole), strict=True):
        assert torch.equal(layer.full_weight(), linear.weight)
        assert (layer.full_bias() is None) == (linear.bias is None)
        if linear.bias is not None:
            assert torch.equal(layer.full_bias(), linear.bias)
        assert layer.weight.shape == (
            (linear.weight.shape[0] // world.size, linear.weight.shape[1])
            if layer is not row
            else (linear.weight.shape[0], linear.weight.shape[1] // world.size)
        )


@ON_RANKS
def test_cutting_a_layer(world) -> None:
    linear = whole_linear(8, 16, dtype=torch.float32).eval()
    linear.bias.requires_grad_(False)
    before = linear.weight.clone()
    for kind in (ax.ColumnParallelLinear, ax.RowParallelLinear):
        layer = kind.from_linear(linear)
        assert not layer.training
        assert (layer.weight.requires_grad, layer.bias.requires_grad) == (True, False)
        assert layer.weight.dtype is torch.float32
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert torch.equal(layer.full_weight(), linear.weight)
        assert torch.equal(layer.full_bias(), linear.bias)
        with torch.no_grad():
            layer.weight.zero_()
            layer.full_weight().zero_()
        assert torch.equal(linear.weight, before)
        other = copy.deepcopy(layer)
        assert other.process_group is layer.process_group
        assert other.weight is not layer.weight
        assert torch.equal(other.full_weight(), torch.zeros_like(before))
        assert f"ranks={world.size}" in repr(layer)


@ON_RANKS
def test_meta_device(world) -> None:
    """Nothing has values at first; they come with `reset_parameters`, or with a state dict."""
    for layer in (
        ax.ColumnParallelLinear(4, 8, device="meta"),
        ax.RowParallelLinear(8, 4, device="meta"),
        ax.ColumnParallelLinear.from_linear(nn.Linear(4, 8, device="meta")),
    ):
        assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
        layer.reset_parameters()
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert 0 < layer.full_weight().abs().max() <= 0.5


@ON_RANKS
def test_shards_of_every_kind(world) -> None:
    """Rows of the weight in other orders, copied or padded: gathered outputs are those of the whole layer."""
    size = world.size
    x = randn(3, 4)
    shards = {
        "packed": Shard.packed(0, [size, 2 * size, 4 * size], size),
        "padded": Shard.padded(0, 4 * size - 1, size),
    }
    for name, shard in shards.items():
        linear = whole_linear(4, shard.size)
        layer = ax.ColumnParallelLinear.from_linear(linear, shard=shard, gather_output=True)
        assert_close(layer.full_weight(), linear.weight, name)
        own_x, whole_x = (x.clone().requires_grad_() for _ in range(2))
        layer(own_x).sin().sum().backward()
        linear(whole_x).sin().sum().backward()
        assert_close(layer(x), linear(x), name)
        assert_close(own_x.grad, whole_x.grad, name)
        assert_close(layer.weight.grad, shard.cut(linear.weight.grad, world.rank), name)
    copied = Shard.heads(0, 1, 3, size)
    linear = whole_linear(4, 3)
    layer = ax.ColumnParallelLinear.from_linear(linear, shard=copied)
    assert_close(layer(x), linear(x))
    assert_close(layer.full_weight(), linear.weight)
    rows = Shard.packed(1, [2 * size, size], size)
    linear = whole_linear(3 * size, 2)
    inputs = randn(5, 3 * size).requires_grad_()
    layer = ax.RowParallelLinear.from_linear(linear, shard=rows, input_is_parallel=False)
    layer(inputs).sin().sum().backward()
    found, inputs.grad = inputs.grad, None
    linear(inputs).sin().sum().backward()
    assert_close(found, inputs.grad)
    assert_close(layer.weight.grad, rows.cut(linear.weight.grad, world.rank))


# ---- ways of using them ------------------------------------------------------------------------------------------


def compare(world: ax.World, use: Callable[[MLP, Tensor], Tensor], *, sequence_parallel: bool) -> tuple[MLP, MLP]:
    """Train a whole and a divided MLP for a step in the same way, and compare all gradients."""
    whole = whole_mlp(6, 8)
    divided = divided_mlp(whole, sequence_parallel=sequence_parallel)
    x = randn(2, 8, 6).requires_grad_()
    own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
    use(whole, x)
    use(divided, own_x)
    assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad)
    assert_gradients(divided, whole, world, OF_MLP)
    return whole, divided


def accumulated(model: MLP, x: Tensor) -> None:
    for scale in (1, 2):
        model(scale * x).sin().sum().backward()


def used_twice(model: MLP, x: Tensor) -> None:
    (model(x) + model(model(x))).sin().sum().backward()


def used_twice_with_the_same_input(model: MLP, x: Tensor) -> None:
    (F.gelu(model.up(x)).cos() * model.up(x).sin()).sum().backward()


def output_unused(model: MLP, x: Tensor) -> None:
    model(x)
    model.up(x.exp())
    model(x).sin().sum().backward()


def twice_through_one_graph(model: MLP, x: Tensor) -> None:
    loss = model(x).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def only_some_gradients(model: MLP, x: Tensor) -> None:
    loss = model(x).sin().sum()
    (of_weight,) = torch.autograd.grad(loss, model.up.weight, retain_graph=True)
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert of_weight.shape == model.up.weight.shape
    loss.backward()
    assert_close(of_input, x.grad)
    assert_close(of_weight, model.up.weight.grad)


def checkpointed(model: MLP, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).sin().sum().backward()


def checkpointed_reentrant(model: MLP, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=True).sin().sum().backward()


def checkpointed_in_part(model: MLP, x: Tensor) -> None:
    between = model.up(x)
    again = checkpoint(model.up, x, use_reentrant=False)
    model.down(F.gelu(between + again)).sin().sum().backward()


def input_without_gradient(model: MLP, x: Tensor) -> None:
    model(x.detach()).sin().sum().backward()
    x.grad = torch.zeros_like(x)


def weights_without_gradient(model: MLP, x: Tensor) -> None:
    model.up.weight.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    model(x).sin().sum().backward()


def only_one_bias(model: MLP, x: Tensor) -> None:
    model.requires_grad_(False)
    model.up.bias.requires_grad_(True)
    model(x.detach()).sin().sum().backward()
    x.grad = torch.zeros_like(x)


def after_a_look(model: MLP, x: Tensor) -> None:
    """Without gradients first, with the same input."""
    with torch.no_grad():
        looked_at = model(x)
    with torch.inference_mode():
        assert_close(model(x), looked_at)
        assert_close(model(x * 1), looked_at)
    assert not looked_at.requires_grad
    model.train()(x).sin().sum().backward()
    assert_close(model.eval()(x), looked_at)


def changed_in_place(model: MLP, x: Tensor) -> None:
    """The same tensor, with other values, in the next layer."""
    again = copy.deepcopy(model.up)
    y = x * 1
    with torch.no_grad():
        model.up(y)
        y += 1
        assert_close(again(y), model.up(x + 1))
    model(x).sin().sum().backward()


def seen_by_a_sibling_without_gradients(model: MLP, x: Tensor) -> None:
    """What one layer has entered without gradients is not what the next one needs."""
    first, second, third = (copy.deepcopy(model.up) for _ in range(3))
    x = x * 1
    with torch.no_grad():
        first(x)
    model.down(F.gelu(second(x) * third(x))).sin().sum().backward()
    for name in ("weight", "bias"):
        model.up.get_parameter(name).grad = second.get_parameter(name).grad + third.get_parameter(name).grad


USES = [
    *(accumulated, used_twice, used_twice_with_the_same_input, output_unused, twice_through_one_graph),
    *(only_some_gradients, checkpointed, checkpointed_reentrant, checkpointed_in_part, input_without_gradient),
    *(weights_without_gradient, only_one_bias, after_a_look, changed_in_place, seen_by_a_sibling_without_gradients),
]


@ON_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ways_of_using(world, sequence_parallel: bool) -> None:
    for use in USES:
        compare(world, use, sequence_parallel=sequence_parallel)


@ON_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_entered_tensor_may_be_used_by_others_too(world, sequence_parallel: bool) -> None:
    """By two layers, by one that gets what was computed from it, and by something that is no layer."""
    whole = [whole_linear(6, 8, seed=seed) for seed in (1, 2, 3)]
    divided = [ax.ColumnParallelLinear.from_linear(linear, input_is_entered=True) for linear in whole]
    scale = randn(2, 8, 6, seed=world.rank + 20)
    for combine in (lambda a, b, c, x: a * b + c, lambda a, b, c, x: a, lambda a, b, c, x: c):
        x = randn(2, 8, 6).requires_grad_()
        outputs = [whole[0](x), whole[1](x), whole[2](x.sin())]
        scales = sum(randn(2, 8, 6, seed=rank + 20) for rank in range(world.size))
        (combine(*outputs, x).sin().sum() + (x * scales).sum()).backward()

        own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
        inner = enter(own_x, world.default_group, sequence_parallel=sequence_parallel)
        outputs = [divided[0](inner), divided[1](inner), divided[2](inner.sin())]
        (combine(*outputs, inner).sin().sum() + (inner * scale).sum()).backward()
        assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad)
    for layer, linear in zip(divided, whole, strict=True):
        assert_gradients(layer, linear, world, {"weight": 0, "bias": 0})


@ON_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_gradients(world, sequence_parallel: bool) -> None:
    whole = whole_mlp(4, 8)
    divided = divided_mlp(whole, sequence_parallel=sequence_parallel)
    x = randn(2, 4, 4).requires_grad_()
    own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()

    def penalty(model: MLP, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    def penalty_of_weight(model: MLP, x: Tensor) -> Tensor:
        """Each rank has its rows, and all of them together are the whole penalty."""
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), model.up.weight, create_graph=True)
        return gradient.pow(2).sum()

    for function in (penalty_of_weight, penalty):
        for model in (whole, divided):
            model.zero_grad()
        x.grad = own_x.grad = None
        function(whole, x).backward()
        function(divided, own_x).backward()
        assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad)
    # Of a bias at the end there is no second derivative in the input: each rank counts its positions.
    parameters = {name: gradient for name, gradient in divided.named_parameters() if name != "down.bias"}
    for name, parameter in parameters.items():
        assert_close(parameter.grad, part(whole.get_parameter(name).grad, world, OF_MLP[name]), name)


@ON_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(world, sequence_parallel: bool) -> None:
    whole = whole_mlp(16, 32, dtype=torch.float32)
    divided = divided_mlp(whole, sequence_parallel=sequence_parallel)
    x = randn(2, 8, 16, dtype=torch.float32).requires_grad_()
    own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = whole(x), divided(own_x)
    assert_close(found, part(expected, world, 1) if sequence_parallel else expected)
    expected.float().sin().mean(0).sum().backward()
    found.float().sin().sum().div(x.shape[0]).backward()
    assert_close(own_x.grad.bfloat16(), (part(x.grad, world, 1) if sequence_parallel else x.grad).bfloat16())
    for name, parameter in divided.named_parameters():
        gradient = whole.get_parameter(name).grad
        gradient = part(gradient, world, OF_MLP[name]) if name in OF_MLP else gradient
        assert parameter.grad.dtype is torch.float32
        assert_close(parameter.grad.bfloat16(), gradient.bfloat16(), name)
    y = own_x * 1
    with torch.autocast("cpu", torch.bfloat16):
        assert copy.deepcopy(divided.up)(y).dtype is torch.bfloat16
    assert_close(copy.deepcopy(divided.up)(y), part(whole.up(x), world, -1))


@ON_RANKS
def test_hooks_see_each_gradient_once(world) -> None:
    """Those that wrappers of data parallelism use."""
    divided = divided_mlp(whole_mlp(4, 8))
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in divided.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    divided(randn(2, 4).requires_grad_()).sum().backward()
    assert sorted(name for name, _ in seen) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    for name, gradient in seen:
        assert torch.equal(gradient, divided.get_parameter(name).grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", [ax.DDP, ax.FSDP])
def test_replicas_of_divided_layers(world, wrap) -> None:
    """Two by two ranks: data parallelism averages over the replicas."""
    mesh = ax.DeviceMesh({"dp": 2, "tp": 2})
    whole = whole_mlp(6, 8, dtype=torch.float32)
    tp = mesh.group("tp")
    model = wrap(
        MLP(
            ax.ColumnParallelLinear.from_linear(whole.up, tp),
            ax.RowParallelLinear.from_linear(whole.down, tp),
        ),
        mesh.group("dp"),
    )
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole))
    x = randn(4, 6, dtype=torch.float32)
    for _ in range(3):
        whole(x).sin().mean().backward()
        model(x.chunk(2)[mesh.rank("dp")]).sin().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_close(model(x), whole(x))


@pytest.mark.ranks(2)
def test_after_a_backward_that_failed_gradients_are_right(world) -> None:
    whole, divided = siblings(world, False)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    x = randn(2, 8, 6).requires_grad_()
    own_x = x.detach().clone().requires_grad_()
    loss = divided(own_x).sin().sum()
    handle = divided.third.weight.register_hook(fail)  # the last layer is the first in backward
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    handle.remove()
    divided.zero_grad()
    own_x.grad = None
    loss.backward()
    whole(x).sin().sum().backward()
    assert_close(own_x.grad, x.grad)
    assert_gradients(divided, whole, world, OF_SIBLINGS)


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent(world) -> None:
    size = world.size
    message = f"multiple of the {size} ranks of the group, got {size + 1}"
    with pytest.raises(ValueError, match=message):
        ax.ColumnParallelLinear(3, size + 1)
    with pytest.raises(ValueError, match=message):
        ax.RowParallelLinear(size + 1, 3)
    with pytest.raises(ValueError, match=message):
        ax.ColumnParallelLinear.from_linear(whole_linear(3, size + 1))
    column = ax.ColumnParallelLinear.from_linear(whole_linear(3, size), sequence_parallel=True)
    row = ax.RowParallelLinear.from_linear(whole_linear(2 * size, 3), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"expected \[..., 3\], the whole input, got shape \[2, 4\] on rank"):
        column(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"this rank's share of {2 * size} features, got shape \[2, {2 * size}\]"):
        row(torch.zeros(2, 2 * size, dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"multiple of the {size} ranks .* got {size + 1} \(dim 1"):
        row(torch.zeros(2, size + 1, 2, dtype=torch.float64))
    for layer, inputs in ((column, 3), (row, 2)):
        with pytest.raises(IndexError, match="dim"):
            layer(torch.zeros(inputs, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"sequence_dim: expected another dimension .* got 1 for .*\[8, \d\]"):
            layer(torch.zeros(8, inputs, dtype=torch.float64))
    ax.barrier()


@pytest.mark.ranks(3)
def test_ranks_outside_the_group(world) -> None:
    group = world.new_group([1, 2])
    if world.rank:
        layer = ax.ColumnParallelLinear.from_linear(whole_linear(3, 4), group)
        assert torch.equal(layer.weight, whole_linear(3, 4).weight[2 * world.rank - 2 : 2 * world.rank])
        return
    for make in (
        lambda: ax.ColumnParallelLinear.from_linear(whole_linear(3, 4), group),
        lambda: ax.RowParallelLinear(4, 3, process_group=group),
        lambda: ax.VocabParallelEmbedding(4, 3, process_group=group),
        lambda: ax.parallel_cross_entropy(torch.zeros(2), torch.tensor(0), group),
    ):
        with pytest.raises(ValueError, match="rank 0 is not in this group"):
            make()


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_sizes(world) -> None:
    message = (
        r"of the same sizes on all ranks, got a weight of shape \[4, 3\] on rank 1, and one of \[2, 3\] on rank 0"
    )
    if world.rank == 0:
        ax.ColumnParallelLinear(3, 4, bias=False)
    else:
        with pytest.raises(ValueError, match=message):
            ax.ColumnParallelLinear(3, 8, bias=False)


@pytest.mark.ranks(2)
def test_other_mistakes(world) -> None:
    even = Shard.even(0, 4, 2)
    for options, message in (
        ({"shard": Shard.even(1, 3, 1)}, "along dim 0 of the weight, got one along dim 1"),
        ({"shard": Shard.even(0, 8, 2)}, r"parameter of shape \[4, 3\], got one of size 8 along dim 0"),
        ({"shard": Shard.even(0, 4, 4)}, "expected one for 2 ranks, got one for 4"),
        ({"shard": Shard.heads(0, 1, 4, 2), "gather_output": True}, "on one rank, got one with 2 copies"),
    ):
        with pytest.raises(ValueError, match=message):
            ax.ColumnParallelLinear(3, 4, **options)
    with pytest.raises(ValueError, match="on one rank, got one with 2 copies"):
        ax.RowParallelLinear(4, 3, shard=Shard.heads(1, 1, 4, 2))
    with pytest.raises(ValueError, match="along dim 1 of the weight, got one along dim 0"):
        ax.RowParallelLinear(4, 3, shard=even)
    with pytest.raises(TypeError, match=r"shard: expected an axonmpi.tensor.Shard, got str"):
        ax.ColumnParallelLinear(3, 4, shard="even")
    with pytest.raises(TypeError, match=r"process_group: expected an axonmpi.ProcessGroup or None, got str"):
        ax.ColumnParallelLinear(3, 4, process_group="tp")
    with pytest.raises(TypeError, match=r"linear: expected a torch.nn.Linear, got ReLU"):
        ax.RowParallelLinear.from_linear(nn.ReLU())
    ax.barrier()
