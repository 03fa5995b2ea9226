"""Normalizations of tensors that are cut over ranks, against one process."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor, nn
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor
from axonmpi.errors import DomainError

KINDS = ["batch", "instance", "eval", "group", "layer", "rms"]


def drawn_norm(
    draw: random.Random, shape: list[int], kind: str
) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """Draw the options of a function, its weight and bias, and its running statistics."""
    channels = shape[1]
    of_weights = shape[draw.randrange(len(shape)) :] if kind in ("layer", "rms") else [channels]
    weights = [randn(seed, *of_weights) for seed in (2, 3)][: 1 if kind == "rms" else draw.choice([0, 1, 2, 2])]
    running = [randn(4, channels), randn(5, channels).abs() + 0.1]
    count, none = len(weights), [None, None]
    if kind in ("batch", "eval"):
        training, eps = kind == "batch", 1e-3
        return (
            lambda x, *other: functional.batch_norm(
                x, *other[count:], *[*other[:count], *none][:2], training, 0.3, eps
            ),
            weights,
            running,
        )
    if kind == "instance":
        return lambda x, *w: functional.instance_norm(x, None, None, *w), weights, []
    if kind == "group":
        groups = draw.choice([number for number in range(1, channels + 1) if channels % number == 0])
        return lambda x, *w: functional.group_norm(x, groups, *w), weights, []
    of_layers: Any = functional.layer_norm if kind == "layer" else functional.rms_norm
    return lambda x, *w: of_layers(x, of_weights, *w), weights, []


@pytest.mark.ranks(2, 3, 4)
def test_norms_are_those_of_one_process(world: ax.World, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(20):
        mesh = drawn_mesh(draw, world)
        shape = [
            draw.randint(1, 3),
            draw.choice([2, 4, 6]),
            *(draw.randint(2, 6) for _ in range(draw.randint(2, 3))),
        ]
        kind = draw.choice(KINDS)
        function, weights, running = drawn_norm(draw, shape, kind)
        channels = [] if kind == "group" else [1]
        dims = drawn_cut(draw, mesh, [0, *channels, *range(2, len(shape))], len(shape))
        what = f"{number}: {shape}, {dims}"
        cuts = [dims, *[None] * len(weights)]
        assert_as_whole(mesh, function, [randn(1, *shape) + 3, *weights], cuts, running, 1e-9, what)


@pytest.mark.ranks(2)
def test_large_means_cost_no_more_digits_than_on_one_process(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 2})
    x = randn(1, 2, 8, 33, 9, dtype=torch.float32) + 1e5
    gradient = randn(2, *x.shape, dtype=torch.float32)
    for layer in (nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.LayerNorm([8, 33, 9])):
        errors: list[Tensor] = []
        exact: list[Tensor] = []
        for kind in ("double", "alone", "cut"):
            cast = layer.double() if kind == "double" else layer.float()
            given = (x.double() if kind == "double" else x.clone()).requires_grad_()
            part = given.detach()[domain.slices(x.shape)].requires_grad_()
            result = cast(domain.from_local(part, x.shape) if kind == "cut" else given)
            (result * gradient).sum().backward()
            whole = result.full_tensor() if isinstance(result, DomainTensor) else result.detach()
            moved = domain.from_local(part.grad, x.shape).full_tensor() if part.grad is not None else given.grad
            assert moved is not None
            if kind == "double":
                exact = [whole, moved]
            errors += [(one - other).abs().max() for one, other in zip((whole, moved), exact, strict=True)]
        assert errors[4] <= 4 * errors[2], (layer, errors)
        assert errors[5] <= 4 * errors[3], (layer, errors)


@pytest.mark.ranks(2)
def test_channels_beside_each_other(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"y": world.size})
    for dim in (1, 2):
        for sizes in ([5], [3, 2]):
            x = randn(1, 2, 4, *sizes)
            assert_as_whole(mesh, lambda x: functional.local_response_norm(x, 3), [x], [{"y": dim}])


@pytest.mark.ranks(2)
def test_refusals(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 1})
    x, channels = domain.shard(randn(1, 1, 4)), domain.shard(randn(1, 1, 4, 2))
    refused(
        DomainError,
        (
            lambda: functional.batch_norm(randn(1, 3, 4), x[0], x[0], training=True),
            "a weight or a statistic that is cut",
        ),
        (lambda: functional.group_norm(channels, 2), "groups of channels, which are cut"),
        (lambda: functional.instance_norm(channels, torch.ones(4), torch.ones(4)), "average running statistics"),
    )
    refused(ValueError, (lambda: functional.batch_norm(x, None, None, training=True), "more than 1 value"))
    refused(RuntimeError, (lambda: functional.layer_norm(x, [3]), r"expected the last sizes \[3\]"))
