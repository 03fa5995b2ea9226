"""Dropout of tensors that are cut over ranks: the same mask at any number of ranks."""

import pytest
import torch
from helpers.compare import assert_equal, assert_same_on_all_ranks, refused
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor
from axonmpi.domain.rules import dropout

FUNCTIONS = ["dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"]


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DomainTensor)
    return tensor.full_tensor()


@pytest.fixture(autouse=True)
def _one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock ranks have one default generator, of which each would draw another number."""
    monkeypatch.setattr(dropout, "draw_number", lambda generator: 5)


@pytest.mark.ranks(2, 3, 4)
def test_masks_do_not_depend_on_the_number_of_ranks(world: ax.World) -> None:
    shapes = [{"y": world.size}, {"y": 1, "x": world.size}, {"y": 2, "x": world.size // 2}]
    alone = ax.DeviceMesh({"rest": world.size, "y": 1, "x": 1})
    for shape in shapes[: 3 if world.size % 2 == 0 else 2]:
        mesh = ax.DeviceMesh(shape)
        dims = dict(zip(mesh.axes, (2, 1), strict=False))
        x = torch.ones(2, 5, 211, 3)
        cut, one = Domain(mesh, dims).shard(x), Domain(alone, dims).shard(x)
        for name in FUNCTIONS:
            function = getattr(functional, name)
            result = whole(function(cut, p=0.4, training=True))
            assert_equal(result, whole(function(one, p=0.4, training=True)), name)
            assert_same_on_all_ranks(world, result)
            if name in ("dropout", "alpha_dropout"):
                assert 0.55 < (result == result.max()).double().mean() < 0.65
        for random in (torch.rand_like, torch.randn_like, lambda t: torch.bernoulli(t * 0.5)):
            assert_equal(whole(random(cut)), whole(random(one)))


@pytest.mark.ranks(2)
def test_channels_are_dropped_whole_and_moments_stay(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 2})
    x = torch.ones(64, 32, 4, 2)
    for name in ("dropout2d", "feature_alpha_dropout"):
        result = whole(getattr(functional, name)(domain.shard(x), 0.3, True))
        assert torch.equal(result, result[:, :, :1, :1].expand_as(result))
        dropped = (result[:, :, 0, 0] == result.min()).double().mean()
        assert 0.25 < dropped < 0.35
    normal = torch.randn(64, 32, 4, 2, generator=torch.Generator().manual_seed(1))
    result = whole(functional.alpha_dropout(domain.shard(normal), 0.3, True))
    assert abs(result.mean()) < 0.05
    assert abs(result.std() - 1) < 0.05
    doubled = whole(functional.dropout(domain.shard(x), 0.5))
    assert_equal(doubled.unique(), torch.tensor([0.0, 2.0]))


@pytest.mark.ranks(2)
def test_gradients_inference_and_refusals(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 0})
    part = torch.ones(3, 4, requires_grad=True)
    x = domain.from_local(part, (3 * world.size, 4))
    result = functional.dropout(x, 0.5)
    result.sum().backward()
    assert isinstance(result, DomainTensor)
    assert_equal(part.grad, result.to_local())
    assert functional.dropout(x, 0.5, training=False) is x
    assert functional.dropout2d(x, 0.0) is x
    kept = domain.from_local(torch.ones(3, 4), x.shape)
    assert functional.dropout(kept, 1.0, inplace=True) is kept
    assert not kept.to_local().any()
    refused(ValueError, (lambda: functional.dropout(x, 1.5), "from 0 to 1, got 1.5"))
    refused(ax.errors.DomainError, (lambda: torch.dropout(x, 0.5, True), "no rule"))
