"""ax.autograd.fetch against numpy's padding of the whole; slices of given sizes against numpy's.

An operator A and its backward Aᵀ belong together if ⟨Ax, y⟩ = ⟨x, Aᵀy⟩, summed over the ranks, for all x and y.
"""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from helpers.compare import assert_close, refused
from torch import Tensor

import axonmpi as ax
from axonmpi.utils.rows import MODES

pytestmark = pytest.mark.ranks(2, 3)
PADDING = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
FAR = 8


def drawn(seed: int, ranks: int) -> tuple[list[int], list[tuple[int, int]], int, str, list[int]]:
    """Sizes of parts, ranges of results, the dimension, the mode, and the shape without that dimension."""
    draw = random.Random(seed)
    sizes = [draw.choice((0, 1, 2, 5)) for _ in range(ranks)]
    mode = draw.choice(MODES) if sum(sizes) else "zeros"
    starts = [draw.randint(-FAR, sum(sizes) + FAR) for _ in range(ranks)]
    ranges = [(start, draw.randint(start, sum(sizes) + FAR)) for start in starts]
    return sizes, ranges, draw.randint(0, 2), mode, [draw.randint(0, 3), draw.randint(1, 3)]


def random_tensor(shape: list[int], dim: int, size: int, seed: int) -> Tensor:
    whole = [*shape[:dim], size, *shape[dim:]]
    return torch.randn(whole, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padded_part(whole: Tensor, dim: int, mode: str, start: int, stop: int, value: float) -> Tensor:
    width = [(2 * FAR, 2 * FAR) if number == dim else (0, 0) for number in range(whole.dim())]
    options = {"constant_values": value} if mode == "zeros" else {}
    if not whole.numel():
        return torch.full([*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :]], value, dtype=whole.dtype)
    padded = np.pad(whole.numpy(), width, PADDING[mode], **options)
    return torch.from_numpy(padded).narrow(dim, 2 * FAR + start, stop - start)


@pytest.mark.ranks(1, 2, 3, 4)
def test_rows_are_those_of_the_padded_whole_and_backward_is_the_adjoint(world: ax.World, seed: int) -> None:
    """With the constant of mode "zeros", which the linear part lacks; the backward of a backward is the fetch."""
    for case in range(seed, seed + 15):
        sizes, ranges, dim, mode, shape = drawn(case, world.size)
        whole, value = random_tensor(shape, dim, sum(sizes), case), 3.0 if mode == "zeros" else 0.0
        x = whole.split(sizes, dim)[world.rank].clone().requires_grad_()
        start, stop = ranges[world.rank]
        output = ax.autograd.fetch(x, start, stop, dim=dim - 3, mode=mode, value=value)
        assert output.is_contiguous()
        assert_close(output, padded_part(whole, dim, mode, start, stop, value), 0, f"{case}")

        y = random_tensor(shape, dim, stop - start, 1000 + case + world.rank).requires_grad_()
        (transposed,) = torch.autograd.grad(output, x, y, create_graph=True)
        linear = padded_part(whole, dim, mode, start, stop, 0.0)
        sides = torch.stack([(linear * y).sum(), (x * transposed).sum()]).detach()
        ax.all_reduce(sides)
        assert math.isclose(*sides.tolist(), rel_tol=1e-12, abs_tol=1e-12), case

        (twice,) = torch.autograd.grad(transposed, y, x.detach())
        assert_close(twice, linear, 1e-12, f"{case}")


def test_halos_in_every_dtype_that_has_a_gradient(world: ax.World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.full((2, 3), world.rank + 1, dtype=dtype, requires_grad=True)
        halo = ax.autograd.fetch(x, 2 * world.rank - 1, 2 * world.rank + 3, mode="circular")
        before, after = (world.rank - 1) % world.size + 1, (world.rank + 1) % world.size + 1
        assert halo.real[:, 0].tolist() == [before, world.rank + 1, world.rank + 1, after]
        halo.real.sum().backward()
        assert x.grad.real.tolist() == [[2.0] * 3] * 2  # each row is also an edge of a neighbour's


@pytest.mark.ranks(2)
def test_second_gradients_are_those_of_finite_differences(world: ax.World) -> None:
    """Of products of fetched rows, on all ranks at once: each disturbs an element of its own at the same time."""
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        rows = ax.autograd.fetch(x, 3 * world.rank - 2, 3 * world.rank + 4, mode="reflect")
        return ax.autograd.reduce((rows**3).sum())

    (first,) = torch.autograd.grad(product(x), x, create_graph=True)
    direction = torch.randn(3, 2, dtype=torch.float64)
    (second,) = torch.autograd.grad((first * direction).sum(), x)
    step = 1e-5
    moved = [torch.autograd.grad(product(y), y)[0] for y in (x + step * direction, x - step * direction)]
    assert_close(second, (moved[0] - moved[1]) / (2 * step), 1e-7)


def test_slices_of_given_sizes(world: ax.World) -> None:
    """The other pairs of transposes, with a size for each rank in place of `torch.tensor_split`'s."""
    sizes = [2 * rank + (rank == 1) for rank in range(world.size)]  # rank 0 has none
    whole = random_tensor([3], 1, sum(sizes), 7)
    own = whole.split(sizes, 1)[world.rank]
    x = whole.clone().requires_grad_()
    mine = ax.autograd.scatter(x, dim=1, sizes=sizes)
    assert_close(mine, own, 0)
    mine.sum().backward()
    assert_close(x.grad, torch.ones_like(whole), 0)

    x = (whole * (world.rank + 1)).requires_grad_()
    mine = ax.autograd.reduce_scatter(x, dim=1, sizes=sizes)
    assert_close(mine, own * sum(range(1, world.size + 1)), 1e-12)
    (mine * own).sum().backward()
    assert_close(x.grad, whole, 1e-12)

    for name, factor in (("gather", 1), ("all_gather", world.size)):
        x = own.clone().requires_grad_()
        joined = getattr(ax.autograd, name)(x, dim=1, sizes=sizes)
        assert_close(joined, whole, 0)
        joined.sum().backward()
        assert_close(x.grad, torch.full_like(own, factor), 0)

    x = whole.clone().requires_grad_()
    exchanged = ax.autograd.all_to_all(x, split_dim=1, concat_dim=0, split_sizes=sizes)
    assert_close(exchanged, torch.cat([own] * world.size), 0)
    exchanged.sum().backward()
    assert_close(x.grad, torch.ones_like(whole), 0)


@pytest.mark.ranks(2)
def test_bad_ranges_and_sizes_are_refused(world: ax.World) -> None:
    x = torch.ones(4, 2)
    fetch = ax.autograd.fetch
    refused(TypeError, (partial(fetch, x, 0.0, 1), "start: expected an integer"))
    refused(TypeError, (partial(fetch, x.long(), 0, 1), "torch.int64 have no gradient"))
    refused(TypeError, (partial(fetch, x, 0, 1, value="1"), "value: expected a number, got '1'"))
    refused(
        ValueError,
        (partial(fetch, x, 3, 2), "stop: expected at least start=3, got 2"),
        (partial(fetch, x, 0, 1, mode="constant"), "mode: expected one of zeros, circular, reflect, replicate"),
        (partial(fetch, x, 0, 1, mode="reflect", value=1.0), "value: expected 0 with mode 'reflect', got 1.0"),
        (
            partial(ax.autograd.scatter, x, sizes=[1, 2]),
            r"sizes: expected 4 in all, as the tensor has, got \[1, 2\]",
        ),
        (partial(ax.autograd.gather, x, sizes=[1, 4]), "sizes: expected 4 for this rank, got 1")
        if world.rank == 0
        else (partial(ax.autograd.gather, x, sizes=[4, 1]), "sizes: expected 4 for this rank, got 1"),
        (partial(ax.autograd.all_to_all, x, split_sizes=[1]), "sizes: expected 2 sizes, one for each rank"),
    )
    refused(IndexError, (partial(fetch, x, 0, 1, dim=2), "dim: expected -2 to 1"))
    refused(ValueError, (partial(fetch, torch.ones(0, 2), 0, 1, mode="circular"), "without rows, got 'circular'"))


@pytest.mark.compares_calls
@pytest.mark.ranks(2, 4)
def test_another_mode_or_row_on_one_rank_is_an_error_on_all(world: ax.World) -> None:
    last = world.rank == world.size - 1
    halo = 2 * world.rank - 1, 2 * world.rank + 3
    with pytest.raises(ax.CollectiveMismatchError, match=r"exchange_rows.* of circular"):
        ax.autograd.fetch(torch.ones(2, 3), *halo, mode="circular" if last else "replicate")
    with pytest.raises(ax.CollectiveMismatchError, match=r"exchange_rows\(float32 \[4\]"):
        ax.autograd.fetch(torch.ones(2, 4 if last else 3), *halo)
    with pytest.raises(ax.CollectiveMismatchError, match="float64"):
        ax.autograd.fetch(torch.ones(2, 3, dtype=torch.float64 if last else torch.float32), *halo)
    assert ax.autograd.fetch(torch.ones(2, 3), *halo).shape == (4, 3)
