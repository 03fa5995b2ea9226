"""Arguments by other names, by keyword and in another order, and 16 bits: the results are one process's."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain

REDUCED = [
    "sum",
    "mean",
    "nansum",
    "nanmean",
    "amax",
    "amin",
    "logsumexp",
    "var",
    "std",
    "all",
    "any",
    "prod",
    "max",
    "min",
    "argmax",
    "median",
    "aminmax",
]
SAME_SIZE = ["cumsum", "cumprod", "softmax", "log_softmax", "sort", "argsort", "cummax", "logcumsumexp", "flip"]


def forms(draw: random.Random, dim: int) -> list[Callable[[Tensor], Any]]:
    """Return calls with keywords, for tensors [2, n, m, 4] of numbers."""
    reduced, same = draw.choice(REDUCED), draw.choice(SAME_SIZE)
    words = {draw.choice(["dim", "axis"]): dim, draw.choice(["keepdim", "keepdims"]): draw.random() < 0.5}
    along = {"dims": (dim,)} if same == "flip" else {draw.choice(["dim", "axis"]): dim}
    weight, turns = randn(3, 4, 3), draw.randint(-3, 3)
    return [
        lambda x: getattr(torch, reduced)(input=x, **words),
        lambda x: getattr(x, reduced)(**words),
        lambda x: getattr(torch, same)(input=x, **along),
        lambda x: getattr(x, same)(**along),
        lambda x: (*x.topk(k=1, axis=dim), *torch.kthvalue(input=x, k=1, axis=dim, keepdims=True)),
        lambda x: torch.cat(tensors=[x, x + 1], axis=dim) * torch.stack([x.sum(), x.max()], axis=0).mean(),
        lambda x: torch.where(condition=x > 0, input=x, other=-x) + x.where(condition=x > 0, other=x),
        lambda x: torch.add(other=x, input=randn(5, 4), alpha=2) * torch.mul(x=x, other=2.0),
        lambda x: torch.matmul(other=weight, input=x) + torch.linalg.vector_norm(x=x, ord=3, axis=dim).sum(),
        lambda x: torch.addmm(mat2=weight, input=weight[0], mat1=x[0, 0], beta=0.5),
        lambda x: torch.transpose(input=x, dim0=dim, dim1=0) * 1 + torch.zeros_like(input=x).transpose(dim, 0),
        lambda x: torch.flatten(end_dim=1, input=x) * torch.narrow(input=x, dim=dim, start=0, length=1).sum(),
        lambda x: torch.roll(input=x, shifts=1, dims=dim) + torch.clamp(x, min=-0.5).sum(),
        lambda x: torch.unsqueeze(input=x, dim=dim).squeeze(axis=dim) * torch.complex(real=x, imag=x.sin()).abs(),
        lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(3, (2, 2)).sin()) * 2j) * 2,
        lambda x: torch.rot90(x, turns, (dim, (dim + 1) % 4)) * 2,
    ]


@pytest.mark.ranks(2, 3, 4)
def test_keywords_and_names_of_numpy(world: ax.World, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(6):
        mesh, dim = drawn_mesh(draw, world), draw.randrange(-4, 4)
        x, cut = randn(number, 2, draw.randint(2, 6), draw.randint(2, 5), 4), drawn_cut(draw, mesh, range(4), 4)
        for place, function in enumerate(forms(draw, dim)):
            assert_as_whole(mesh, function, [x], [cut], what=(number, place, [*x.shape], dim, cut))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_average_pools_of_16_bits_are_as_exact_as_torch(world: ax.World, dtype: torch.dtype) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 2})
    x = (randn(1, 2, 3, 19, 8) * 1e4).to(dtype)  # whose sums float16 does not reach
    for options in ({"padding": 1}, {"stride": 2, "ceil_mode": True}, {"padding": 1, "count_include_pad": False}):
        pool = partial(functional.avg_pool2d, kernel_size=3, **options)
        exact, alone, cut = pool(x.double()), pool(x), pool(domain.shard(x)).full_tensor()
        assert cut.dtype is dtype
        assert (cut.double() - exact).abs().max() <= (alone.double() - exact).abs().max()


@pytest.mark.ranks(2)
def test_products_under_autocast_have_the_dtype_of_torch(world: ax.World) -> None:
    x = randn(1, 5, 6).float()
    cut, weight = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0}).shard(x), randn(2, 6, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        for function in (
            lambda x: torch.addmm(weight[0], x, weight),
            lambda x: functional.bilinear(x, x, weight[None]),
        ):
            found, expected = function(cut), function(x)
            assert_close(found.full_tensor(), expected, 4e-2)


@pytest.mark.ranks(3)
def test_integers_with_ranks_that_have_none(world: ax.World) -> None:
    x = torch.arange(32).view(2, 4, 4)
    cut = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0}).shard(x)
    for dtype in (torch.uint8, torch.int64):
        pooled = functional.max_pool2d(cut.to(dtype), (2, 1), 1)
        assert torch.equal(pooled.full_tensor(), functional.max_pool2d(x.to(dtype), (2, 1), 1))
    refused(TypeError, *((call, "finfo") for call in (lambda: cut.var(1), lambda: functional.group_norm(cut, 1))))
