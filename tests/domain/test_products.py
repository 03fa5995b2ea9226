"""Products of cut and ordinary tensors: results and gradients are one process's."""

import random
from collections.abc import Callable

import pytest
import torch
from helpers.compare import refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor
from axonmpi.errors import DomainError

pytestmark = pytest.mark.ranks(2, 3, 4)

PRODUCTS: list[tuple[str, Callable[..., Tensor]]] = [
    # shapes of the operands, a letter for each size
    ("abk nk n", functional.linear),
    ("k nk n", functional.linear),
    ("abmk bkn", torch.matmul),
    ("bmk k", lambda a, b: a @ b),
    ("k bkn", lambda a, b: b.__rmatmul__(a)),
    ("mk kn", torch.mm),
    ("bmk bkn", torch.bmm),
    ("k k", torch.dot),
    ("m n", torch.outer),
    ("abk mk", torch.inner),
    ("mkn nbm", lambda a, b: torch.tensordot(a, b, dims=([2, 0], [0, -1]))),
    ("bmn bmk bkn", lambda x, a, b: x.baddbmm(a, b, beta=0.5)),
    ("n mk kn", lambda x, a, b: torch.addmm(x, a, b, alpha=2)),
    ("mn bmk bkn", torch.addbmm),
    ("am ak nmk n", functional.bilinear),
    ("abk kmn bm", lambda *parts: torch.einsum("...k,kmn, ...m->n...", *parts)),
    ("abmk bmn", lambda *parts: torch.einsum("abmk,bmn", *parts)),
    ("amk an k", lambda *parts: torch.einsum("amk,an,k->am", *parts)),
]


def test_drawn_products_equal_one_process(world: ax.World, seed: int) -> None:
    for number in range(seed, seed + 15):
        draw = random.Random(number)
        mesh = drawn_mesh(draw, world)
        letters, function = draw.choice(PRODUCTS)
        sizes = {letter: draw.choice([1, 2, draw.randint(1, 9)]) for letter in "abkmn"}
        tensors = [randn(number, *(sizes[letter] for letter in word)) for word in letters.split()]
        cuts = [drawn_cut(draw, mesh, range(x.dim())) if draw.random() < 0.6 else None for x in tensors]
        if not any(cuts):
            cuts[0] = drawn_cut(draw, mesh, range(tensors[0].dim()))
        assert_as_whole(mesh, function, tensors, cuts, what=(number, letters, sizes, cuts))


def test_tables_are_looked_up_by_cut_indices(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"y": world.size})
    indices, table = torch.tensor([[0, 2, 5], [2, 2, 1]]), randn(1, 6, 3)
    for function in (functional.embedding, lambda i, t: functional.one_hot(i).to(t.dtype) @ t):
        assert_as_whole(mesh, function, [indices, table], [{"y": 1}, None])
    assert_as_whole(mesh, functional.one_hot, [indices], [{"y": 0}])


def test_cuts_of_the_result_stay_and_of_two_the_larger_operand_keeps_its(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"y": world.size})
    large = Domain(mesh, {"y": 0}).shard(randn(1, 8, 5))
    small = Domain(mesh, {"y": 1}).shard(randn(2, 5, 6))
    product = large @ small
    assert isinstance(product, DomainTensor)
    assert str(product.whole) == "[8 y, 6]"
    assert not isinstance(torch.einsum("ij,ik->jk", large, large), DomainTensor)


def test_wrong_sizes_raise_everywhere_and_what_cannot_be_right_is_refused(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0})
    x, batch, indices = (domain.shard(t) for t in (torch.randn(4, 4), torch.randn(world.size, 2, 2), torch.ones(4)))
    refused(
        RuntimeError,
        (lambda: torch.randn(3, 1) @ x, "expected sizes that match"),
        (lambda: torch.bmm(torch.randn(1, 2, 2), batch), "expected sizes that match"),
        (lambda: torch.einsum("ijk->i", x), "expected a tensor of 3 dimensions"),
        (lambda: torch.addmm(torch.randn(2, 4, 4), x, x), "number of sizes provided"),
    )
    refused(
        DomainError,
        (lambda: torch.einsum("ii->i", x), "takes a diagonal"),
        (lambda: torch.mm(x, x, out=torch.empty(4, 4)), "write into `out`"),
        (lambda: functional.embedding(indices.long(), x), "has a weight that is cut"),
        (lambda: functional.embedding(indices.long(), torch.ones(4, 4), max_norm=1.0), "by a part's indices"),
    )
