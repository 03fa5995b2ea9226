"""Reductions of tensors that are cut over ranks, against one process."""

import random
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain
from axonmpi.errors import DomainError


def drawn_reduction(draw: random.Random, count: int) -> Callable[[Tensor], Any]:
    one, keepdim = draw.randrange(-count, count), draw.random() < 0.5
    several = draw.choice([one, draw.sample(range(count), draw.randint(1, count))])
    dims: Any = draw.choice([several, several, list(range(count))])
    return draw.choice(
        [
            *(partial(getattr(torch, name), dim=dims, keepdim=keepdim) for name in SEVERAL),
            *(partial(getattr(torch, name), dim=one, keepdim=keepdim) for name in ONE),
            *(partial(getattr(torch, name), correction=0, dim=dims, keepdim=keepdim) for name in VARIANCES),
            *(partial(torch.linalg.vector_norm, ord=p, dim=dims) for p in (1, 2, 2.5, inf, -inf, 0)),
            *(lambda x, name=name: getattr(x, name)() for name in WITHOUT_DIMS),
            partial(torch.norm, p=3, dim=dims, keepdim=keepdim),
            partial(torch.count_nonzero, dim=dims),
            lambda x: tuple(torch.aminmax(x, dim=one)),
            lambda x: (x > 0.5).any(dims),
            lambda x: (x > -0.5).all(dims),
            lambda x: (x.any(()), x[:0].any(dims), x[:0].all(dims), torch.where(x > 0, x, torch.nan).all(dims)),
            lambda x: ((x * 9).to(torch.uint8).logsumexp(dims), (x * 3).int().prod(one, dtype=torch.int32)),
            partial(functional.normalize, dim=one),
            lambda x: functional.cosine_similarity(x, x.exp(), one),
            lambda x: functional.cosine_similarity(x, x.exp().sum(0, True), one),
            lambda x: torch.linalg.norm(x, dim=one),
            lambda x: functional.pairwise_distance(x, x.exp()),
        ]
    )


SEVERAL = ["sum", "nansum", "mean", "nanmean", "amax", "amin", "logsumexp"]
ONE = ["prod", "max", "min", "argmax", "argmin"]
VARIANCES = ["var", "std", "var_mean", "std_mean"]
WITHOUT_DIMS = ["sum", "mean", "prod", "max", "min", "norm", "var", "std"]


@pytest.mark.ranks(2, 3, 4)
def test_reductions_are_those_of_one_process(world: ax.World, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(25):
        mesh = drawn_mesh(draw, world)
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 3))] + [draw.randint(2, 7)]  # one has no var
        x = randn(number, *shape)
        x = x.round() if draw.random() < 0.4 else x  # with equal elements
        dims = drawn_cut(draw, mesh, range(len(shape)), len(shape))
        function = drawn_reduction(draw, len(shape))
        if "var" in str(function) or "std" in str(function):
            x = torch.cat([x, x + 1])
        assert_as_whole(mesh, function, [x], [dims], what=f"{number}: {function}, {shape}, {dims}")


@pytest.mark.ranks(2)
def test_variances_keep_the_digits_of_large_means(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0})
    x = randn(1, 999, 8, dtype=torch.float32) + 1e5
    expected = x.double().var(0)
    assert_close(domain.shard(x).var(0).double(), expected, 1e-4)


@pytest.mark.ranks(2)
def test_refusals(world: ax.World) -> None:
    x = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0}).shard(randn(1, 4, 4))
    refused(
        DomainError,
        (lambda: x.sum().item() + x[:1].sum() + x.item(), "no rule"),
        (lambda: float(x), "no rule"),
        (lambda: bool(x), "no rule"),
        (lambda: torch.linalg.norm(x, 2), "norm of order 2 of a matrix"),
        (lambda: torch.norm(x, "nuc"), "matrix_norm.*no rule"),
    )
    refused(IndexError, (lambda: x.amax(2), "out of range"))
    refused(RuntimeError, (lambda: x.sum((0, -2)), "each dimension once"))
