"""Divided linear layers against whole ones, used in every way: values, gradients, parameters, mistakes."""

import copy
from functools import partial

import pytest
import torch
from helpers.checkpoints import on_first
from helpers.compare import (
    assert_close,
    assert_equal,
    assert_precise,
    assert_same_on_all_ranks,
    gradients_of,
    refused,
)
from helpers.settings import each_pair
from helpers.steps import again
from helpers.transformer_parts import (
    MLP,
    OF_MLP,
    OF_SIBLINGS,
    assert_like_whole,
    assert_parts,
    cut_along,
    divided_mlp,
    floats,
    part,
    randn,
    siblings,
    together,
    whole_linear,
    whole_mlp,
)
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.tensor import Shard
from axonmpi.tensor.regions import enter


@pytest.mark.ranks(1, 2)
@each_pair(
    kind=("column", "row", "pair"),
    shape=((), (4,), (3, 4), (0, 4), (2, 0), (2, 4, 3)),
    bias=(True, False),
    sequence_parallel=(False, True),
    whole=(False, True),
    dtype=(torch.float32, torch.float64),
)
def test_layers_give_what_whole_ones_give(world, kind, shape, bias, sequence_parallel, whole, dtype) -> None:
    """Shapes are those before the features, the sequence being dim 1, or dim 0 of one.

    With `whole`, columns gather their outputs and rows get inputs that are not divided.
    """
    dim = 0 if len(shape) == 1 else 1
    sequence = dim if sequence_parallel and shape else None
    options = {"sequence_parallel": sequence is not None, "sequence_dim": dim - len(shape) - 1}
    if kind == "pair":
        alone = whole_mlp(3, 8, bias=bias, dtype=dtype)
        layer, dims, of_input, of_output = divided_mlp(alone, **options), OF_MLP, sequence, sequence
    elif kind == "column":
        alone = whole_linear(3, 8, bias=bias, dtype=dtype)
        layer = ax.ColumnParallelLinear.from_linear(alone, gather_output=whole, **options)
        dims, of_input, of_output = {"weight": 0, "bias": 0}, sequence, None if whole else -1
    else:
        alone = whole_linear(8, 3, bias=bias, dtype=dtype)
        layer = ax.RowParallelLinear.from_linear(alone, input_is_parallel=not whole, **options)
        dims, of_input, of_output = {"weight": 1}, None if whole else -1, sequence

    x, cut = randn(*shape, 8 if kind == "row" else 3, dtype=dtype), cut_along(world, dims)
    assert_like_whole(world, layer, alone, cut, x, of_input=of_input, of_output=of_output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.real_ranks)])
def test_siblings_with_one_input(world, sequence_parallel: bool) -> None:
    whole, divided = siblings(world, sequence_parallel)
    dim, cut = 1 if sequence_parallel else None, cut_along(world, OF_SIBLINGS)
    for frozen in ((), ("first.weight",), ("third.weight", "second.weight"), ("first.weight", "first.bias")):
        for model in (whole, divided):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        options = {"of_input": dim, "of_output": dim, "what": str(frozen)}
        assert_like_whole(world, divided, whole, cut, randn(2, 8, 6), **options)


# ---- ways of using layers ----------------------------------------------------------------------------------------

SEQUENCE = pytest.mark.parametrize("dim", [None, 1], ids=["replicated", "sequence"])
"""The dimension along which ranks have parts of the input and output."""


def inputs(world: ax.World, dim: int | None, *shape: int) -> tuple[Tensor, Tensor]:
    """Return an input, and this rank's part of it."""
    x = randn(*shape).requires_grad_()
    return x, part(x, world, dim).requires_grad_()


def used_twice(model: MLP, x: Tensor) -> None:
    (model(x) + model(model(x))).sin().sum().backward()
    (F.gelu(model.up(x)).cos() * model.up(x).sin()).sum().backward()


def output_unused(model: MLP, x: Tensor) -> None:
    model(x)
    model.up(x.exp())
    loss = model(x).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def only_some_gradients(model: MLP, x: Tensor) -> None:
    loss = model(x).sin().sum()
    found = [torch.autograd.grad(loss, one, retain_graph=True)[0] for one in (model.up.weight, x)]
    loss.backward()
    assert_precise(found, [model.up.weight.grad, x.grad])


def checkpointed(model: MLP, x: Tensor) -> None:
    for use_reentrant in (False, True):
        again(model, x, use_reentrant).sin().sum().backward()


def checkpointed_in_part(model: MLP, x: Tensor) -> None:
    between = model.up(x) + again(model.up, x, False)
    model.down(F.gelu(between)).sin().sum().backward()


def input_without_gradient(model: MLP, x: Tensor) -> None:
    model(x.detach()).sin().sum().backward()
    x.grad = torch.zeros_like(x)


def weights_without_gradient(model: MLP, x: Tensor) -> None:
    for layer in (model.up, model.down):
        layer.weight.requires_grad_(False)
    model(x).sin().sum().backward()


def one_bias_and_then_the_other(model: MLP, x: Tensor) -> None:
    for layer in (model.up, model.down):
        model.requires_grad_(False)
        layer.bias.requires_grad_(True)
        model(x.detach()).sin().sum().backward()
    x.grad = torch.zeros_like(x)


def after_a_look(model: MLP, x: Tensor) -> None:
    """Without gradients first, with the same input."""
    with torch.no_grad():
        looked_at = model(x)
    with torch.inference_mode():
        assert_precise(model(x), looked_at)
        assert_precise(model(x * 1), looked_at)
    assert not looked_at.requires_grad
    model.train()(x).sin().sum().backward()
    assert_precise(model.eval()(x), looked_at)


def changed_in_place(model: MLP, x: Tensor) -> None:
    """The same tensor, with other values, in the next layer."""
    again = copy.deepcopy(model.up)
    y = x * 1
    with torch.no_grad():
        model.up(y)
        y += 1
        assert_precise(again(y), model.up(x + 1))
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
    *(used_twice, output_unused, only_some_gradients, checkpointed, checkpointed_in_part, input_without_gradient),
    *(weights_without_gradient, one_bias_and_then_the_other, after_a_look, changed_in_place),
    seen_by_a_sibling_without_gradients,
]


@pytest.mark.ranks(2)
@SEQUENCE
def test_ways_of_using(world, dim) -> None:
    """A whole and a divided MLP, used in the same way for a step, have the same gradients."""
    for use in USES:
        whole = whole_mlp(6, 8)
        divided = divided_mlp(whole, sequence_parallel=dim is not None)
        x, own_x = inputs(world, dim, 2, 8, 6)
        use(whole, x)
        use(divided, own_x)
        assert_precise(own_x.grad, part(x.grad, world, dim), use.__name__)
        assert_parts(divided, whole, cut_along(world, OF_MLP), use.__name__)


@pytest.mark.ranks(2)
@SEQUENCE
def test_an_entered_tensor_may_be_used_by_others_too(world, dim) -> None:
    """By two layers, by one that gets what was computed from it, and by something that is no layer."""
    whole = [whole_linear(6, 8, seed=seed) for seed in (1, 2, 3)]
    divided = [ax.ColumnParallelLinear.from_linear(linear, input_is_entered=True) for linear in whole]
    scale = randn(2, 8, 6, seed=world.rank + 20)
    for combine in (lambda a, b, c, x: a * b + c, lambda a, b, c, x: a, lambda a, b, c, x: c):
        x, own_x = inputs(world, dim, 2, 8, 6)
        outputs = [whole[0](x), whole[1](x), whole[2](x.sin())]
        scales = sum(randn(2, 8, 6, seed=rank + 20) for rank in range(world.size))
        (combine(*outputs, x).sin().sum() + (x * scales).sum()).backward()

        inner = enter(own_x, world.default_group, sequence_parallel=dim is not None)
        outputs = [divided[0](inner), divided[1](inner), divided[2](inner.sin())]
        (combine(*outputs, inner).sin().sum() + (inner * scale).sum()).backward()
        assert_precise(own_x.grad, part(x.grad, world, dim))
    for layer, linear in zip(divided, whole, strict=True):
        assert_parts(layer, linear, cut_along(world, {"weight": 0, "bias": 0}))


@pytest.mark.ranks(2)
@SEQUENCE
def test_gradients_of_gradients(world, dim) -> None:
    whole = whole_mlp(4, 8)
    divided = divided_mlp(whole, sequence_parallel=dim is not None)
    x, own_x = inputs(world, dim, 2, 4, 4)
    for of_weight in (True, False):  # each rank has its rows, and all of them together are the whole penalty
        x.grad = own_x.grad = None
        for model, leaf in ((whole, x), (divided, own_x)):
            model.zero_grad()
            variable = model.up.weight if of_weight else leaf
            (gradient,) = torch.autograd.grad(model(leaf).sin().sum(), variable, create_graph=True)
            gradient.pow(2).sum().backward()
        assert_precise(own_x.grad, part(x.grad, world, dim))
    # Of a bias at the end there is no second derivative in the input: each rank counts its positions.
    expected = {name: part(whole.get_parameter(name).grad, world, dim) for name, dim in OF_MLP.items()}
    assert_precise({name: divided.get_parameter(name).grad for name in OF_MLP}, expected)


@pytest.mark.ranks(2)
@SEQUENCE
def test_autocast(world, dim) -> None:
    whole = whole_mlp(16, 32, dtype=torch.float32)
    divided = divided_mlp(whole, sequence_parallel=dim is not None)
    x = floats(2, 8, 16).requires_grad_()
    own_x = part(x, world, dim).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = whole(x), divided(own_x)
    assert_precise(found, part(expected, world, dim))
    expected.float().sin().mean(0).sum().backward()
    found.float().sin().sum().div(x.shape[0]).backward()
    assert_close(own_x.grad, part(x.grad, world, dim), 4e-2)
    cut = cut_along(world, OF_MLP)
    assert_close(gradients_of(divided), {name: cut(name, p.grad) for name, p in whole.named_parameters()}, 4e-2)
    y = own_x * 1
    with torch.autocast("cpu", torch.bfloat16):
        assert copy.deepcopy(divided.up)(y).dtype is torch.bfloat16
    assert_precise(copy.deepcopy(divided.up)(y), part(whole.up(x), world, -1))


@pytest.mark.ranks(2)
@SEQUENCE
def test_after_a_backward_that_failed_gradients_are_right(world, dim) -> None:
    whole, divided = siblings(world, dim is not None)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    x, own_x = inputs(world, dim, 2, 8, 6)
    loss = divided(own_x).sin().sum()
    handle = divided.third.weight.register_hook(fail)  # the last layer is the first in backward
    refused(RuntimeError, (partial(loss.backward, retain_graph=True), "on purpose"))
    handle.remove()
    divided.zero_grad()
    own_x.grad = None
    loss.backward()
    whole(x).sin().sum().backward()
    assert_precise(own_x.grad, part(x.grad, world, dim))
    assert_parts(divided, whole, cut_along(world, OF_SIBLINGS))


# ---- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 4)
def test_first_values_are_those_of_torch_under_rank_0s_seed(world) -> None:
    ax.barrier()
    torch.manual_seed(7 + world.rank)
    on_first(torch.manual_seed, 7)
    layers = [
        ax.ColumnParallelLinear(6, 8),
        ax.RowParallelLinear(8, 6, bias=False, dtype=torch.float64),
        ax.ColumnParallelLinear(4, 24, shard=Shard.packed(0, [8, 16], world.size)),
        ax.VocabParallelEmbedding(9, 2, -2, dtype=torch.float64),
    ]
    state = torch.get_rng_state()
    ax.barrier()
    assert_same_on_all_ranks(world, state)
    whole = []
    if world.rank == 0:
        torch.manual_seed(7)
        whole = [
            nn.Linear(6, 8),
            nn.Linear(8, 6, bias=False, dtype=torch.float64),
            nn.Linear(4, 24),
            nn.Embedding(9, 2, -2, dtype=torch.float64),
        ]
        assert torch.equal(torch.get_rng_state(), state)
    ax.barrier()
    for layer, alone in zip(layers, ax.broadcast_object(whole), strict=True):
        assert_equal([ax.tensor.full_state_dict(layer), layer.full_weight()], [alone.state_dict(), alone.weight])
        assert alone.weight.numel() <= world.size * layer.weight.numel() < 2 * alone.weight.numel()


@pytest.mark.ranks(2)
def test_cutting_a_layer(world) -> None:
    linear = whole_linear(8, 16, dtype=torch.float32).eval()
    linear.bias.requires_grad_(False)
    before = linear.weight.clone()
    for kind in (ax.ColumnParallelLinear, ax.RowParallelLinear):
        layer = kind.from_linear(linear)
        assert (layer.training, layer.weight.requires_grad, layer.bias.requires_grad) == (False, True, False)
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert_equal([layer.full_weight(), layer.full_bias()], [linear.weight, linear.bias])
        with torch.no_grad():
            layer.weight.zero_()
            layer.full_weight().zero_()
        other = copy.deepcopy(layer)
        assert (other.process_group is layer.process_group, other.weight is layer.weight) == (True, False)
        assert_equal([linear.weight, other.full_weight()], [before, torch.zeros_like(before)])
        assert f"ranks={world.size}" in repr(layer)


@pytest.mark.ranks(2)
def test_meta_device(world) -> None:
    """Nothing has values at first; they come with `reset_parameters`, or with a state dict."""
    for layer in (
        ax.ColumnParallelLinear(4, 8, device="meta"),
        ax.RowParallelLinear(8, 4, device="meta"),
        ax.ColumnParallelLinear.from_linear(nn.Linear(4, 8, device="meta")),
        ax.VocabParallelEmbedding(8, 4, device="meta"),
    ):
        assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
        layer.reset_parameters()
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert 0 < layer.full_weight().abs().max() < 6


@pytest.mark.ranks(2)
def test_shards_of_every_kind(world) -> None:
    """Rows of the weight in other orders, copied or padded: outputs are those of the whole layer."""
    for kind, shard, options in (
        (ax.ColumnParallelLinear, Shard.packed(0, [2, 4, 8], 2), {"gather_output": True}),
        (ax.ColumnParallelLinear, Shard.padded(0, 7, 2), {"gather_output": True}),
        (ax.ColumnParallelLinear, Shard.heads(0, 1, 3, 2), {}),
        (ax.RowParallelLinear, Shard.packed(1, [4, 2], 2), {"input_is_parallel": False}),
    ):
        linear = whole_linear(4, shard.size) if shard.dim == 0 else whole_linear(shard.size, 4)
        layer = kind.from_linear(linear, shard=shard, **options)
        x, own_x = (randn(3, linear.in_features).requires_grad_() for _ in range(2))
        assert_precise(layer(own_x), linear(x), str(shard))
        linear(x).sin().sum().backward()
        layer(own_x).sin().sum().backward()
        found = [own_x.grad / shard.copies, layer.weight.grad, layer.full_weight()]
        assert_precise(found, [x.grad, shard.cut(linear.weight.grad, world.rank), linear.weight], str(shard))


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent(world) -> None:
    message = "_features: expected a multiple of the 2 ranks of the group, got 3; .* shard="
    column = ax.ColumnParallelLinear.from_linear(whole_linear(3, 2), sequence_parallel=True)
    row = ax.RowParallelLinear.from_linear(whole_linear(4, 3), sequence_parallel=True)
    refused(
        ValueError,
        (lambda: ax.ColumnParallelLinear(3, 3), message),
        (lambda: ax.RowParallelLinear(3, 3), message),
        (lambda: ax.ColumnParallelLinear.from_linear(whole_linear(3, 3)), message),
        (lambda: column(randn(2, 4)), r"expected \[..., 3\], the whole input, got shape \[2, 4\] on rank"),
        (lambda: row(randn(2, 4)), r"this rank's share of 4 features, got shape \[2, 4\]"),
        (lambda: row(randn(2, 3, 2)), r"multiple of the 2 ranks .* got 3 \(dim 1"),
        (lambda: column(randn(8, 3)), r"sequence_dim: expected another dimension .* got 1 for .*\[8, 3\]"),
        (lambda: row(randn(8, 2)), r"sequence_dim: expected another dimension .* got 1 for .*\[8, 2\]"),
    )
    refused(IndexError, (lambda: column(randn(3)), "dim"), (lambda: row(randn(2)), "dim"))
    ax.barrier()


@pytest.mark.ranks(3)
def test_ranks_outside_the_group(world) -> None:
    group = world.new_group([1, 2])
    if world.rank:
        layer = ax.ColumnParallelLinear.from_linear(whole_linear(3, 4), group)
        assert_equal(layer.weight, whole_linear(3, 4).weight[2 * world.rank - 2 : 2 * world.rank])
        return
    message = "rank 0 is not in this group"
    refused(
        ValueError,
        (lambda: ax.ColumnParallelLinear.from_linear(whole_linear(3, 4), group), message),
        (lambda: ax.RowParallelLinear(4, 3, process_group=group), message),
        (lambda: ax.VocabParallelEmbedding(4, 3, process_group=group), message),
        (lambda: ax.parallel_cross_entropy(torch.zeros(2), torch.tensor(0), group), message),
    )


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_sizes(world) -> None:
    message = r"same sizes on all ranks, got a weight of shape \[4, 3\] on rank 1, and one of \[2, 3\] on rank 0"
    if world.rank == 0:
        ax.ColumnParallelLinear(3, 4, bias=False)
    else:
        refused(ValueError, (lambda: ax.ColumnParallelLinear(3, 8, bias=False), message))


@pytest.mark.ranks(2)
def test_other_mistakes(world) -> None:
    column, row = partial(ax.ColumnParallelLinear, 3, 4), partial(ax.RowParallelLinear, 4, 3)
    group, several = world.default_group, Shard.heads(0, 1, 4, 2)
    refused(
        ValueError,
        (lambda: column(shard=Shard.even(1, 3, 1)), "along dim 0 of the weight, got one along dim 1"),
        (lambda: column(shard=Shard.even(0, 8, 2)), r"of shape \[4, 3\], got one of size 8 along dim 0"),
        (lambda: column(shard=Shard.even(0, 4, 4)), "expected one for 2 ranks, got one for 4"),
        (lambda: column(shard=several, gather_output=True), "on one rank, got one with 2 copies"),
        (lambda: row(shard=Shard.heads(1, 1, 4, 2)), "on one rank, got one with 2 copies"),
        (lambda: row(shard=Shard.even(0, 4, 2)), "along dim 1 of the weight, got one along dim 0"),
    )
    no_group = "group: expected an axonmpi.ProcessGroup or None, got str"
    refused(
        TypeError,
        (lambda: column(shard="even"), r"shard: expected an axonmpi.tensor.Shard, got str"),
        (lambda: ax.ParallelMLP(4, 4, "tp"), no_group),
        (lambda: ax.tensor_parallel_attention(4, 2, "tp"), no_group),
        (lambda: ax.ShardedDropout(0.5, "tp"), no_group),
        (lambda: ax.sequence_parallel_norm(nn.LayerNorm(3), "tp"), no_group),
        (lambda: column(process_group="tp"), f"process_{no_group}"),
        (lambda: ax.RowParallelLinear.from_linear(nn.ReLU()), "linear: expected a torch.nn.Linear, got ReLU"),
        (lambda: ax.ColumnParallelLinear(6, 8, group, group), "expected one group, got two"),
        (lambda: ax.RowParallelLinear(6, 8, group, process_group=group), "expected one group, got two"),
        (lambda: ax.VocabParallelEmbedding(10, 8, group, process_group=group), "expected one group, got two"),
        (lambda: ax.ColumnParallelLinear(6.0, 8, group), r"in_features: expected an integer, got 6\.0"),
        (lambda: ax.ColumnParallelLinear(6, 8, nn.Linear(1, 1)), "bias: expected True or False, got Linear"),
    )
    double = column(dtype=torch.float64)
    refused(  # as by torch
        RuntimeError,
        (lambda: double(torch.ones(2, 3)), "dtype"),
        (lambda: double(torch.ones(2, 3, requires_grad=True)), "dtype"),
    )
    ax.barrier()


# ---- the group stands third --------------------------------------------------------------------------------------

LAYERS = (
    lambda group: ax.ColumnParallelLinear(6, 8, group, gather_output=True),
    lambda group: ax.ColumnParallelLinear(6, 8, False, group, gather_output=True),
    lambda group: ax.RowParallelLinear(6, 8, group, input_is_parallel=False),
    lambda group: ax.ParallelMLP(6, 8, group),
    lambda group: ax.ParallelGatedMLP(6, 8, group),
    lambda group: ax.tensor_parallel_attention(6, 2, group, head_dim=4),
    lambda group: ax.VocabParallelEmbedding(10, 8, group),
    lambda group: ax.VocabParallelEmbedding(10, 8, 3, group),
)
"""Made with a group in the third place, or behind what is there else."""


@pytest.mark.ranks(4)
def test_the_group_stands_third(world) -> None:
    group = ax.DeviceMesh({"dp": 2, "tp": 2}).group("tp")
    for make in LAYERS:
        layer = together(lambda: make(group))  # noqa: B023
        groups = [inner.process_group for inner in layer.modules() if hasattr(inner, "process_group")]
        assert set(groups) == {group}
        whole = together(lambda: make(ax.ProcessGroup.mock()))  # noqa: B023
        assert sum(p.numel() for p in layer.parameters()) < sum(p.numel() for p in whole.parameters())
        whole.load_state_dict(ax.tensor.full_state_dict(layer))
        x = torch.tensor([[1, 9, 4]]) if isinstance(layer, ax.VocabParallelEmbedding) else floats(2, 3, 6)
        assert_close(layer(x), whole(x))
    layers = [make(group) for make in LAYERS]
    assert [layer.bias is None for layer in layers[:3]] == [False, True, False]
    assert [layer.padding_idx for layer in layers[-2:]] == [None, 3]
