"""Divided linear layers against whole ones: values, gradients of inputs and of weights, parameters, mistakes."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.divided_models import (
    OF_MLP,
    OF_SIBLINGS,
    assert_close,
    assert_gradients,
    divided_mlp,
    part,
    randn,
    siblings,
    whole_linear,
    whole_mlp,
)
from helpers.settings import all_pairs
from helpers.whole_models import refused, together
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.tensor import Shard

SETTINGS = all_pairs(
    kind=("column", "row", "pair"),
    shape=((), (4,), (3, 4), (0, 4), (2, 0), (2, 4, 3)),
    bias=(True, False),
    sequence_parallel=(False, True),
    whole=(False, True),
    dtype=(torch.float32, torch.float64),
)
"""Shapes before the features, the sequence being dim 1, or dim 0 of one; with `whole`, columns gather their outputs
and rows get inputs that are not divided."""


@pytest.mark.ranks(1, 2)
def test_layers_give_what_whole_ones_give(world) -> None:
    for setting in SETTINGS:
        check_layer(world, **setting)


def check_layer(world, kind, shape, bias, sequence_parallel, whole, dtype) -> None:
    setting = f"{kind} {shape} bias={bias} sequence_parallel={sequence_parallel} whole={whole} {dtype}"
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

    def own(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.detach().clone() if dim is None else part(tensor, world, dim)

    x = randn(*shape, 8 if kind == "row" else 3, dtype=dtype).requires_grad_()
    expected, own_x = alone(x), own(x, of_input).requires_grad_()
    weights = randn(*expected.shape, seed=2, dtype=dtype)
    (expected * weights).sum().backward()
    output = layer(own_x)
    assert_close(output, own(expected, of_output), setting)
    (output * own(weights, of_output)).sum().backward()
    assert_close(own_x.grad, own(x.grad, of_input), setting)
    assert_gradients(layer, alone, world, dims)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.real_ranks)])
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


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 4)
def test_first_values_are_those_of_torch_under_rank_0s_seed(world) -> None:
    ax.barrier()
    torch.manual_seed(7 + world.rank)
    ax.barrier()
    if world.rank == 0:
        torch.manual_seed(7)
    ax.barrier()
    layers = [
        ax.ColumnParallelLinear(6, 8),
        ax.RowParallelLinear(8, 6, bias=False, dtype=torch.float64),
        ax.ColumnParallelLinear(4, 24, shard=Shard.packed(0, [8, 16], world.size)),
        ax.VocabParallelEmbedding(9, 2, -2, dtype=torch.float64),
    ]
    state = torch.get_rng_state()
    ax.barrier()
    generator_states = ax.all_gather_object(state.tolist())
    assert all(other == generator_states[0] for other in generator_states)
    whole = []
    if world.rank == 0:
        torch.manual_seed(7)
        whole = [nn.Linear(6, 8), nn.Linear(8, 6, bias=False, dtype=torch.float64), nn.Linear(4, 24)]
        whole.append(nn.Embedding(9, 2, -2, dtype=torch.float64))
        assert torch.equal(torch.get_rng_state(), state)
    ax.barrier()
    for layer, alone in zip(layers, ax.broadcast_object(whole), strict=True):
        state = ax.tensor.full_state_dict(layer)
        assert list(state) == list(alone.state_dict())
        assert all(torch.equal(state[name], value) for name, value in alone.state_dict().items())
        assert torch.equal(layer.full_weight(), alone.weight)
        assert alone.weight.numel() <= world.size * layer.weight.numel() < 2 * alone.weight.numel()


@pytest.mark.ranks(2)
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
        assert_close(layer(own_x), linear(x), str(shard))
        linear(x).sin().sum().backward()
        layer(own_x).sin().sum().backward()
        assert_close(own_x.grad / shard.copies, x.grad, str(shard))
        assert_close(layer.weight.grad, shard.cut(linear.weight.grad, world.rank), str(shard))
        assert_close(layer.full_weight(), linear.weight, str(shard))


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
        assert torch.equal(layer.weight, whole_linear(3, 4).weight[2 * world.rank - 2 : 2 * world.rank])
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
    def column(**options) -> ax.ColumnParallelLinear:
        return ax.ColumnParallelLinear(3, 4, **options)

    def row(**options) -> ax.RowParallelLinear:
        return ax.RowParallelLinear(4, 3, **options)

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
        (lambda: ax.VocabParallelEmbedding(10, 8, group, group=group), "expected one group, got two"),
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
        parts = [part for part in layer.modules() if hasattr(part, "process_group")]
        assert {part.process_group for part in parts} == {group}
        whole = together(lambda: make(ax.ProcessGroup.mock()))  # noqa: B023
        assert sum(p.numel() for p in layer.parameters()) < sum(p.numel() for p in whole.parameters())
        whole.load_state_dict(ax.tensor.full_state_dict(layer))
        x = torch.tensor([[1, 9, 4]]) if isinstance(layer, ax.VocabParallelEmbedding) else randn(2, 3, 6).float()
        torch.testing.assert_close(layer(x), whole(x))
    layers = [make(group) for make in LAYERS]
    assert [layer.bias is None for layer in layers[:3]] == [False, True, False]
    assert [layer.padding_idx for layer in layers[-2:]] == [None, 3]
