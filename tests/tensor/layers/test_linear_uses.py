"""Divided linear layers used in every way in which layers are used: gradients are those of whole layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.divided_models import (
    MLP,
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
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi.tensor.regions import enter

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True])


def compare(world: ax.World, use: Callable[[MLP, Tensor], None], *, sequence_parallel: bool) -> None:
    """Train a whole and a divided MLP for a step in the same way, and compare all gradients."""
    whole = whole_mlp(6, 8)
    divided = divided_mlp(whole, sequence_parallel=sequence_parallel)
    x = randn(2, 8, 6).requires_grad_()
    own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
    use(whole, x)
    use(divided, own_x)
    assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad)
    assert_gradients(divided, whole, world, OF_MLP)


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
    (of_weight,) = torch.autograd.grad(loss, model.up.weight, retain_graph=True)
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert of_weight.shape == model.up.weight.shape
    loss.backward()
    assert_close(of_input, x.grad)
    assert_close(of_weight, model.up.weight.grad)


def checkpointed(model: MLP, x: Tensor) -> None:
    for use_reentrant in (False, True):
        checkpoint(model, x, use_reentrant=use_reentrant).sin().sum().backward()


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
    *(used_twice, output_unused, only_some_gradients, checkpointed, checkpointed_in_part, input_without_gradient),
    *(weights_without_gradient, one_bias_and_then_the_other, after_a_look, changed_in_place),
    seen_by_a_sibling_without_gradients,
]


@pytest.mark.ranks(2)
@SEQUENCE
def test_ways_of_using(world, sequence_parallel: bool) -> None:
    for use in USES:
        compare(world, use, sequence_parallel=sequence_parallel)


@pytest.mark.ranks(2)
@SEQUENCE
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


@pytest.mark.ranks(2)
@SEQUENCE
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


@pytest.mark.ranks(2)
@SEQUENCE
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


@pytest.mark.ranks(2)
@SEQUENCE
def test_after_a_backward_that_failed_gradients_are_right(world, sequence_parallel: bool) -> None:
    whole, divided = siblings(world, sequence_parallel)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    x = randn(2, 8, 6).requires_grad_()
    own_x = (part(x, world, 1) if sequence_parallel else x.detach().clone()).requires_grad_()
    loss = divided(own_x).sin().sum()
    handle = divided.third.weight.register_hook(fail)  # the last layer is the first in backward
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    handle.remove()
    divided.zero_grad()
    own_x.grad = None
    loss.backward()
    whole(x).sin().sum().backward()
    assert_close(own_x.grad, part(x.grad, world, 1) if sequence_parallel else x.grad)
    assert_gradients(divided, whole, world, OF_SIBLINGS)
