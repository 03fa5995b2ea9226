"""Domains: parts of wholes, their way there and back, and tensors that nobody takes for the whole."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from helpers.compare import refused
from torch import nn

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor
from axonmpi.errors import CollectiveMismatchError, DomainError

pytestmark = pytest.mark.ranks(2, 4)


def mesh_of(world: ax.World) -> ax.DeviceMesh:
    return ax.DeviceMesh({"dp": 1, "y": 2, "x": world.size // 2}, world)


def test_parts_are_those_of_tensor_split_and_come_back(world: ax.World) -> None:
    mesh = mesh_of(world)
    domain = Domain(mesh, {"y": 2, "x": -1})
    for shape in ((2, 3, 7, 5), (1, 1, 1, 4), (2, 1, 0, 3)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        part = whole[domain.slices(shape)]
        rows = whole.tensor_split(2, 2)[mesh.rank("y")]
        assert torch.equal(part, rows.tensor_split(mesh.size("x"), 3)[mesh.rank("x")])
        given = whole if domain.group.rank == 1 else None
        for tensor in (domain.from_local(part, shape), domain.shard(whole), domain.scatter(given, src=1)):
            assert isinstance(tensor, DomainTensor)
            assert (tensor.shape, tensor.dim(), tensor.numel()) == (shape, 4, whole.numel())
            assert torch.equal(tensor.to_local(), part)
            assert torch.equal(tensor.full_tensor(), whole)
            assert torch.equal((tensor * 2j).imag.full_tensor(), 2 * whole)
            assert not tensor.full_tensor().requires_grad
            gathered = domain.gather(tensor, dst=1)
            assert torch.equal(gathered, whole) if domain.group.rank == 1 else gathered is None
    assert domain.group.size == world.size


def test_a_network_of_layers_is_as_on_one_process(world: ax.World) -> None:
    """Forward, loss and all gradients of two convolutions with a pool, in float64."""
    generator = torch.Generator().manual_seed(3)  # mock ranks share torch's own
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GELU(),
        nn.PReLU(4),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 1, 2, stride=2),
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    x, target = torch.randn(2, 3, 2, 14, 10, dtype=torch.float64, generator=generator).unbind(0)
    alone = model(x)
    loss = ((alone - target[:, :1]) ** 2).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))

    domain = Domain(mesh_of(world), {"y": 2, "x": 3})
    output = model(domain.shard(x))
    assert isinstance(output, DomainTensor)
    assert torch.allclose(output.full_tensor(), alone, atol=1e-12)
    of_all = ((output - target[:, :1]) ** 2).mean()
    assert not isinstance(of_all, DomainTensor)
    assert torch.allclose(of_all, loss, atol=1e-12)
    for mine, whole in zip(torch.autograd.grad(of_all, list(model.parameters())), expected, strict=True):
        assert torch.allclose(mine, whole, atol=1e-12)
    with torch.inference_mode():
        forecast = model(domain.shard(x.clone()))
    assert isinstance(forecast, DomainTensor)
    assert torch.allclose(forecast.full_tensor(), alone, atol=1e-12)


def test_a_part_is_never_taken_for_the_whole(world: ax.World) -> None:
    domain = Domain(mesh_of(world), {"y": 0})
    x = domain.shard(torch.ones(4, 2))

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor + 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    refused(
        DomainError,
        (lambda: x.data, "torch.Tensor.data.__get__: expected a function that can be computed on parts"),
        (lambda: x.numpy(), r"\(cut: dim 0 by 'y'\)"),
        (lambda: np.asarray(x), "x.full_tensor"),
        (lambda: x.as_strided((1,), (1,)), "as_strided"),
        (lambda: x.set_(torch.ones(4, 2)), "would give the part the elements of another tensor"),
        (lambda: pickle.dumps(x), "would save a part for the whole"),
        (lambda: x.sum(1).tolist(), "tolist"),
        (lambda: Own.apply(x.requires_grad_()) * 2, "autograd.Function"),
        (lambda: torch.linalg.inv(x), "local_map"),
    )
    refused(TypeError, (partial(ax.all_reduce, x), "expected an ordinary tensor, got a DomainTensor"))
    ax.barrier()


@pytest.mark.not_over_double("GPUs compare calls only if asked to")
def test_another_size_of_the_whole_on_one_rank_is_an_error_on_all(world: ax.World) -> None:
    domain = Domain(mesh_of(world), {"y": 2})
    x = domain.shard(torch.ones(1, 1, 9 + 2 * domain.group.rank, 4))  # its edges are of one row on both
    with pytest.raises(CollectiveMismatchError, match="of 11 rows"):
        nn.functional.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)
    ax.barrier()


def test_bad_domains_and_parts_are_refused(world: ax.World) -> None:
    mesh = mesh_of(world)
    domain = Domain(mesh, {"y": 2})
    refused(
        TypeError,
        (partial(Domain, {"y": 2}, {"y": 2}), "mesh: expected an axonmpi.DeviceMesh, got dict"),
        (partial(Domain, mesh, "y"), "dims: expected the dimension that each axis cuts"),
        (partial(Domain, mesh, {"y": 2.0}), "y: expected an integer"),
        (partial(domain.from_local, domain.shard(torch.ones(1, 1, 2)), (1, 1, 2)), "got DomainTensor"),
    )
    refused(
        ValueError,
        (partial(Domain, mesh, {}), "dims: expected at least one axis"),
        (partial(Domain, mesh, {"z": 2}), "axis: expected one of the mesh's"),
        (partial(domain.slices, (3, 4)), r"expected a dimension 2 for axis 'y' to cut, got \[3, 4\]"),
        (partial(Domain(mesh, {"y": 0, "x": -1}).slices, (4,)), "'y' and 'x' would both cut dimension 0"),
        (partial(domain.from_local, torch.ones(1, 1, 7), (1, 1, 4)), r"part: expected shape \[1, 1, 2\]"),
        (partial(domain.scatter, None, 9), "src"),
    )
    others = ", ".join(map(str, range(1, world.size)))
    refused(
        ValueError, (lambda: Domain(mesh, {"y": int(world.rank > 0)}), rf"rank 0: {{'y': 0}}\s+ranks? {others}: ")
    )
    with pytest.raises((TypeError, ax.RankFailedError), match="tensor: expected the whole tensor on rank 0"):
        domain.scatter(None)
    ax.barrier()
