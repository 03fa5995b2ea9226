"""Functions along a whole dimension, cut or not: results and gradients are one process's."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compare import refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain
from axonmpi.errors import DomainError

pytestmark = pytest.mark.ranks(2, 3, 4)

REAL: list[Callable[[Tensor, int], Any]] = [
    lambda x, dim: functional.softmax(x, dim=dim),
    lambda x, dim: x.log_softmax(dim),
    lambda x, dim: functional.softmin(x, dim=dim),
    lambda x, dim: x.cumsum(dim),
    lambda x, dim: torch.cumprod(x, dim=dim),
    lambda x, dim: x.cummax(dim),
    lambda x, dim: torch.logcumsumexp(x, dim),
    lambda x, dim: x.sort(dim=dim, descending=True),
    lambda x, dim: torch.argsort(x, dim),
    lambda x, dim: x.topk((x.shape[dim] + 1) // 2, dim),
    lambda x, dim: x.kthvalue(1, dim, keepdim=True),
    lambda x, dim: torch.median(x, dim),
    lambda x, dim: x.quantile(0.3, dim, keepdim=True),
    lambda x, dim: x.nanquantile(0.5, interpolation="lower") * x.median(),
    lambda x, dim: (torch.msort(x), x.argmax(), x.argmin(keepdim=True), x.round().mode(dim).values),
    lambda x, dim: torch.diff(x, dim=dim),
    lambda x, dim: functional.glu(torch.fft.fftshift(x, dim), dim) if x.shape[dim] % 2 == 0 else x * 1,
    lambda x, dim: torch.fft.rfft(x, 7, dim, "ortho"),
    lambda x, dim: torch.fft.ihfft(x, dim=dim),
    lambda x, dim: torch.fft.rfft2(x, dim=(dim, (dim + 1) % x.dim())) if x.dim() > 1 else torch.fft.rfftn(x),
]
COMPLEX: list[Callable[[Tensor, int], Any]] = [
    lambda x, dim: torch.fft.ifft(x, dim=dim),
    lambda x, dim: torch.fft.irfft(x, 5, dim),
    lambda x, dim: torch.fft.hfft(x, 4, dim, "forward"),
    lambda x, dim: torch.fft.fftn(x),
    lambda x, dim: torch.fft.irfftn(x, s=(6,)),
]


def test_drawn_functions_equal_one_process(world: ax.World, seed: int) -> None:
    for number in range(seed, seed + 15):
        draw = random.Random(number)
        mesh = drawn_mesh(draw, world)
        function = draw.choice(REAL + COMPLEX)
        shape = [draw.choice([1, 2, draw.randint(1, 9)]) for _ in range(draw.randint(1, 3))]
        dim = draw.randrange(len(shape)) - draw.choice([0, len(shape)])
        x = randn(number, *shape, dtype=torch.float64 if function in REAL else torch.complex128)
        cuts = drawn_cut(draw, mesh, range(len(shape)))
        assert_as_whole(mesh, partial(function, dim=dim), [x], [cuts], what=(number, shape, dim, cuts))


def test_functions_of_other_tensors_or_without_a_rule_are_refused(world: ax.World) -> None:
    x = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0}).shard(torch.randn(4, 3))
    refused(
        DomainError,
        (lambda: x.quantile(torch.tensor([0.1, 0.5]), 0), "other arguments that are tensors"),
        (lambda: torch.diff(x, prepend=torch.zeros(1, 3)), "other arguments that are tensors"),
        (lambda: torch.unique(x, dim=0), "unique: .* has no rule"),
        (lambda: torch.gradient(x), "has no rule"),
    )
