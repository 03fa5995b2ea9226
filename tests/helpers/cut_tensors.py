"""Functions of tensors that are cut over ranks, compared with the same functions on one process."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor

from .compare import assert_close

Cut = dict[str, int] | None
"""The dimension of a tensor that each axis cuts; None: an ordinary tensor."""


def drawn_mesh(draw: random.Random, world: ax.World) -> ax.DeviceMesh:
    """Return the ranks in one axis or two, one of which may have one rank; collective."""
    sides = [{"y": world.size}, {"y": 1, "x": world.size}]
    return ax.DeviceMesh(draw.choice([*sides, {"y": 2, "x": 2}] if world.size == 4 else sides))


def drawn_cut(draw: random.Random, mesh: ax.DeviceMesh, dims: Sequence[int], count: int = 0) -> Cut:
    """Return a dimension for each axis as long as there are any; some count from the end of `count` dimensions."""
    chosen = draw.sample(list(dims), min(len(dims), len(mesh.axes)))
    return dict(zip(mesh.axes, (dim - draw.choice([0, count]) for dim in chosen), strict=False)) or None


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same numbers on all ranks, mock ones, too, which share torch's own generator."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def values(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    cuts: Sequence[Cut],
    mesh: ax.DeviceMesh | None = None,
    buffers: Sequence[Tensor] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield results, changed buffers and all gradients, whole; of one process without a mesh, else collective.

    Args:
        function: Called with all tensors and copies of buffers; returns one or several.
        tensors: Whole tensors; those of floating point or complex numbers have gradients.
        cuts: [tensors].
        mesh: The ranks.
        buffers: Ordinary tensors that the function may change.
    """
    domains = [Domain(mesh, cut) if mesh and cut else None for cut in cuts]
    pairs = list(zip(tensors, domains, strict=True))
    leaves = [(x[domain.slices(x.shape)] if domain else x).clone() for x, domain in pairs]
    leaves = [leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves]
    operands = [
        domain.from_local(leaf, x.shape) if domain else leaf
        for leaf, (x, domain) in zip(leaves, pairs, strict=True)
    ]
    changed = [buffer.clone() for buffer in buffers]
    results = function(*operands, *changed)
    loss = torch.zeros((), dtype=torch.float64)
    for number, result in enumerate([results] if isinstance(results, Tensor) else results):
        yield f"result {number}", result.full_tensor() if isinstance(result, DomainTensor) else result.detach()
        if result.requires_grad:
            loss = loss + (result * randn(number, *result.shape, dtype=result.dtype)).sum().real
    yield from ((f"buffer {number}", buffer) for number, buffer in enumerate(changed))
    if loss.requires_grad:
        loss.backward()
    for number, (leaf, (x, domain)) in enumerate(zip(leaves, pairs, strict=True)):
        if leaf.requires_grad:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            yield f"gradient {number}", domain.from_local(gradient, x.shape).full_tensor() if domain else gradient


def assert_as_whole(
    mesh: ax.DeviceMesh,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    cuts: Sequence[Cut],
    buffers: Sequence[Tensor] = (),
    tolerance: float = 1e-10,
    what: Any = "",
) -> None:
    """Compare all `values` of cut tensors with those of one process; collective."""
    expected = dict(values(function, tensors, cuts, buffers=buffers))
    found = dict(values(function, tensors, cuts, mesh, buffers))
    assert_close(found, expected, tolerance, f"{what}")
