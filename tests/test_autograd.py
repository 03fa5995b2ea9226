"""ax.autograd: values against numpy, transposes by the adjoint identity, gradients of gradients.

An operator A and its backward Aᵀ belong together if ⟨Ax, y⟩ = ⟨x, Aᵀy⟩ for all x and y. A value is either each
rank's own, and an inner product then adds over the ranks, or the same on all ranks, and then counts once:

    copy             same → own        scatter   same → own        reduce_scatter   own → own
    reduce           own → same        gather    own → same        all_gather       own → own
    scan             own → own        exscan    own → own        all_to_all       own → own
"""

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from torch import Tensor

import axonmpi as ax

OPERATORS: dict[str, Callable[..., Tensor]] = {
    name: getattr(ax.autograd, name)
    for name in ("copy", "reduce", "scatter", "gather", "reduce_scatter", "all_gather", "all_to_all", "scan")
}
OPERATORS["exscan"] = partial(ax.autograd.scan, exclusive=True)
SAME_INPUT = {"copy", "scatter"}
SAME_OUTPUT = {"reduce", "gather"}
DIMS: dict[str, tuple[str, ...]] = dict.fromkeys(OPERATORS, ("dim",))
DIMS |= {"copy": (), "reduce": (), "scan": (), "exscan": (), "all_to_all": ("split_dim", "concat_dim")}
UNEVEN = {"gather": "dim", "all_gather": "dim", "all_to_all": "concat_dim"}
"""Along which dimension the ranks' inputs may differ in size."""

pytestmark = pytest.mark.ranks(2, 3)
OWN, SALT_OF_Y, SALT_OF_Z = 1, 2, 3


class Case(NamedTuple):
    """Settings that are drawn for a test, and their meaning for each operator."""

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
        seed = self.seed * 100 + salt * 10 + whose
        return torch.randn(shape, dtype=self.dtype, generator=torch.Generator().manual_seed(seed))

    def apply(self, name: str, x: Tensor, group: ax.ProcessGroup | None = None) -> Tensor:
        return OPERATORS[name](x, group=group, **self.options(name))


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    shape = [draw.randint(0, 5) for _ in range(draw.randint(1, 3))]
    sizes = [draw.randint(0, 5) for _ in range(4)]
    dims = draw.randint(0, 5), draw.randint(0, 5)
    return Case(tuple(shape), tuple(sizes), dims, draw.choice([torch.float64, torch.complex128]), seed)


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
    if name.endswith("scan"):
        return np.sum(inputs[: rank + (name == "scan")], axis=0) + np.zeros_like(inputs[rank])
    return np.concatenate(inputs, *dims)


def factor(name: str, rank: int, size: int) -> int:
    """The gradient of an input of which all outputs are added up."""
    if name.endswith("scan"):
        return size - rank - (name == "exscan")
    return size if name in ("copy", "all_gather") else 1


def inner(a: Tensor, b: Tensor, same: bool) -> float:
    """The inner product over all ranks, of values that are the same on all of them or each rank's own."""
    parts = ax.all_gather_object((a.detach().conj() * b.detach()).sum().real.item())
    if same:
        assert len(set(parts)) == 1
        return parts[0]
    return math.fsum(parts)


# ---- the operators ----------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_values_are_those_of_numpy_and_backwards_are_adjoints(world: ax.World, seed: int) -> None:
    """And the backward of a backward is the operator again."""
    for case, name in itertools.product(map(drawn, range(seed, seed + 10)), OPERATORS):
        x = case.input(name, world.rank).requires_grad_()
        output = case.apply(name, x)
        expected = expected_value(name, case, world.rank, world.size)
        assert_close(output, torch.from_numpy(expected), 1e-13, f"{name} of {case}")
        assert torch.equal(x, case.input(name, world.rank)), name

        y = case.like_output(name, output, world.rank).requires_grad_()
        (transposed,) = torch.autograd.grad(output, x, y, create_graph=True)
        assert transposed.shape == x.shape, case
        left = inner(output, y, name in SAME_OUTPUT)
        right = inner(x, transposed, name in SAME_INPUT)
        assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12), (name, case)

        z = case.input(name, world.rank, SALT_OF_Z)
        (twice,) = torch.autograd.grad(transposed, y, z)
        assert_close(twice, case.apply(name, z), 1e-12, f"{name} of {case}")


def test_gradients_of_plain_sums_in_any_dtype(world) -> None:
    """`sum()` hands backward a gradient without memory of its own (all strides are 0)."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    for name, dtype in itertools.product(OPERATORS, dtypes):
        x = torch.ones(5, 6, dtype=dtype).t().requires_grad_()
        output = OPERATORS[name](x)
        output.real.sum().backward() if dtype.is_complex else output.sum().backward()
        assert output.dtype is dtype
        assert_equal(
            x.grad, torch.full((6, 5), factor(name, world.rank, world.size), dtype=dtype), f"{name} {dtype}"
        )


@pytest.mark.ranks(3)
def test_only_the_group_takes_part(world: ax.World, seed: int) -> None:
    group, case = world.new_group([2, 0]), drawn(seed)
    for name in OPERATORS:
        if not group.contains(world.rank):
            wrong = partial(case.apply, name, torch.ones(case.shape), group)
            refused(ValueError, (wrong, f"rank {world.rank} is not in this group"))
            continue
        x = case.input(name, group.rank).requires_grad_()
        output = case.apply(name, x, group)
        assert_close(output, torch.from_numpy(expected_value(name, case, group.rank, group.size)), 1e-13, name)
        output.real.sum().backward()
        assert_equal(x.grad, torch.full_like(x, factor(name, group.rank, 2)), name)


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_cannot_be_cut_joined_or_followed(world) -> None:
    square = torch.ones(4, 4)
    for name in OPERATORS:
        operator = OPERATORS[name]
        refused(
            TypeError,
            (partial(operator, square.long()), "torch.int64 have no gradient"),
            (partial(operator, square.bool()), "torch.bool have no gradient"),
            (partial(operator, [1.0, 2.0]), "expected a torch.Tensor, got list"),
        )
        for option, dim in itertools.product(DIMS[name], (2, -3)):
            wrong = partial(operator, square, **{option: dim})
            refused(IndexError, (wrong, f"{option}: expected -2 to 1 .* got {dim}"))
        if DIMS[name] and not name.endswith("gather"):
            refused(IndexError, (partial(operator, torch.tensor(1.0)), "dim: expected a tensor of at least 1"))
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


@pytest.mark.compares_calls
@pytest.mark.ranks(2, 4)
def test_every_rank_learns_of_a_call_that_differs(world) -> None:
    """In forward, or in backward where forward is local."""
    unnoticed = []
    for name, (other, make) in itertools.product(OPERATORS, OTHERS.items()):
        x, options = make() if world.rank == world.size - 1 else (torch.ones(4, 4), {})
        if set(make()[1]) <= set(DIMS[name]):
            try:
                OPERATORS[name](x.requires_grad_(), **options).sum().backward()
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
