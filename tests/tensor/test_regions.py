"""Where regions begin and end: values against numpy, transposes by the adjoint identity, gradients of gradients.

Values are the same on all ranks, or each rank's own, and an inner product counts once or adds over the ranks:

    enter   same → own      leave   own → same      split_sequence   same → own
    with sequence parallelism both own → own        join_sequence    own → same
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.divided_models import assert_close, part, randn, whole_linear
from helpers.whole_models import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import axonmpi as ax
from axonmpi.tensor import enter, join_sequence, leave, split_sequence
from axonmpi.testing import run_ranks


@dataclass(frozen=True)
class Operator:
    """A function of a tensor, a group and a dimension, and what it means."""

    apply: Callable[[Tensor, ax.ProcessGroup, int], Tensor]
    value: Callable[[list[np.ndarray], int, int], np.ndarray]
    """Its result on a rank, from all ranks' inputs and the dimension."""
    same_input: bool
    same_output: bool


def pieces(whole: np.ndarray, count: int, dim: int) -> list[np.ndarray]:
    return np.split(whole, count, dim)


OPERATORS = {
    "enter": Operator(lambda x, g, d: enter(x, g), lambda xs, r, d: xs[r], True, False),
    "leave": Operator(lambda x, g, d: leave(x, g), lambda xs, r, d: np.sum(xs, 0), False, True),
    "enter_sequence": Operator(
        lambda x, g, d: enter(x, g, sequence_parallel=True, sequence_dim=d),
        lambda xs, r, d: np.concatenate(xs, d),
        False,
        False,
    ),
    "leave_sequence": Operator(
        lambda x, g, d: leave(x, g, sequence_parallel=True, sequence_dim=d),
        lambda xs, r, d: pieces(np.sum(xs, 0), len(xs), d)[r],
        False,
        False,
    ),
    "split_sequence": Operator(split_sequence, lambda xs, r, d: pieces(xs[r], len(xs), d)[r], True, False),
    "join_sequence": Operator(join_sequence, lambda xs, r, d: np.concatenate(xs, d), False, True),
}


@dataclass(frozen=True)
class Case:
    """What is drawn: sizes, of which each is a multiple of the number of ranks along the sequence."""

    shape: tuple[int, ...]
    dim: int
    seed: int

    def input(self, operator: Operator, rank: int, size: int) -> Tensor:
        shape = list(self.shape)
        shape[self.dim] *= size
        return randn(*shape, seed=self.seed * 10 + (0 if operator.same_input else rank + 1))

    def like(self, output: Tensor, operator: Operator, rank: int) -> Tensor:
        return randn(*output.shape, seed=self.seed * 10 + 5 + (0 if operator.same_output else rank + 1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    return Case(tuple(shape), draw(st.integers(-len(shape), len(shape) - 1)), draw(st.integers(0, 1000)))


def inner(a: Tensor, b: Tensor, same: bool) -> float:
    """The inner product over all ranks."""
    found = ax.all_gather_object((a.detach() * b.detach()).sum().item())
    if same:
        assert len(set(found)) == 1
        return found[0]
    return math.fsum(found)


@pytest.mark.ranks(1, 3)
@settings(max_examples=5)
@given(case=cases())
def test_values_transposes_and_their_transposes(world, case: Case) -> None:
    for name, operator in OPERATORS.items():
        group = world.default_group
        x = case.input(operator, world.rank, world.size).requires_grad_()
        output = operator.apply(x, group, case.dim)
        inputs = [case.input(operator, rank, world.size).numpy() for rank in range(world.size)]
        expected = operator.value(inputs, world.rank, case.dim)
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-13, err_msg=name)
        assert torch.equal(x, torch.from_numpy(inputs[world.rank])), name

        y = case.like(output, operator, world.rank).requires_grad_()
        (transposed,) = torch.autograd.grad(output, x, y, retain_graph=True)
        left, right = inner(output, y, operator.same_output), inner(x, transposed, operator.same_input)
        assert (name, left) == (name, pytest.approx(right, rel=1e-12, abs=1e-12))
        (again,) = torch.autograd.grad(output, x, y, create_graph=True)
        assert_close(again, transposed, name)
        z = case.input(operator, world.rank, world.size) + 1
        (twice,) = torch.autograd.grad(again, y, z)
        assert_close(twice, operator.apply(z, group, case.dim), name)


@pytest.mark.ranks(2)
def test_a_bias_is_added_once_and_its_gradient_is_complete_on_all_ranks(world) -> None:
    for dim in (None, 0, 1):
        options = {} if dim is None else {"sequence_parallel": True, "sequence_dim": dim}
        parts = [randn(4, 8, 3, seed=rank) for rank in range(world.size)]
        bias = randn(3, seed=9).requires_grad_()
        weights = randn(4, 8, 3, seed=10)
        own_weights = weights if dim is None else part(weights, world, dim)
        result = leave(parts[world.rank].requires_grad_(), world.default_group, bias=bias, **options)
        whole = sum(parts).detach() + bias.detach()
        assert_close(result, whole if dim is None else part(whole, world, dim))
        (result * own_weights).sum().backward()
        assert_close(bias.grad, weights.sum((0, 1)))
        assert_close(parts[world.rank].grad, weights)


@pytest.mark.ranks(2)
def test_leaving_in_place_uses_the_memory_unless_others_see_it(world) -> None:
    x = randn(3, 4, seed=world.rank).requires_grad_()
    part_of_sum = x * 2
    address = part_of_sum.data_ptr()
    result = leave(part_of_sum, world.default_group, in_place=True)
    assert result.data_ptr() == address
    assert_close(result, sum(2 * randn(3, 4, seed=rank) for rank in range(world.size)))
    (gradient,) = torch.autograd.grad(result, x, randn(3, 4, seed=7))
    assert_close(gradient, 2 * randn(3, 4, seed=7))
    for options in ({}, {"in_place": True}):
        base = x * 1
        view = base.t() if options else base
        leave(view, world.default_group, **options)
        assert torch.equal(base, x)


# ---- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_nothing_is_kept_of_an_input_when_it_is_gone(world) -> None:
    """What a layer has entered may be wanted by the next one, but not by anybody once the input is gone."""
    for sequence_parallel in (False, True):
        layer = ax.ColumnParallelLinear.from_linear(whole_linear(4, 8), sequence_parallel=sequence_parallel)
        earlier = randn(2, 4, 4).requires_grad_().exp()
        x = earlier.sin()
        output = layer(x)
        kept = weakref.ref(earlier), weakref.ref(x)
        del earlier, x, output
        assert [reference() for reference in kept] == [None, None]


@pytest.mark.ranks(2)
def test_backward_gathers_a_sequence_again_and_does_not_keep_it(world) -> None:
    layer = ax.ColumnParallelLinear.from_linear(whole_linear(64, 2), sequence_parallel=True)
    kept: list[Tensor] = []
    x = randn(2, 8, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        output = layer(x)
    assert {tuple(tensor.shape) for tensor in kept} == {(2, 8, 64), (1, 64)}
    output.sum().backward()
    whole = torch.cat([randn(2, 8, 64)] * 2, 1)
    assert_close(layer.weight.grad, whole.sum((0, 1))[None])


def test_what_is_gathered_again_is_dropped_after_the_last_weight() -> None:
    def body(world: ax.World) -> list[bool]:
        backend = world.default_group.backend
        backend.overlaps = False
        gathered: list[weakref.ref[Tensor]] = []
        original = backend.all_gather

        def noted(tensor: Tensor, dim: int = 0, **options: Any) -> Tensor:
            result = original(tensor, dim, **options)
            gathered.append(weakref.ref(result))
            return result

        layers = [
            ax.ColumnParallelLinear.from_linear(whole_linear(4, 2, seed=seed), input_is_entered=True)
            for seed in (1, 2)
        ]
        x = enter(randn(2, 4, 4), world.default_group, sequence_parallel=True)
        loss = sum(layer(x).sum() for layer in layers)
        backend.all_gather = noted
        loss.backward(retain_graph=True)
        loss.backward()
        return [reference() is None for reference in gathered]

    assert run_ranks(2, body) == [[True, True]] * 2


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.not_over_double("GPUs do not compare calls")
def test_a_sequence_that_does_not_divide_is_refused_before_anything_is_sent(world) -> None:
    group, x, uneven = world.default_group, torch.zeros(2, 5, 3), torch.zeros(1, 2 + world.rank)
    message = rf"multiple of the 2 ranks .* got 5 \(dim 1 of shape \[2, 5, 3\]\) on rank {world.rank}"
    refused(
        ValueError,
        (lambda: leave(x, group, sequence_parallel=True), message),
        (lambda: split_sequence(x, group), message),
    )
    refused(
        IndexError,
        (lambda: leave(x, group, sequence_parallel=True, sequence_dim=3), "dim"),
        (lambda: leave(x, group, sequence_parallel=True, sequence_dim=-4), "dim"),
        (lambda: enter(x, group, sequence_parallel=True, sequence_dim=-4), "dim"),
        (lambda: join_sequence(x, group, 3), "dim"),
    )
    message = rf"slices .* equally long on all 2 ranks .* got {2 + world.rank} along dim 1 on rank"
    refused(
        ValueError,
        (lambda: join_sequence(uneven, group), message),
        (lambda: enter(uneven, group, sequence_parallel=True), message),
    )
