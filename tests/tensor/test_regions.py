"""Where regions begin and end: values against numpy, transposes by the adjoint identity, gradients of gradients.

Values are the same on all ranks, or each rank's own, and an inner product counts once or adds over the ranks:

    enter   same → own      leave   own → same      split_sequence   same → own
    with sequence parallelism both own → own        join_sequence    own → same
"""

import math
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.compare import assert_precise, refused
from helpers.transformer_parts import part, randn, whole_linear
from torch import Tensor

import axonmpi as ax
from axonmpi.tensor import enter, join_sequence, leave, split_sequence
from axonmpi.testing import run_ranks


class Operator(NamedTuple):
    """A function of a tensor, a group and a dimension, and what it means."""

    apply: Callable[[Tensor, ax.ProcessGroup, int], Tensor]
    value: Callable[[list[np.ndarray], int, int], np.ndarray]
    """Its result on a rank, from all ranks' inputs and the dimension."""
    same_input: bool
    same_output: bool


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
        lambda xs, r, d: np.split(np.sum(xs, 0), len(xs), d)[r],
        False,
        False,
    ),
    "split_sequence": Operator(split_sequence, lambda xs, r, d: np.split(xs[r], len(xs), d)[r], True, False),
    "join_sequence": Operator(join_sequence, lambda xs, r, d: np.concatenate(xs, d), False, True),
}


def inner(a: Tensor, b: Tensor, same: bool) -> float:
    """The inner product over all ranks."""
    found = ax.all_gather_object((a.detach() * b.detach()).sum().item())
    if same:
        assert len(set(found)) == 1
        return found[0]
    return math.fsum(found)


@pytest.mark.ranks(1, 3)
def test_values_transposes_and_their_transposes(world, seed) -> None:
    chance = random.Random(seed)
    for operator in OPERATORS:
        for _ in range(5):
            check_operator(world, operator, [chance.randint(0, 3) for _ in range(chance.randint(1, 3))], chance)


def check_operator(world, name: str, shape: list[int], chance: random.Random) -> None:
    """Sizes along the sequence are multiples of the number of ranks."""
    operator, group = OPERATORS[name], world.default_group
    dim, seed = chance.randrange(-len(shape), len(shape)), chance.randrange(1000)
    shape[dim] *= world.size
    inputs = [randn(*shape, seed=10 * seed + rank * (not operator.same_input)) for rank in range(world.size)]
    x = inputs[world.rank].clone().requires_grad_()
    output = operator.apply(x, group, dim)
    expected = operator.value([tensor.numpy() for tensor in inputs], world.rank, dim)
    assert_precise([output, x], [torch.from_numpy(expected), inputs[world.rank]], f"{name} {shape} {dim}")

    y = randn(*output.shape, seed=10 * seed + 5 + world.rank * (not operator.same_output)).requires_grad_()
    (transposed,) = torch.autograd.grad(output, x, y, retain_graph=True)
    left, right = inner(output, y, operator.same_output), inner(x, transposed, operator.same_input)
    assert (name, left) == (name, pytest.approx(right, rel=1e-12, abs=1e-12))
    (again,) = torch.autograd.grad(output, x, y, create_graph=True)
    z = x.detach() + 1
    (twice,) = torch.autograd.grad(again, y, z)
    assert_precise([again, twice], [transposed, operator.apply(z, group, dim)], name)


@pytest.mark.ranks(2)
def test_a_bias_is_added_once_and_its_gradient_is_complete_on_all_ranks(world) -> None:
    for dim in (None, 0, 1):
        options = {} if dim is None else {"sequence_parallel": True, "sequence_dim": dim}
        parts = [randn(4, 8, 3, seed=rank) for rank in range(world.size)]
        bias, weights = randn(3, seed=9).requires_grad_(), randn(4, 8, 3, seed=10)
        result = leave(parts[world.rank].requires_grad_(), world.default_group, bias=bias, **options)
        (result * part(weights, world, dim)).sum().backward()
        found = [result, bias.grad, parts[world.rank].grad]
        assert_precise(found, [part(sum(parts) + bias, world, dim), weights.sum((0, 1)), weights])


@pytest.mark.ranks(2)
def test_leaving_in_place_uses_the_memory_unless_others_see_it(world) -> None:
    x = randn(3, 4, seed=world.rank).requires_grad_()
    part_of_sum = x * 2
    result = leave(part_of_sum, world.default_group, in_place=True)
    assert result.data_ptr() == part_of_sum.data_ptr()
    (gradient,) = torch.autograd.grad(result, x, randn(3, 4, seed=7))
    total = sum(2 * randn(3, 4, seed=rank) for rank in range(world.size))
    assert_precise([result, gradient], [total, 2 * randn(3, 4, seed=7)])
    bases = [x * 1, x * 1]
    leave(bases[0], world.default_group)
    leave(bases[1].t(), world.default_group, in_place=True)
    assert_precise(bases, [x, x])


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
    x, kept = randn(2, 8, 64).requires_grad_(), set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(tuple(t.shape)) or t, lambda t: t):
        output = layer(x)
    assert kept == {(2, 8, 64), (1, 64)}
    output.sum().backward()
    assert_precise(layer.weight.grad, 2 * randn(2, 8, 64).sum((0, 1))[None])


def test_what_is_gathered_again_is_dropped_after_the_last_weight() -> None:
    def body(world: ax.World) -> list[bool]:
        backend, gathered = world.default_group.backend, []
        backend.overlaps, original = False, backend.all_gather

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
    unequal = rf"slices .* equally long on all 2 ranks .* got {2 + world.rank} along dim 1 on rank"
    refused(
        ValueError,
        (lambda: leave(x, group, sequence_parallel=True), message),
        (lambda: split_sequence(x, group), message),
        (lambda: join_sequence(uneven, group), unequal),
        (lambda: enter(uneven, group, sequence_parallel=True), unequal),
    )
    refused(
        IndexError,
        (lambda: leave(x, group, sequence_parallel=True, sequence_dim=3), "dim"),
        (lambda: leave(x, group, sequence_parallel=True, sequence_dim=-4), "dim"),
        (lambda: enter(x, group, sequence_parallel=True, sequence_dim=-4), "dim"),
        (lambda: join_sequence(x, group, 3), "dim"),
    )
