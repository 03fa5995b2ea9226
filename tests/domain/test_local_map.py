"""Stencils of a user's own, and functions of several tensors, against one process."""

from functools import partial

import pytest
import torch
from helpers.compare import refused
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain, local_map

pytestmark = pytest.mark.ranks(2, 4)


def upwind(u: Tensor, speed: Tensor) -> Tensor:
    """A one-sided difference along dim 2, and a central one along dim 3."""
    return speed * (u[:, :, 2:, 1:-1] - u[:, :, 1:-1, 1:-1]) + (u[:, :, 2:, 2:] - u[:, :, 2:, :-2]) / 2


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_a_stencil_equals_one_process(world: ax.World, mode: str) -> None:
    generator = torch.Generator().manual_seed(5)
    u, speed = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((1, 2, 5, 6), (2, 1, 1)))
    whole, factor = u.clone().requires_grad_(), speed.clone().requires_grad_()
    pad = {"zeros": "constant"}.get(mode, mode)
    expected = upwind(functional.pad(whole, (1, 1, 2, 0), mode=pad), factor)
    gradients = torch.autograd.grad((expected**2).sum(), (whole, factor))

    domain = Domain(ax.DeviceMesh({"y": world.size // 2, "x": 2}, world), {"y": 2, "x": 3})
    part, mine = u[domain.slices(u.shape)].clone().requires_grad_(), speed.clone().requires_grad_()
    x = domain.from_local(part, u.shape)
    result = local_map(upwind, x, mine, halo={2: (2, 0), -1: (1, 1)}, mode=mode)
    assert result.shape == u.shape
    assert torch.allclose(result.full_tensor(), expected, atol=1e-12)
    found = torch.autograd.grad((result**2).sum(), (part, mine))
    assert torch.allclose(found[0], gradients[0][domain.slices(u.shape)], atol=1e-12)
    assert torch.allclose(found[1], gradients[1], atol=1e-12)


def test_tensors_that_are_cut_alike_and_other_channels(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}, world), {"y": -1})
    whole = torch.arange(24.0).view(2, 2, 6)
    x = domain.shard(whole)
    result = local_map(lambda a, b: torch.cat([a, a * b], 1), x, domain.shard(whole + 1))
    assert torch.equal(result.full_tensor(), torch.cat([whole, whole * (whole + 1)], 1))


def test_tensors_that_are_cut_in_factors(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}, world), {"y": 1})
    whole = torch.arange(30.0).view(3, 5, 2)
    x, other = (domain.shard(each).flatten(0, 1) for each in (whole, whole.square()))
    result = local_map(lambda rows, own: rows[2:] - rows[:-2] + own, x, other, halo={0: (1, 1)}, mode="circular")
    rows = whole.flatten(0, 1)
    assert torch.equal(result.full_tensor(), rows.roll(-1, 0) - rows.roll(1, 0) + rows.square())


def test_what_cannot_be_mapped_is_refused(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}, world), {"y": 0})
    x = domain.shard(torch.ones(2 * world.size, 3))
    same = partial(local_map, lambda part, *others: part)
    refused(TypeError, (partial(same, torch.ones(2)), "x: expected a DomainTensor, got Tensor"))
    refused(
        ValueError,
        (partial(same, x, halo={1: (1, 1)}), "halo: expected dimensions that are cut"),
        (partial(same, x, halo={0: (1, 1)}), "without the halo, got"),
        (partial(same, x, mode="constant"), "mode: expected one of zeros, circular, reflect, replicate"),
        (partial(same, x, domain.shard(torch.ones(world.size, 3))), "or cut as x is"),
        (
            partial(same, x, Domain(ax.DeviceMesh({"y": world.size}, world), {"y": 0}).shard(x.full_tensor())),
            "two meshes",
        ),
    )
    ax.barrier()
