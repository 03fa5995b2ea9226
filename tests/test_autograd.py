"""ax.autograd: values against numpy, transposes by the adjoint identity, gradients of gradients, a real use.

An operator A and its backward Aᵀ belong together if ⟨Ax, y⟩ = ⟨x, Aᵀy⟩ for all x and y. A value is either each
rank's own, and an inner product then adds over the ranks, or the same on all ranks, and then counts once:

    copy             same → own        scatter   same → own        reduce_scatter   own → own
    reduce           own → same        gather    own → same        all_gather       own → own
                                                                   all_to_all       own → own
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import axonmpi as ax

OPERATORS = ["copy", "reduce", "scatter", "gather", "reduce_scatter", "all_gather", "all_to_all"]
SAME_INPUT = {"copy", "scatter"}
SAME_OUTPUT = {"reduce", "gather"}
DIMS: dict[str, tuple[str, ...]] = dict.fromkeys(OPERATORS, ("dim",))
DIMS |= {"copy": (), "reduce": (), "all_to_all": ("split_dim", "concat_dim")}
UNEVEN = {"gather": "dim", "all_gather": "dim", "all_to_all": "concat_dim"}
"""Along which dimension the ranks' inputs may differ in size."""

pytestmark = pytest.mark.ranks(2, 3)
OWN, SALT_OF_Y, SALT_OF_Z = 1, 2, 3


@dataclass(frozen=True)
class Case:
    """What is drawn for a test, and what it means for each operator."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    """For each rank, the size along the dimension in which ranks may differ."""
    dims: tuple[int, int]
    dtype: torch.dtype
    seed: int

    def options(self, name: str) -> dict[str, int]:
        """The dimensions for the operator, negative ones too."""
        count = len(self.shape)
        return {option: dim % (2 * count) - count for option, dim in zip(DIMS[name], self.dims, strict=False)}

    def input(self, name: str, rank: int, salt: int = 0) -> Tensor:
        """A rank's input to the operator; any rank can make those of all others."""
        shape = list(self.shape)
        if name in UNEVEN:
            shape[self.options(name)[UNEVEN[name]]] = self.sizes[rank]
        return self._random(shape, salt, 0 if name in SAME_INPUT else OWN + rank)

    def like_output(self, name: str, output: Tensor, rank: int) -> Tensor:
        """Something to take the inner product of the output with."""
        return self._random(list(output.shape), SALT_OF_Y, 0 if name in SAME_OUTPUT else OWN + rank)

    def _random(self, shape: list[int], salt: int, whose: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + salt * 10 + whose)
        return torch.randn(shape, dtype=self.dtype, generator=generator)

    def apply(self, name: str, x: Tensor) -> Tensor:
        result: Tensor = getattr(ax.autograd, name)(x, **self.options(name))
        return result


cases = st.builds(
    Case,
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(*[st.integers(0, 5)] * 4),
    dims=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    seed=st.integers(0, 2**20),
)


def expected_value(name: str, case: Case, rank: int, size: int) -> np.ndarray:
    """The operator's result on one rank, from all ranks' inputs."""
    dims = list(case.options(name).values())
    inputs = [case.input(name, other).numpy() for other in range(size)]
    if name == "copy":
        return inputs[rank]
    if name == "reduce":
        return np.sum(inputs, axis=0)
    if name == "scatter":
        return np.array_split(inputs[rank], size, *dims)[rank]
    if name == "reduce_scatter":
        return np.array_split(np.sum(inputs, axis=0), size, *dims)[rank]
    if name == "all_to_all":
        return np.concatenate([np.array_split(part, size, dims[0])[rank] for part in inputs], dims[1])
    return np.concatenate(inputs, *dims)


def inner(a: Tensor, b: Tensor, same: bool) -> float:
    """The inner product over all ranks, of values that are the same on all of them or each rank's own."""
    parts = ax.all_gather_object((a.detach().conj() * b.detach()).sum().real.item())
    if same:
        assert len(set(parts)) == 1
        return parts[0]
    return math.fsum(parts)


# ---- the operators ----------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@settings(max_examples=10, derandomize=True, database=None)
@given(case=cases)
def test_values_are_those_of_numpy_and_backwards_are_adjoints(world, case: Case) -> None:
    """And the backward of a backward is the operator again."""
    for name in OPERATORS:
        x = case.input(name, world.rank).requires_grad_()
        output = case.apply(name, x)
        expected = expected_value(name, case, world.rank, world.size)
        assert (name, output.dtype, output.shape) == (name, x.dtype, expected.shape)
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-13, err_msg=name)
        assert torch.equal(x, case.input(name, world.rank)), name

        y = case.like_output(name, output, world.rank).requires_grad_()
        (transposed,) = torch.autograd.grad(output, x, y, create_graph=True)
        assert (name, transposed.shape) == (name, x.shape)
        left = inner(output, y, name in SAME_OUTPUT)
        right = inner(x, transposed, name in SAME_INPUT)
        assert (name, left) == (name, pytest.approx(right, rel=1e-12, abs=1e-12))

        z = case.input(name, world.rank, SALT_OF_Z)
        (twice,) = torch.autograd.grad(transposed, y, z)
        np.testing.assert_allclose(twice.numpy(), case.apply(name, z).numpy(), rtol=0, atol=1e-12, err_msg=name)


def test_gradients_of_plain_sums_in_any_dtype(world) -> None:
    """`sum()` hands backward a gradient without memory of its own (all strides are 0)."""
    for name in OPERATORS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            x = torch.ones(5, 6, dtype=dtype).t().requires_grad_()
            output = getattr(ax.autograd, name)(x)
            output.real.sum().backward() if dtype.is_complex else output.sum().backward()
            factor = world.size if name in ("copy", "all_gather") else 1
            assert output.dtype is x.grad.dtype is dtype
            assert torch.equal(x.grad, torch.full((6, 5), factor, dtype=dtype)), (name, dtype)


@pytest.mark.ranks(3)
def test_only_the_group_takes_part(world) -> None:
    group = world.new_group([2, 0])
    first, second = torch.arange(4.0) + 20, torch.arange(4.0)
    both, total = torch.cat([first, second]), first + second
    for name in OPERATORS:
        x = torch.arange(4.0).add(10 * world.rank).requires_grad_()
        if not group.contains(world.rank):
            with pytest.raises(ValueError, match=f"rank {world.rank} is not in this group"):
                getattr(ax.autograd, name)(x, group)
            continue
        output = getattr(ax.autograd, name)(x, group)
        output.sum().backward()
        own_part = slice(2 * group.rank, 2 * group.rank + 2)
        expected = {
            "copy": x,
            "reduce": total,
            "scatter": x[own_part],
            "gather": both,
            "reduce_scatter": total[own_part],
            "all_gather": both,
            "all_to_all": torch.cat([first[own_part], second[own_part]]),
        }[name]
        assert torch.equal(output, expected), name
        assert torch.equal(x.grad, torch.full((4,), 2.0 if name in ("copy", "all_gather") else 1.0)), name


# ---- as parallel layers use them --------------------------------------------------------------------------


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def own_slice(tensor: Tensor, world: ax.World, dim: int) -> Tensor:
    return tensor.detach().tensor_split(world.size, dim)[world.rank].clone().requires_grad_()


def assert_close(found: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_cut_mlp_has_the_gradients_of_the_whole_one(world, sequence_parallel: bool) -> None:
    x, up, down = random_tensors((2, 7, 6), (6, 10), (10, 6))
    whole = F.gelu(x @ up) @ down
    whole.pow(2).sum().backward()

    own_up, own_down = own_slice(up, world, 1), own_slice(down, world, 0)
    if sequence_parallel:
        own_x = own_slice(x, world, 1)
        result = ax.autograd.reduce_scatter(F.gelu(ax.autograd.all_gather(own_x, dim=1) @ own_up) @ own_down, dim=1)
        expected, x_gradient = (t.tensor_split(world.size, 1)[world.rank] for t in (whole, x.grad))
    else:
        own_x = x.detach().clone().requires_grad_()
        result = ax.autograd.reduce(F.gelu(ax.autograd.copy(own_x) @ own_up) @ own_down)
        expected, x_gradient = whole, x.grad
    result.pow(2).sum().backward()

    assert_close(result, expected)
    assert_close(own_x.grad, x_gradient)
    assert_close(own_up.grad, up.grad.tensor_split(world.size, 1)[world.rank])
    assert_close(own_down.grad, down.grad.tensor_split(world.size, 0)[world.rank])


def test_attention_over_a_cut_sequence_exchanges_tokens_for_heads(world) -> None:
    """Ulysses: tokens are cut over the ranks, but for attention the heads; 7 tokens and 5 heads do not divide."""
    (x,) = random_tensors((7, 5, 4))  # [T, heads, D]

    def attention(t: Tensor) -> Tensor:
        heads = t.transpose(0, 1)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(0, 1)

    whole = attention(x)
    whole.pow(3).sum().backward()

    tokens = own_slice(x, world, 0)
    heads = ax.autograd.all_to_all(tokens, split_dim=1, concat_dim=0)
    assert heads.shape[0] == 7
    result = ax.autograd.all_to_all(attention(heads), split_dim=0, concat_dim=1)
    result.pow(3).sum().backward()
    assert_close(result, whole.tensor_split(world.size)[world.rank])
    assert_close(tokens.grad, x.grad.tensor_split(world.size)[world.rank])


def test_a_gradient_penalty_through_a_cut_layer(world) -> None:
    x, weight = random_tensors((7, 4), (4, 3))

    def penalty_gradients(x: Tensor, weight: Tensor, cut: bool) -> tuple[Tensor, ...]:
        if cut:
            part = ax.autograd.scatter(x) @ ax.autograd.copy(weight)
            output = ax.autograd.gather(F.gelu(part))
        else:
            output = F.gelu(x @ weight)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), (x, weight))

    for found, expected in zip(
        penalty_gradients(x, weight, cut=True), penalty_gradients(x, weight, cut=False), strict=True
    ):
        assert_close(found, expected)


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_cannot_be_cut_joined_or_followed(world) -> None:
    for name in OPERATORS:
        operator = getattr(ax.autograd, name)
        for dtype in (torch.int64, torch.bool):
            with pytest.raises(TypeError, match=f"{dtype} have no gradient"):
                operator(torch.ones(4, dtype=dtype))
        with pytest.raises(TypeError, match=r"expected a torch.Tensor, got list"):
            operator([1.0, 2.0])
        for option in DIMS[name]:
            for dim in (2, -3):
                with pytest.raises(IndexError, match=f"{option}: expected -2 to 1 .* got {dim}"):
                    operator(torch.ones(4, 4), **{option: dim})
        if DIMS[name] and not name.endswith("gather"):
            with pytest.raises(IndexError, match="dim: expected a tensor of at least 1"):
                operator(torch.tensor(1.0))
    ax.barrier()


OTHERS = {
    "dtype": lambda: (torch.ones(4, 4, dtype=torch.float64), {}),
    "size of the last dimension": lambda: (torch.ones(4, 8), {}),
    "number of dimensions": lambda: (torch.ones(4, 4, 1), {}),
    "dimension": lambda: (torch.ones(4, 4), {"dim": 1}),
    "split dimension": lambda: (torch.ones(4, 4), {"split_dim": 1}),
    "concat dimension": lambda: (torch.ones(4, 4), {"concat_dim": 1}),
}
"""What the last rank's call differs in."""


@pytest.mark.ranks(2, 4)
def test_every_rank_learns_of_a_call_that_differs(world) -> None:
    """In forward, or in backward where forward is local."""
    unnoticed = []
    for name in OPERATORS:
        for other, make in OTHERS.items():
            x, options = make() if world.rank == world.size - 1 else (torch.ones(4, 4), {})
            if set(make()[1]) <= set(DIMS[name]):
                try:
                    getattr(ax.autograd, name)(x.requires_grad_(), **options).sum().backward()
                except ax.CollectiveMismatchError:
                    continue
                unnoticed.append((name, other))
    ax.barrier()
    assert unnoticed == []


def test_a_tensor_without_dimensions_is_one_of_one_element(world) -> None:
    for name, slope in (("gather", 1), ("all_gather", world.size)):
        x = torch.tensor(float(world.rank), requires_grad=True)
        joined = getattr(ax.autograd, name)(x)
        assert joined.tolist() == list(range(world.size)) == ax.all_gather(x.detach()).tolist()
        joined.sum().backward()
        assert (x.grad.shape, x.grad.item()) == ((), slope)
