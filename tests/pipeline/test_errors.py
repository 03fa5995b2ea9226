"""What a pipeline refuses: on all ranks, before anything is sent, and with a message that says what to do."""

from __future__ import annotations

import pytest
import torch
from helpers.pipelines import assert_step_like_one_process, batches, block, built
from torch import nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule, PipelineStage
from axonmpi.pipeline import make_schedule, pop, stash


def refused(world, call, message: str) -> None:
    """Check that a call raises on all ranks, and that they go on together."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()
    assert ax.all_gather_object(world.rank) == list(range(world.size))


@pytest.mark.ranks(2)
def test_wrong_stages(world) -> None:
    stages = [PipelineStage(module, rank, rank) for rank, module in enumerate(built(block, 2))]
    doubled = [PipelineStage(stage.module, stage.stage_id, 0) for stage in stages]
    turned = [PipelineStage(stage.module, stage.stage_id, 1 - stage.device_rank) for stage in stages]
    absent = [PipelineStage(None, stage.stage_id, stage.device_rank) for stage in stages]
    refused(world, lambda: Pipeline.from_modules(built(block, 3)), "multiple of 2.*got 3")
    refused(world, lambda: Pipeline.from_modules([]), "multiple of 2.*got 0")
    for wrong, message in (
        (stages[1:], "each stage_id from 0 once"),
        ([*stages, stages[0]], "each stage_id from 0 once"),
        ([], "each stage_id from 0 once"),
        ([stages[0], nn.Linear(2, 2)], "expected PipelineStage objects, got Linear"),
        (doubled, "same number of stages on each of the 2"),
        (turned, r"expected device_rank \[0, 1\]"),
        (absent, "expected a module for stage 0 on its own rank"),
        ([stages[0], absent[1]], "rank 1: stages: expected a module for stage 1"),
    ):
        refused(world, lambda wrong=wrong: Pipeline(wrong), message)
    for wrong in ((None, 0, "x"), (nn.Identity(), -1, 0), ("module", 0, 0)):
        with pytest.raises((TypeError, ValueError)):
            PipelineStage(*wrong)


@pytest.mark.ranks(2)
def test_wrong_arguments(world) -> None:
    for settings, message in (
        ({"num_microbatches": 0}, "num_microbatches: expected at least 1, got 0"),
        ({"num_microbatches": 2.0}, "num_microbatches: expected an integer, got 2.0"),
        ({"skips": {"a": (1, 0)}}, "skips.'a'.*the earlier one first"),
        ({"skips": {"a": (0, 2)}}, "stages from 0 to 1"),
        ({"ties": [[(0, "0.weight"), (2, "0.weight")]]}, "ties: expected stages from 0 to 1"),
        ({"ties": [[(0, "0.weight"), (1, "weigth")]]}, "parameter of stage 1, got 'weigth'"),
        ({"ties": [[(0, "0.weight")]]}, "parameters of several stages"),
        ({"seed": "x"}, "seed: expected an integer, got 'x'"),
        ({"seed": world.rank}, "not the same on all ranks.*\n.*rank 0: seed: 0\n.*rank 1: seed: 1"),
        ({"schedule": ("gpipe", "1f1b")[world.rank]}, "not the same on all ranks.*\n.*rank 0: schedule: .*GPIPE\n"),
    ):
        refused(world, lambda settings=settings: Pipeline.from_modules(built(block, 2), **settings), message)
    three_each = built(block, 6)
    refused(
        world, lambda: Pipeline.from_modules(three_each, schedule="zero-bubble"), "chunks: expected 1 or 2 stages"
    )
    for schedule, named in (("2f2b", "schedule: expected an axonmpi.PipelineSchedule"), (3, "got 3")):
        with pytest.raises((TypeError, ValueError), match=named):
            Pipeline.from_modules(built(block, 2), schedule=schedule)


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_wrong_steps(world) -> None:
    last, ((inputs, targets),) = world.size - 1, batches(1)
    pipeline = Pipeline.from_modules(built(block, world.size), num_microbatches=2, loss_fn=F.mse_loss)
    fewer = "target: expected as many samples.*11, got 5"
    for _ in range(2):  # before shapes are known, and when they are
        for wrong, message in (
            ((None, targets), "rank 0: input: expected a tensor.*got None"),
            ((inputs[:0], targets), "rank 0: input.*of the same size from 1"),
            (((inputs, inputs[:3]), targets), "rank 0: input.*dim 0 is the batch"),
            ((torch.tensor(1.0), targets), "rank 0: input.*dim 0 is the batch"),
            ((inputs, None), f"rank {last}: target: expected a tensor"),
            ((inputs, targets[:5]), fewer),
        ):
            refused(world, lambda wrong=wrong: pipeline.train_step(*wrong), message)
        pipeline.train_step(inputs, targets)
    refused(world, lambda: pipeline.eval_step(inputs, targets[:5]), fewer)
    assert_step_like_one_process(pipeline, built(block, world.size), (inputs, targets))

    def differently():
        return pipeline(inputs) if world.rank else pipeline.train_step(inputs, targets)

    refused(world, differently, "make different steps.*\n.*rank 0: train, .*\n.*ranks? 1.*: predict")
    pipeline.num_microbatches = 2 + world.rank
    refused(
        world,
        lambda: pipeline.train_step(inputs, targets),
        "make different steps.*\n.*rank 0: train, num_microbatches=2\n",
    )
    pipeline.num_microbatches = 20_000
    many = inputs.repeat(2000, 1)
    refused(world, lambda: pipeline.train_step(many, many), "num_microbatches: expected at most")
    pipeline.loss_fn, pipeline.num_microbatches = None, 2
    refused(world, lambda: pipeline.train_step(inputs, targets), "loss_fn: expected one")
    pipeline.record_times(world.rank != 1)
    refused(
        world, lambda: pipeline.write_trace("trace.json"), r"^rank 1: .*expected that record_times\(\) was called"
    )
    for limits, name in (((-1.0, 2.0), "max_norm: expected 0"), ((1.0, 0.0), "norm_type: expected a positive")):
        with pytest.raises(ValueError, match=name):
            pipeline.clip_grad_norm(*limits)


@pytest.mark.ranks(2)
def test_schedules_of_others(world) -> None:
    """A function that makes schedules serves if they are valid and for these stages."""
    ((inputs, targets),) = batches(1)

    def made(change, chunks=lambda count: 1) -> Pipeline:
        def maker(count):
            return change(make_schedule(PipelineSchedule.GPIPE, 2, count, chunks(count)))

        return Pipeline.from_modules(built(block, 2), schedule=maker, num_microbatches=3, loss_fn=F.mse_loss)

    def shorter(whole):
        cut = tuple(own[:-1] for own in whole.actions)
        return type(whole)(whole.name, whole.placement, whole.num_microbatches, cut, whole.edges)

    assert_step_like_one_process(made(lambda whole: whole), built(block, 2), (inputs, targets))
    refused(world, lambda: made(shorter).train_step(inputs, targets), "micro-batch 2")
    larger = made(lambda whole: whole, lambda count: 2 if count > 1 else 1)
    refused(world, lambda: larger.train_step(inputs, targets), "schedule: expected one for stages on ranks")


@pytest.mark.ranks(2)
def test_a_tensor_for_a_batch_that_is_none(world) -> None:
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    pipeline = Pipeline.from_modules([nn.Identity(), Mean()])
    if pipeline.has_last_stage:
        with pytest.raises(ValueError, match="got a tensor without dimensions"):
            pipeline(torch.ones(4, 2))
    else:
        pipeline(torch.ones(4, 2))


def test_names_that_are_stashed_twice_or_never() -> None:
    stash("once", 1)
    with pytest.raises(ValueError, match="no stage has popped"):
        stash("once", 2)
    assert pop("once") == 1
    with pytest.raises(ValueError, match="stashed: nothing"):
        pop("once")
