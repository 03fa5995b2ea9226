"""Losses of tensors that are cut over ranks, against one process."""

import random
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

LOSSES: list[Any] = [
    functional.mse_loss,
    functional.l1_loss,
    partial(functional.smooth_l1_loss, beta=0.5),
    partial(functional.huber_loss, delta=0.7),
    lambda x, t, **options: functional.mse_loss(x, t, weight=t.detach().exp(), **options),
    lambda x, t, **options: functional.binary_cross_entropy(x.sigmoid(), t.sigmoid(), **options),
    lambda x, t, **options: functional.binary_cross_entropy_with_logits(
        x, t, pos_weight=t.detach().exp(), **options
    ),
    partial(functional.kl_div, log_target=True),
    lambda x, t, **options: functional.poisson_nll_loss(x, t.detach().exp(), full=True, **options),
    lambda x, t, **options: functional.gaussian_nll_loss(x, t, (x * t).exp(), **options),
    lambda x, t, **options: functional.soft_margin_loss(x, t.detach().sign(), **options),
    lambda x, t, **options: functional.hinge_embedding_loss(x, t.detach().sign(), **options),
    lambda x, t, **options: functional.multilabel_soft_margin_loss(x, t.detach().sigmoid(), **options),
    lambda x, t, **options: functional.margin_ranking_loss(x, t, t.detach().sign(), 0.1, **options),
]


@pytest.mark.filterwarnings("ignore:reduction")  # of kl_div, which advises another mean
@pytest.mark.ranks(2, 3, 4)
def test_losses_are_those_of_one_process(world: ax.World, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(15):
        mesh, shape = drawn_mesh(draw, world), [draw.randint(1, 6) for _ in range(draw.randint(2, 4))]
        cut = drawn_cut(draw, mesh, range(len(shape)), len(shape))
        loss, reduction = draw.choice(LOSSES), draw.choice(["none", "sum", "mean"])
        x, target, what = randn(1, *shape), randn(2, *shape), f"{number}: {loss}, {reduction}, {shape}, {cut}"
        cuts = [cut, draw.choice([cut, None])]
        assert_as_whole(mesh, partial(loss, reduction=reduction), [x, target], cuts, what=what)


@pytest.mark.ranks(2, 3, 4)
def test_losses_of_classes_are_those_of_one_process(world: ax.World, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(15):
        mesh = drawn_mesh(draw, world)
        shape = [draw.randint(1, 4), draw.randint(2, 5), *(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))]
        cut = drawn_cut(draw, mesh, [0, *range(2, len(shape))], len(shape))
        options: dict[str, Any] = {"reduction": draw.choice(["none", "sum", "mean"])}
        if draw.random() < 0.5:
            options["weight"] = randn(3, shape[1]).abs()
        what = f"{number}: {options}, {shape}, {cut}"
        x, target = randn(1, *shape), randn(2, *shape).softmax(1)
        if draw.random() < 0.3:
            assert_as_whole(mesh, partial(functional.cross_entropy, **options), [x, target], [cut, cut], what=what)
            continue
        loss = draw.choice([functional.nll_loss, partial(functional.cross_entropy, label_smoothing=0.2)])
        classes = target.argmax(1).masked_fill(randn(4, shape[0], *shape[2:]) > 1, draw.choice([0, -100]))
        classes[(0,) * classes.dim()] = 1  # else a mean could be of nothing
        options["ignore_index"] = draw.choice([0, -100]) if (classes >= 0).all() else -100
        assert_as_whole(mesh, partial(loss, target=classes, **options), [x], [cut], what=what)


@pytest.mark.ranks(2)
def test_refusals(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"y": world.size})
    x, rows = Domain(mesh, {"y": 1}).shard(randn(1, 4, 4)), Domain(mesh, {"y": 0}).shard(randn(1, 4, 4))
    target: Tensor = torch.zeros(4, dtype=torch.int64)
    refused(
        DomainError,
        (lambda: functional.cross_entropy(x, target), "adds over classes"),
        (lambda: functional.multi_margin_loss(x, target), "no rule"),
    )
    refused(
        ValueError,
        (lambda: functional.cross_entropy(rows, target[:2]), "expected a target of the input's shape"),
        (lambda: functional.mse_loss(x, x, reduction="maximum"), "not a valid value for reduction"),
        (lambda: functional.binary_cross_entropy(rows, randn(1, 1, 4)), "Using a target size"),
    )
