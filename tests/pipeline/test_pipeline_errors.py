"""What a pipeline refuses: on all ranks, before anything is sent, and with a message that says what to do."""

from __future__ import annotations

import re

import pytest
import torch
from reference import batches, block, built
from torch import nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule, PipelineStage
from axonmpi.pipeline import make_schedule, pop, stash

pytestmark = pytest.mark.ranks(2, 4)


def refused(world, call, message: str) -> None:
    """Check that a call raises on all ranks, and that they go on together."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()
    assert ax.all_gather_object(world.rank) == list(range(world.size))


def test_wrong_stages(world) -> None:
    size = world.size
    refused(world, lambda: Pipeline.from_modules(built(block, size + 1)), f"multiple of {size}.*got {size + 1}")
    refused(world, lambda: Pipeline.from_modules([]), f"multiple of {size}.*got 0")
    stages = [PipelineStage(module, rank, rank) for rank, module in enumerate(built(block, size))]
    refused(world, lambda: Pipeline(stages[1:]), "each stage_id from 0 once")
    refused(world, lambda: Pipeline([*stages, stages[0]]), "each stage_id from 0 once")
    refused(world, lambda: Pipeline([]), "each stage_id from 0 once")
    refused(world, lambda: Pipeline([*stages[:-1], nn.Linear(2, 2)]), "expected PipelineStage objects, got Linear")
    doubled = [PipelineStage(stage.module, stage.stage_id, 0) for stage in stages]
    refused(world, lambda: Pipeline(doubled), f"same number of stages on each of the {size}")
    turned = [PipelineStage(stage.module, stage.stage_id, size - 1 - stage.device_rank) for stage in stages]
    refused(world, lambda: Pipeline(turned), re.escape(f"expected device_rank {list(range(size))}"))
    absent = [PipelineStage(None, stage.stage_id, stage.device_rank) for stage in stages]
    refused(world, lambda: Pipeline(absent), "expected a module for stage 0 on its own rank")
    only_here = [PipelineStage(None if rank == 1 else nn.Identity(), rank, rank) for rank in range(size)]
    refused(world, lambda: Pipeline(only_here), "rank 1: stages: expected a module for stage 1")


def test_wrong_arguments(world) -> None:
    size = world.size

    def make(**settings):
        return lambda: Pipeline.from_modules(built(block, size), **settings)

    refused(world, make(num_microbatches=0), "num_microbatches: expected 1 or more, got 0")
    refused(world, make(num_microbatches=2.0), "num_microbatches: expected an int, got 2.0")
    refused(world, make(skips={"a": (1, 0)}), "skips.'a'.*the earlier one first")
    refused(world, make(skips={"a": (0, size)}), f"stages from 0 to {size - 1}")
    absent = [(0, "0.weight"), (size, "0.weight")]
    refused(world, make(ties=[absent]), f"ties: expected stages from 0 to {size - 1}")
    refused(world, make(ties=[[(0, "0.weight"), (1, "weigth")]]), "parameter of stage 1, got 'weigth'")
    refused(world, make(ties=[[(0, "0.weight")]]), "places in several stages")
    refused(world, make(seed="x"), "seed: expected an int or None")
    refused(world, make(seed=world.rank), "seed: expected the same on all ranks.*got 0 on rank 0 and 1 on rank 1")
    mine = PipelineSchedule.GPIPE if world.rank else PipelineSchedule.ONE_F_ONE_B
    refused(world, make(schedule=mine), "schedule: expected the same on all ranks")
    refused(
        world,
        lambda: Pipeline.from_modules(built(block, 3 * size), schedule=PipelineSchedule.ZERO_BUBBLE),
        "chunks: expected 1 or 2 stages on each rank",
    )
    for wrong in ((None, 0, "x"), (nn.Identity(), -1, 0), ("module", 0, 0)):
        with pytest.raises((TypeError, ValueError)):
            PipelineStage(*wrong)


def test_wrong_batches(world) -> None:
    ((inputs, targets),) = batches(1)
    pipeline = Pipeline.from_modules(built(block, world.size), num_microbatches=2, loss_fn=F.mse_loss)
    for _ in range(2):  # before shapes are known, and when they are
        refused(world, lambda: pipeline.train_step(None, targets), "rank 0: input: expected a tensor.*got None")
        refused(world, lambda: pipeline.train_step(inputs[:0], targets), "rank 0: input.*of the same size from 1")
        for wrong in ((inputs, inputs[:3]), torch.tensor(1.0)):
            refused(
                world, lambda wrong=wrong: pipeline.train_step(wrong, targets), "rank 0: input.*dim 0 is the batch"
            )
        last = world.size - 1
        refused(world, lambda: pipeline.train_step(inputs, None), f"rank {last}: target: expected a tensor")
        fewer = "target: expected as many samples.*11, got 5"
        refused(world, lambda: pipeline.train_step(inputs, targets[:5]), fewer)
        pipeline.train_step(inputs, targets)
    before = [parameter.grad.clone() for parameter in pipeline.parameters()]
    refused(world, lambda: pipeline.eval_step(inputs, targets[:5]), "target: expected as many samples")
    for parameter, gradient in zip(pipeline.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_ranks_that_do_different_things(world) -> None:
    ((inputs, targets),) = batches(1)
    pipeline = Pipeline.from_modules(built(block, world.size), num_microbatches=2, loss_fn=F.mse_loss)

    def differently():
        return pipeline(inputs) if world.rank else pipeline.train_step(inputs, targets)

    refused(world, differently, "the operation: expected the same on all ranks.*train on rank 0, predict on rank 1")
    pipeline.num_microbatches = 2 + world.rank
    refused(world, lambda: pipeline.train_step(inputs, targets), "num_microbatches: expected the same on all ranks")
    pipeline.num_microbatches = 20_000
    many = inputs.repeat(2000, 1)
    refused(world, lambda: pipeline.train_step(many, many), "num_microbatches: expected at most")
    pipeline.num_microbatches = 2
    without = Pipeline.from_modules(built(block, world.size))
    refused(world, lambda: without.train_step(inputs, targets), "loss_fn: expected one")
    pipeline.record_times(world.rank != 1)
    refused(world, lambda: pipeline.write_trace("trace.json"), r"record_times\(\) was called.*not on rank 1$")
    for limits, name in (((-1.0, 2.0), "max_norm: expected 0"), ((1.0, 0.0), "norm_type: expected a positive")):
        with pytest.raises(ValueError, match=name):
            pipeline.clip_grad_norm(*limits)


def test_schedules_of_others(world) -> None:
    """A function that makes schedules serves if they are valid and for these stages."""
    size, ((inputs, targets),) = world.size, batches(1)

    def gpipe(count):
        return make_schedule(PipelineSchedule.GPIPE, size, count)

    pipeline = Pipeline.from_modules(built(block, size), schedule=gpipe, num_microbatches=3, loss_fn=F.mse_loss)
    loss = pipeline.train_step(inputs, targets)
    if loss is not None:
        expected = F.mse_loss(nn.Sequential(*built(block, size))(inputs), targets)
        torch.testing.assert_close(loss, expected.detach())

    def shorter(count):
        whole = gpipe(count)
        return type(whole)(
            whole.name, whole.placement, count, tuple(own[:-1] for own in whole.actions), whole.edges
        )

    wrong = Pipeline.from_modules(built(block, size), schedule=shorter, num_microbatches=3, loss_fn=F.mse_loss)
    refused(world, lambda: wrong.train_step(inputs, targets), "micro-batch 2")

    def larger(count):
        return make_schedule(PipelineSchedule.GPIPE, size, count, 2 if count > 1 else 1)

    other = Pipeline.from_modules(built(block, size), schedule=larger, num_microbatches=3, loss_fn=F.mse_loss)
    refused(world, lambda: other.train_step(inputs, targets), "schedule: expected one for stages on ranks")
    for schedule, named in (("2f2b", "schedule: expected an axonmpi.PipelineSchedule"), (3, "got 3")):
        with pytest.raises((TypeError, ValueError), match=f"{named}.*"):
            Pipeline.from_modules(built(block, size), schedule=schedule)


@pytest.mark.ranks(2)
def test_a_tensor_for_a_batch_that_is_none(world) -> None:
    pipeline = Pipeline.from_modules([nn.Identity(), Mean()])
    failure = None
    try:
        pipeline(torch.ones(4, 2))
    except ValueError as error:
        failure = str(error)
    assert (failure is not None) == pipeline.has_last_stage
    assert failure is None or "got a tensor without dimensions" in failure


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_names_that_are_stashed_twice_or_never() -> None:
    stash("once", 1)
    with pytest.raises(ValueError, match="nobody has popped"):
        stash("once", 2)
    assert pop("once") == 1
    with pytest.raises(ValueError, match="there is: nothing"):
        pop("once")
