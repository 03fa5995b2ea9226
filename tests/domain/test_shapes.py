"""Shapes, slices and indices of tensors that are cut over ranks: equal to one process, or refused on all ranks."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from helpers.compare import refused
from helpers.cut_tensors import Cut, assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.domain import Domain

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

Function = Callable[[Tensor], Tensor]


def check(mesh: ax.DeviceMesh, cut: Cut, x: Tensor, function: Function, case: object) -> None:
    assert_as_whole(mesh, function, [x], [cut], tolerance=1e-12, what=case)


# ---- functions ------------------------------------------------------------------------------------------------


def reshapes(draw: random.Random, shape: list[int]) -> list[Function]:
    first = draw.randrange(len(shape) - 1)
    dim = draw.randrange(len(shape))
    divisor = draw.choice([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0])
    order = draw.sample(range(len(shape)), len(shape))
    counts = [draw.randint(1, 3) for _ in shape]
    return [
        lambda x: x.flatten(first, first + 1),
        lambda x: x.permute(order).reshape(-1),
        lambda x: x.unflatten(dim, (divisor, -1)).square().flatten(dim, dim + 1) + x,
        lambda x: x.unflatten(dim, (-1, divisor)).transpose(dim, dim + 1),
        lambda x: x.squeeze().unsqueeze(0),
        lambda x: x.mT.movedim(0, -1),
        lambda x: x.reshape(2, *shape) if x.numel() == 0 else x.reshape(1, -1, divisor),
        lambda x: x.expand(2, *shape) * 2,
        lambda x: x.repeat(counts).roll(1, -1),
        lambda x: x.repeat_interleave(2, dim) + x.tile(counts[:1]).sum(),
    ]


def pieces(draw: random.Random, shape: list[int]) -> list[Function]:
    dim = draw.randrange(len(shape))
    dim_or_negative = draw.choice([dim, dim - len(shape)])
    row = draw.randint(-shape[dim], shape[dim] - 1)
    key = tuple(slice(draw.choice([None, 0, 1, -2]), None, draw.randint(1, 3)) for _ in shape[: draw.randint(1, 3)])
    dims = draw.sample(range(len(shape)), 2)
    shifts = [draw.randint(-9, 9) for _ in dims]
    sides = [draw.randint(-1 if n > 2 else 0, 3) for n in shape[:1:-1] for _ in range(2)]
    mode = draw.choice(["circular", "reflect", "replicate"])
    limits = [draw.randint(0, n - (mode == "reflect")) for n in shape[:1:-1] for _ in range(2)]
    other = randn(7, *shape[:dim], draw.randint(0, 4), *shape[dim + 1 :])
    return [
        lambda x: torch.cat([other, x, x * 2, other], dim_or_negative),
        lambda x: torch.stack([x, randn(8, *shape)], dim_or_negative),
        lambda x: x.chunk(3, dim_or_negative)[0] * x.split(2, dim)[-1].sum() + sum(x.unbind(dim)).sum(),
        lambda x: x[key] * 2,
        lambda x: x[..., None, 0],
        lambda x: x.select(dim_or_negative, row) * x.narrow(dim, row % shape[dim], 1).sum(),
        lambda x: torch.roll(x, shifts, dims).flip(dims),
        lambda x: F.pad(x, sides, value=1.5),
        lambda x: F.pad(x, limits, mode),
        lambda x: x.tril(shifts[0]) + x.triu(shifts[1]),
    ]


def indices(draw: random.Random, shape: list[int]) -> list[Function]:
    dim, second = sorted(draw.sample(range(len(shape)), 2))
    rows = torch.tensor([draw.randint(-shape[dim], shape[dim] - 1) for _ in range(3)])
    others = torch.tensor([[draw.randint(0, shape[second] - 1)] for _ in range(2)])
    lead, between = (slice(None),) * dim, (slice(None),) * (second - dim - 1)
    mask = randn(9, *shape) > 0

    def assigned(x: Tensor) -> Tensor:
        y = x * 2
        y[(*lead, slice(1, None, 2))] = 3
        y[(*lead, 0)] = 4.0
        y[y < -1] = 0
        return y * x

    return [
        lambda x: x[(*lead, rows)],
        lambda x: x[(*lead, rows, *between, others)],
        lambda x: x[(*lead, randn(10, shape[dim]) > 0)],
        lambda x: x[mask],
        lambda x: x.index_select(dim, rows % shape[dim]),
        assigned,
    ]


@pytest.mark.parametrize("family", [reshapes, pieces, indices])
def test_values_and_gradients_are_those_of_one_process(
    world: ax.World, seed: int, family: Callable[[random.Random, list[int]], list[Function]]
) -> None:
    for number in range(2):
        draw = random.Random(seed + number)
        mesh, shape = drawn_mesh(draw, world), [draw.randint(1, 7) for _ in range(draw.randint(3, 4))]
        cut, x = drawn_cut(draw, mesh, range(len(shape))), randn(number, *shape)
        for place, function in enumerate(family(draw, shape)):
            check(mesh, cut, x, function, (mesh.shape, cut, shape, place, seed + number))


@pytest.mark.parametrize(("windows", "size", "shift"), [((2, 3), 4, 1), ((3, 1), 2, 0), ((1, 2), 3, 2)])
def test_shifted_windows_move_rows_and_come_back(
    world: ax.World, windows: tuple[int, int], size: int, shift: int
) -> None:
    """As in Swin: pad, roll, cut into windows, mix the pixels of each, and all the way back."""
    (rows, columns), channels = windows, 3

    def block(x: Tensor) -> Tensor:
        y = torch.roll(F.pad(x, (0, 0, 0, 1, 0, 1))[:, :-1, :-1], (-shift, -shift), (1, 2))
        y = y.view(2, rows, size, columns, size, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        y = y.view(-1, size * size, channels)
        y = y * y.sum(1, keepdim=True)
        y = y.view(2, rows, columns, size, size, channels).permute(0, 1, 3, 2, 4, 5).contiguous()
        y = y.view(2, rows * size, columns * size, channels)
        y = x.view(2, -1, channels) + torch.roll(y, (shift, shift), (1, 2)).view(2, -1, channels)
        y = F.pad(y.view(x.shape), (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        return torch.cat([y[:, first::2, second::2] for first in (0, 1) for second in (0, 1)], -1)

    x = randn(0, 2, rows * size, columns * size, channels)
    for axes in ({"y": world.size}, {"y": 2, "x": 2}) if world.size == 4 else ({"y": world.size},):
        check(ax.DeviceMesh(axes), dict(zip(axes, (1, 2), strict=False)), x, block, axes)


def test_pixels_and_columns(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"y": world.size})
    for rows in (2, 6, 10):
        x = randn(rows, 2, 4, rows, 6)
        for function in (
            partial(F.pixel_shuffle, upscale_factor=2),
            partial(F.pixel_unshuffle, downscale_factor=2),
            partial(F.channel_shuffle, groups=2),
            partial(F.unfold, kernel_size=(2, 3), padding=1, stride=2),
            lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2) - x,
        ):
            check(mesh, {"y": 2}, x, function, (rows, function))


def test_elements_along_dimensions_that_no_axis_cuts(world: ax.World) -> None:
    mesh, x = ax.DeviceMesh({"y": world.size}), randn(0, 4, 5)
    check_x = partial(check, mesh, {"y": 1}, x)
    index = torch.randint(4, (3, 5), generator=torch.Generator().manual_seed(0))
    check_x(lambda x: x.gather(0, index), "gather")
    check_x(lambda x: torch.take_along_dim(x, index, 0), "take_along_dim")
    check_x(lambda x: x.scatter(0, index, 2.0), "scatter")
    check_x(lambda x: (x * 2).scatter_add_(0, index, x[:3]), "scatter_add_")
    refused(
        ax.errors.DomainError, (lambda: Domain(mesh, {"y": 1}).shard(x).gather(1, index), "dimension that is cut")
    )


# ---- refusals and views ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_changes_reach_a_tensor_as_with_one_process(world: ax.World) -> None:
    """A part of one row is contiguous in more permutations than the whole, whose copies share nothing."""
    mesh = ax.DeviceMesh({"y": world.size})
    functions: list[Function] = [
        lambda x: x.permute(0, 2, 1).contiguous(),
        lambda x: x.mT.reshape(-1),
        lambda x: x.transpose(0, 1).flatten(1),
        lambda x: x.transpose(0, 1).reshape(-1, 2, 2, 6),
        lambda x: x.contiguous().reshape(4, -1),
        lambda x: x.flatten().ravel(),
    ]
    for rows, (number, function) in product((2, 5), enumerate(functions)):

        def changed(x: Tensor, function: Function = function) -> tuple[Tensor, Tensor]:
            own = x * 1
            return F.relu(function(own), inplace=True) * 2, own

        assert_as_whole(mesh, changed, [randn(1, 4, rows, 6)], [{"y": 1}], what=(rows, number))


@pytest.mark.ranks(2)
def test_refused_on_all_ranks(world: ax.World) -> None:
    x = Domain(ax.DeviceMesh({"y": 2}), {"y": 0}).shard(randn(0, 5, 4))

    def assign() -> None:
        x[1:3] = torch.ones(2, 4)

    refused(
        ax.errors.DomainError,
        (lambda: x.diagonal(), "no rule"),
        (lambda: x.as_strided([2], [1]), "no rule"),
        (lambda: x.view(torch.int64), "another dtype"),
        (lambda: x[x > 0], "a tensor that is cut"),
        (lambda: x.roll(1), "without dims"),
        (lambda: x.repeat_interleave(torch.tensor([1, 2, 1, 1, 1]), 0), "different numbers"),
        (lambda: torch.zeros(3)[x.long()], "one that is cut"),
        (lambda: x.new_tensor(x), "no rule"),
        (assign, "along a dimension that is cut"),
    )
    refused(
        IndexError, (lambda: x[5], "out of range|out of bounds"), (lambda: x[:, torch.tensor([4])], "out of bounds")
    )
    refused(RuntimeError, (lambda: x.view(3, 7), "invalid"), (lambda: torch.cat([x, x[:, :2]]), "match|Sizes"))


@pytest.mark.ranks(2)
def test_changes_of_views_reach_the_tensor_or_are_refused(world: ax.World) -> None:
    x = Domain(ax.DeviceMesh({"y": 2}), {"y": 0}).shard(torch.zeros(5, 4))
    x[:, 1:3].add_(1)
    x.view(5, 2, 2)[:, 0].mul_(3)
    x[:, 3] = torch.arange(5.0)
    x[-1] = 7
    expected = torch.tensor([0.0, 3, 1, 0]).repeat(5, 1)
    expected[:, 3] = torch.arange(5.0)
    expected[-1] = 7
    assert torch.equal(x.full_tensor(), expected)
    refused(ax.errors.DomainError, (lambda: x[1:].add_(1), "slice of"), (lambda: F.relu(x[:2].T, True), "slice of"))
    x.flip(0).add_(1)
    x.roll(0, 0).add_(1)
    x[1:].clone().add_(1)
    assert torch.equal(x.full_tensor(), expected)
