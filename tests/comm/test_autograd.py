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

EACH_OPERATOR = pytest.mark.parametrize("name", OPERATORS)
ON_RANKS = pytest.mark.ranks(1, 2, 3, 4)
SOME_RANKS = pytest.mark.ranks(1, 3)
EXAMPLES = settings(max_examples=15, deadline=None)
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


@ON_RANKS
@EXAMPLES
@given(case=cases)
def test_value_is_that_of_numpy(world, case: Case) -> None:
    for name in OPERATORS:
        x = case.input(name, world.rank)
        result = case.apply(name, x)
        expected = expected_value(name, case, world.rank, world.size)
        assert (name, result.dtype, result.shape) == (name, x.dtype, expected.shape)
        np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-13, err_msg=name)
        assert torch.equal(x, case.input(name, world.rank)), name


@ON_RANKS
@EXAMPLES
@given(case=cases)
def test_backward_is_the_adjoint(world, case: Case) -> None:
    for name in OPERATORS:
        x = case.input(name, world.rank).requires_grad_()
        output = case.apply(name, x)
        y = case.like_output(name, output, world.rank)
        (transposed,) = torch.autograd.grad(output, x, y)
        assert (name, transposed.shape) == (name, x.shape)
        left = inner(output, y, name in SAME_OUTPUT)
        right = inner(x, transposed, name in SAME_INPUT)
        assert (name, left) == (name, pytest.approx(right, rel=1e-12, abs=1e-12))


@ON_RANKS
@EXAMPLES
@given(case=cases)
def test_backward_of_backward_is_the_operator(world, case: Case) -> None:
    for name in OPERATORS:
        x = case.input(name, world.rank).requires_grad_()
        output = case.apply(name, x)
        y = case.like_output(name, output, world.rank).requires_grad_()
        (transposed,) = torch.autograd.grad(output, x, y, create_graph=True)
        z = case.input(name, world.rank, SALT_OF_Z)
        (twice,) = torch.autograd.grad(transposed, y, z)
        expected = case.apply(name, z).numpy()
        np.testing.assert_allclose(twice.numpy(), expected, rtol=0, atol=1e-12, err_msg=name)


@ON_RANKS
@EACH_OPERATOR
def test_gradient_of_a_plain_sum(world, name: str) -> None:
    """`sum()` hands backward a gradient without memory of its own (all strides are 0)."""
    x = torch.ones(5, 6, dtype=torch.float64).t().requires_grad_()
    getattr(ax.autograd, name)(x).sum().backward()
    expected = world.size if name in ("copy", "all_gather") else 1
    assert torch.equal(x.grad, torch.full((6, 5), float(expected), dtype=torch.float64))


@SOME_RANKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@EACH_OPERATOR
def test_dtype_is_kept(world, name: str, dtype: torch.dtype) -> None:
    x = torch.ones(6, 5, dtype=dtype, requires_grad=True)
    output = getattr(ax.autograd, name)(x)
    (output * 2).abs().sum().backward()
    assert output.dtype is x.grad.dtype is dtype


@pytest.mark.ranks(3, 4)
@EACH_OPERATOR
def test_only_the_group_takes_part(world, name: str) -> None:
    group = world.new_group([2, 0])
    x = torch.arange(4.0).add(10 * world.rank).requires_grad_()
    if not group.contains(world.rank):
        with pytest.raises(ValueError, match=f"rank {world.rank} is not in this group"):
            getattr(ax.autograd, name)(x, group)
        return
    output = getattr(ax.autograd, name)(x, group)
    output.sum().backward()
    first, second = torch.arange(4.0) + 20, torch.arange(4.0)
    expected = {
        "copy": x,
        "reduce": first + second,
        "scatter": x.tensor_split(2)[group.rank],
        "gather": torch.cat([first, second]),
        "reduce_scatter": (first + second).tensor_split(2)[group.rank],
        "all_gather": torch.cat([first, second]),
        "all_to_all": torch.cat([part.tensor_split(2)[group.rank] for part in (first, second)]),
    }[name]
    assert torch.equal(output, expected)
    assert torch.equal(x.grad, torch.full((4,), 2.0 if name in ("copy", "all_gather") else 1.0))


# ---- as parallel layers use them --------------------------------------------------------------------------


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def own_slice(tensor: Tensor, world: ax.World, dim: int) -> Tensor:
    return tensor.detach().tensor_split(world.size, dim)[world.rank].clone().requires_grad_()


def assert_close(found: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), rtol=0, atol=1e-11)


@ON_RANKS
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


@ON_RANKS
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


@ON_RANKS
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


@SOME_RANKS
@EACH_OPERATOR
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_have_no_gradient(world, name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{dtype} have no gradient"):
        getattr(ax.autograd, name)(torch.ones(4, dtype=dtype))


@SOME_RANKS
@EACH_OPERATOR
def test_takes_tensors_only(world, name: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, got list"):
        getattr(ax.autograd, name)([1.0, 2.0])


@SOME_RANKS
@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OPERATORS for option in DIMS[name]])
@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range(world, name: str, option: str, dim: int) -> None:
    with pytest.raises(IndexError, match=f"dim: expected -2 to 1 .* got {dim}"):
        getattr(ax.autograd, name)(torch.ones(4, 4), **{option: dim})


@SOME_RANKS
@pytest.mark.parametrize("name", [name for name in OPERATORS if DIMS[name] and not name.endswith("gather")])
def test_a_tensor_without_dimensions_cannot_be_cut(world, name: str) -> None:
    with pytest.raises(IndexError, match="dim: expected"):
        getattr(ax.autograd, name)(torch.tensor(1.0))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["reduce", "reduce_scatter"])
def test_shapes_that_differ_are_refused_on_every_rank(world, name: str) -> None:
    with pytest.raises(ax.CollectiveMismatchError):
        getattr(ax.autograd, name)(torch.ones(4 + (world.rank == 0)))


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
@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name in OPERATORS for other in OTHERS if set(OTHERS[other]()[1]) <= set(DIMS[name])],
)
def test_every_rank_learns_of_a_call_that_differs(world, name: str, other: str) -> None:
    """In forward, or in backward where forward is local."""
    x, options = OTHERS[other]() if world.rank == world.size - 1 else (torch.ones(4, 4), {})
    with pytest.raises(ax.CollectiveMismatchError):
        getattr(ax.autograd, name)(x.requires_grad_(), **options).sum().backward()
    ax.barrier()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("name", "slope"), [("gather", 1), ("all_gather", None)])
def test_a_tensor_without_dimensions_is_one_of_one_element(world, name: str, slope: int | None) -> None:
    x = torch.tensor(float(world.rank), requires_grad=True)
    joined = getattr(ax.autograd, name)(x)
    assert joined.tolist() == list(range(world.size)) == ax.all_gather(x.detach()).tolist()
    joined.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == ()
    assert x.grad.item() == (slope or world.size)
