"""Perceptrons with divided hidden features equal those of one process."""

from __future__ import annotations

import pytest
import torch
import whole
from torch import Tensor, nn
from torch.nn import functional as F
from whole import assert_close, built, compare, part, randn, rows_of_heads, seeded, together

import axonmpi as ax
from axonmpi import ParallelGatedMLP, ParallelMLP

HIDDEN, BETWEEN = 12, 16


def own_part(world, halves: int):
    """Return a function from a parameter's name and the whole of it to this rank's part."""

    def own(name: str, tensor: Tensor) -> Tensor:
        if name == "down.bias":
            return tensor
        if name == "down.weight":
            return tensor[:, rows_of_heads([BETWEEN], 1, world.rank, world.size)]
        return tensor[rows_of_heads([BETWEEN] * halves, 1, world.rank, world.size)]

    return own


KINDS = [
    (ParallelMLP, whole.MLP, {}, {}),
    (ParallelMLP, whole.MLP, {"activation": "relu", "bias": False}, {"activation": F.relu, "bias": False}),
    (ParallelMLP, whole.MLP, {"activation": torch.tanh}, {"activation": torch.tanh}),
    (ParallelMLP, whole.MLP, {"activation": "gelu_tanh"}, {"activation": lambda x: F.gelu(x, approximate="tanh")}),
    (ParallelGatedMLP, whole.GatedMLP, {}, {}),
    (ParallelGatedMLP, whole.GatedMLP, {"activation": "gelu", "bias": True}, {"activation": F.gelu, "bias": True}),
]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("divided", [False, True])
def test_everything_equals_the_whole_perceptron(world, divided):
    for seed, (kind, of_torch, options, torch_options) in enumerate(KINDS):
        alone = built(lambda: of_torch(HIDDEN, BETWEEN, **torch_options), seed)  # noqa: B023
        block = together(lambda: kind(HIDDEN, BETWEEN, sequence_parallel=divided, **options), seed)  # noqa: B023
        halves = 2 if kind is ParallelGatedMLP else 1
        compare(world, block, alone, own_part(world, halves), x=randn(2, 8, HIDDEN), divided=divided)
        for name, layer in alone.named_children():
            assert torch.equal(block.get_submodule(name).full_weight(), layer.weight)
            bias = block.get_submodule(name).full_bias()
            assert bias is layer.bias is None or torch.equal(bias, layer.bias)


@pytest.mark.ranks(2)
def test_dropout_is_the_same_at_any_width_and_with_parts_of_the_sequence(world):
    x, p = randn(2, 8, HIDDEN), 0.4
    alone = built(lambda: whole.MLP(HIDDEN, BETWEEN))
    mask = ax.ShardedDropout(p, ax.ProcessGroup.mock(), 1, generator=seeded(5))(torch.ones(2, 8, HIDDEN))
    for divided in (False, True):
        block = together(lambda: ParallelMLP(HIDDEN, BETWEEN, dropout=p, sequence_parallel=divided))  # noqa: B023
        block.dropout.generator = seeded(5)
        own = part(x, world) if divided else x
        expected = alone(x) * mask
        assert_close(block(own), part(expected, world) if divided else expected)
        assert_close(block.eval()(own), part(alone(x), world) if divided else alone(x))


@pytest.mark.ranks(2)
def test_mistakes(world):
    for kind in (ParallelMLP, ParallelGatedMLP):
        with pytest.raises(
            ValueError, match="intermediate: expected a multiple of the 2 ranks of the group, got 15"
        ):
            kind(HIDDEN, 15)
        with pytest.raises(ValueError, match=r"activation: expected one of 'gelu', .* or a function, got 'swish'"):
            kind(HIDDEN, BETWEEN, activation="swish")
        with pytest.raises(ValueError, match=r"activation: expected one without parameters, got PReLU"):
            kind(HIDDEN, BETWEEN, activation=nn.PReLU())
    with pytest.raises(ValueError, match="p: expected the chance"):
        ParallelMLP(HIDDEN, BETWEEN, dropout=2.0)


@pytest.mark.ranks(2)
def test_devices_and_dtypes(world):
    block = ParallelMLP(HIDDEN, BETWEEN, device="meta", dtype=torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in block.parameters())
    assert block.up.weight.shape == (BETWEEN // 2, HIDDEN)
    gated = ParallelGatedMLP(HIDDEN, BETWEEN, device="meta", dtype=torch.float64)
    assert gated.gate_up.weight.shape == (BETWEEN, HIDDEN)
    assert gated.down.weight.dtype == torch.float64
