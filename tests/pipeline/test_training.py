"""Training in a pipeline equals training in one process: every schedule, cut, and number of micro-batches."""

from __future__ import annotations

import functools
import random
import time

import pytest
import torch
from helpers.pipelines import (
    SAMPLES,
    assert_gradients,
    assert_step_like_one_process,
    assert_trains_like,
    batches,
    block,
    built,
    trained,
)
from helpers.settings import all_pairs
from torch import Tensor, nn
from torch.nn import functional as F

from axonmpi import Pipeline

CASES = all_pairs(
    ranks=(1, 2, 3, 4),
    layout=(
        ("gpipe", 1),
        ("gpipe", 2),
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
    ),
    parts=(1, 2, 5, 8),
    seed=(None, 3),
    ranks_per_node=("", "1", "2"),
    sizes=((SAMPLES, SAMPLES, SAMPLES), (SAMPLES, 3, 1, SAMPLES)),  # fewer samples than micro-batches, too
    batches_of_step=(1, 2),
    late=("nobody", "anybody", "first", "last"),
)


class Late(nn.Sequential):
    """A stage that takes its time before each forward and in each backward, or does so now and then."""

    delays: tuple[float, ...] = (0.0,)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(random.choice(self.delays))
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda _: time.sleep(random.choice(self.delays)))
        return output


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("half", [pytest.param(0, marks=pytest.mark.real_ranks), 1])
def test_training_equals_one_process(world, half, monkeypatch) -> None:
    """However late ranks are, and whatever is computed or evaluated in between."""
    for case in [case for case in CASES if case["ranks"] == world.size][half::2]:
        monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", case["ranks_per_node"])
        group = world.new_group(range(world.size))
        assert len(group.backend.node_ranks) <= int(case["ranks_per_node"] or world.size)
        check_training(world, group, case)


def check_training(world, group, case) -> None:
    (schedule, chunks), seed, parts = case["layout"], case["seed"], case["parts"]
    make = functools.partial(block, dropout=0.0 if seed is None else 0.3)
    data = [[(x[:size], y[:size]) for x, y in batches(case["batches_of_step"])] for size in case["sizes"]]
    count = world.size * chunks
    model, found = trained(built(make, count), data, loss_fn=F.mse_loss, parts=parts, seed=seed)
    stages = [Late(*module) for module in built(make, count)]
    for stage in stages:
        late = {"nobody": False, "anybody": True, "first": world.rank == 0, "last": world.rank == world.size - 1}
        stage.delays = (0.001 * late[case["late"]], 0.001 * (late[case["late"]] and case["late"] != "anybody"))
    settings = {"schedule": schedule, "num_microbatches": parts, "loss_fn": F.mse_loss, "seed": seed}
    assert_trains_like(Pipeline.from_modules(stages, group, **settings), model, found, data, case)


@pytest.mark.ranks(2)
def test_norms_of_all_kinds(world) -> None:
    batch = batches(1)[0]
    pipeline = Pipeline.from_modules(built(block, 2), loss_fn=F.mse_loss)
    for norm_type in (1.0, 2.0, float("inf")):
        model = nn.Sequential(*built(block, 2))
        assert_step_like_one_process(pipeline, model, batch)
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        torch.testing.assert_close(pipeline.clip_grad_norm(0.01, norm_type), expected)
        assert_gradients(pipeline, {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.ranks(2)
def test_the_loss_is_weighed_as_it_says(world) -> None:
    """Targets that count for nothing are no part of the mean, in whichever micro-batch they are."""
    targets = torch.arange(SAMPLES) % 8
    targets[[0, 1, 2, 7]] = -100  # the first micro-batch has no others

    def counted(target: Tensor) -> int:
        return int((target != -100).sum())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / max(counted(target), 1)

    pipeline = Pipeline.from_modules(
        built(block, 2), num_microbatches=4, loss_fn=loss_fn, loss_weight=counted, schedule="gpipe"
    )
    assert_step_like_one_process(pipeline, built(block, 2), (batches(1)[0][0], targets), F.cross_entropy)
