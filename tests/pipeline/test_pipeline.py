"""Training in a pipeline equals training in one process, whatever the schedule and cut; mistakes are refused."""

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.pipelines import (
    SAMPLES,
    assert_gradients,
    assert_step_like_one_process,
    assert_trains_like,
    batches,
    block,
    built,
    gradients_of,
    trained,
)
from helpers.programs import run_alone
from helpers.settings import all_pairs
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import Pipeline, PipelineSchedule, PipelineStage, make_schedule, pop, stash

CASES = all_pairs(
    ranks=(1, 2, 3),
    layout=(
        ("gpipe", 1),
        ("gpipe", 2),
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
    ),
    parts=(1, 2, 5),
    random=(None, 3),
    ranks_per_node=("", "1", "2"),
    sizes=((SAMPLES, SAMPLES), (SAMPLES, 3, 1, SAMPLES)),  # fewer samples than micro-batches, too
    batches_of_step=(1, 2),
    late=("nobody", "anybody", "first", "last"),
)


class Late(nn.Sequential):
    """A stage that sleeps before some forwards and in some backwards, so that ranks come in another order."""

    def __init__(self, modules: nn.Sequential, chance: random.Random) -> None:
        super().__init__(*modules)
        self.chance = chance

    def sleep(self, _: object) -> None:
        time.sleep(self.chance.choice((0.0, 0.001)))

    def forward(self, x: Tensor) -> Tensor:
        self.sleep(x)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.sleep)
        return output


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 3)
def test_training_equals_one_process(world, seed, monkeypatch) -> None:
    """However late ranks are, and whatever is computed or evaluated in between."""
    chance = random.Random(seed + world.rank)
    for case in [case for case in CASES if case["ranks"] == world.size]:
        monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", case["ranks_per_node"])
        group = world.new_group(range(world.size))
        assert len(group.backend.node_ranks) <= int(case["ranks_per_node"] or world.size)
        check_training(world, group, case, chance)


def check_training(world, group, case, chance: random.Random) -> None:
    (schedule, chunks), parts = case["layout"], case["parts"]
    make = partial(block, dropout=0.0 if case["random"] is None else 0.3)
    data = [[(x[:size], y[:size]) for x, y in batches(case["batches_of_step"])] for size in case["sizes"]]
    for_one, stages = (built(make, world.size * chunks) for _ in range(2))
    model, found = trained(for_one, data, parts=parts, loss_fn=F.mse_loss, seed=case["random"])
    late = {"nobody": (), "anybody": range(world.size), "first": (0,), "last": (world.size - 1,)}
    if world.rank in late[case["late"]]:
        stages = [Late(module, chance) for module in stages]
    settings = {"schedule": schedule, "num_microbatches": parts, "loss_fn": F.mse_loss, "seed": case["random"]}
    assert_trains_like(Pipeline.from_modules(stages, group, **settings), model, found, data, str(case))


@pytest.mark.ranks(2)
def test_norms_of_all_kinds(world) -> None:
    pipeline = Pipeline.from_modules(built(block, 2), loss_fn=F.mse_loss)
    for norm_type in (1.0, 2.0, float("inf")):
        model = nn.Sequential(*built(block, 2))
        assert_step_like_one_process(pipeline, model, *batches(1))
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        assert_close(pipeline.clip_grad_norm(0.01, norm_type), expected.float())
        assert_gradients(pipeline, gradients_of(model))


@pytest.mark.ranks(2)
def test_the_loss_is_weighed_as_it_says(world) -> None:
    """Targets that count for nothing are no part of the mean, in whichever micro-batch they are."""
    targets = torch.arange(SAMPLES) % 8
    targets[[0, 1, 2, 7]] = -100  # the first micro-batch has no others

    def counted(target: Tensor) -> int:
        return int((target != -100).sum())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / max(counted(target), 1)

    settings = {"num_microbatches": 4, "loss_fn": loss_fn, "loss_weight": counted, "schedule": "gpipe"}
    pipeline = Pipeline.from_modules(built(block, 2), **settings)
    assert_step_like_one_process(pipeline, built(block, 2), (batches(1)[0][0], targets), F.cross_entropy)


# ---- mistakes ----------------------------------------------------------------------------------------------------

MISTAKE = (ValueError, TypeError)


@pytest.mark.ranks(2)
def test_wrong_stages(world) -> None:
    stages = [PipelineStage(module, rank, rank) for rank, module in enumerate(built(block, 2))]
    doubled = [PipelineStage(stage.module, stage.stage_id, 0) for stage in stages]
    turned = [PipelineStage(stage.module, stage.stage_id, 1 - stage.device_rank) for stage in stages]
    absent = [PipelineStage(None, stage.stage_id, stage.device_rank) for stage in stages]
    refused(
        MISTAKE,
        (partial(Pipeline.from_modules, built(block, 3)), "multiple of 2.*got 3"),
        (partial(Pipeline.from_modules, []), "multiple of 2.*got 0"),
        (partial(Pipeline.from_modules, built(block, 6), schedule="zero-bubble"), "chunks: expected 1 or 2 stages"),
        (partial(Pipeline, stages[1:]), "each stage_id from 0 once"),
        (partial(Pipeline, [*stages, stages[0]]), "each stage_id from 0 once"),
        (partial(Pipeline, []), "each stage_id from 0 once"),
        (partial(Pipeline, [stages[0], nn.Linear(2, 2)]), "expected PipelineStage objects, got Linear"),
        (partial(Pipeline, doubled), "same number of stages on each of the 2"),
        (partial(Pipeline, turned), r"expected device_rank \[0, 1\]"),
        (partial(Pipeline, absent), "expected a module for stage 0 on its own rank"),
        (partial(Pipeline, [stages[0], absent[1]]), "rank 1: stages: expected a module for stage 1"),
        (partial(PipelineStage, None, 0, "x"), "expected"),
        (partial(PipelineStage, nn.Identity(), -1, 0), "expected"),
        (partial(PipelineStage, "module", 0, 0), "expected"),
    )
    ax.barrier()


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
        ({"schedule": "2f2b"}, "schedule: expected an axonmpi.PipelineSchedule"),
        ({"schedule": 3}, "got 3"),
    ):
        refused(MISTAKE, (partial(Pipeline.from_modules, built(block, 2), **settings), message))
    ax.barrier()


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_wrong_steps(world) -> None:
    last, ((inputs, targets),) = world.size - 1, batches(1)
    pipeline = Pipeline.from_modules(built(block, world.size), num_microbatches=2, loss_fn=F.mse_loss)
    step, fewer = pipeline.train_step, "target: expected as many samples.*11, got 5"
    for _ in range(2):  # before shapes are known, and when they are
        refused(
            MISTAKE,
            (partial(step, None, targets), "rank 0: input: expected a tensor.*got None"),
            (partial(step, inputs[:0], targets), "rank 0: input.*of the same size from 1"),
            (partial(step, (inputs, inputs[:3]), targets), "rank 0: input.*dim 0 is the batch"),
            (partial(step, torch.tensor(1.0), targets), "rank 0: input.*dim 0 is the batch"),
            (partial(step, inputs, None), f"rank {last}: target: expected a tensor"),
            (partial(step, inputs, targets[:5]), fewer),
        )
        step(inputs, targets)
    refused(MISTAKE, (partial(pipeline.eval_step, inputs, targets[:5]), fewer))
    assert_step_like_one_process(pipeline, built(block, world.size), (inputs, targets))
    right, many = partial(step, inputs, targets), inputs.repeat(2000, 1)
    told = "make different steps.*\n.*rank 0: train, "
    refused(MISTAKE, (partial(pipeline, inputs) if world.rank else right, f"{told}.*\n.*ranks? 1.*: predict"))
    pipeline.num_microbatches = 2 + world.rank
    refused(MISTAKE, (right, f"{told}num_microbatches=2\n"))
    pipeline.num_microbatches = 20_000
    refused(MISTAKE, (partial(step, many, many), "num_microbatches: expected at most"))
    pipeline.loss_fn, pipeline.num_microbatches = None, 2
    refused(MISTAKE, (right, "loss_fn: expected one"))
    pipeline.record_times(world.rank != 1)
    refused(
        MISTAKE,
        (partial(pipeline.write_trace, "trace.json"), r"^rank 1: .*expected that record_times\(\) was called"),
        (partial(pipeline.clip_grad_norm, -1.0, 2.0), "max_norm: expected 0"),
        (partial(pipeline.clip_grad_norm, 1.0, 0.0), "norm_type: expected a positive"),
    )
    ax.barrier()


@pytest.mark.ranks(2)
def test_schedules_of_others(world) -> None:
    """A function that makes schedules serves if they are valid and for these stages."""
    (batch,) = batches(1)

    def made(schedule) -> Pipeline:
        return Pipeline.from_modules(built(block, 2), schedule=schedule, num_microbatches=3, loss_fn=F.mse_loss)

    def shorter(count):
        whole = make_schedule(PipelineSchedule.GPIPE, 2, count)
        return replace(whole, actions=tuple(own[:-1] for own in whole.actions))

    larger = made(lambda count: make_schedule(PipelineSchedule.GPIPE, 2, count, 2 if count > 1 else 1))
    assert_step_like_one_process(made(partial(make_schedule, PipelineSchedule.GPIPE, 2)), built(block, 2), batch)
    refused(
        MISTAKE,
        (partial(made(shorter).train_step, *batch), "micro-batch 2"),
        (partial(larger.train_step, *batch), "schedule: expected one for stages on ranks"),
    )
    ax.barrier()


@pytest.mark.ranks(2)
def test_a_tensor_for_a_batch_that_is_none(world) -> None:
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    pipeline, message = Pipeline.from_modules([nn.Identity(), Mean()]), "got a tensor without dimensions"
    with pytest.raises(ValueError, match=message) if pipeline.has_last_stage else nullcontext():
        pipeline(torch.ones(4, 2))


def test_names_that_are_stashed_twice_or_never() -> None:
    stash("once", 1)
    refused(ValueError, (partial(stash, "once", 2), "no stage has popped"))
    assert pop("once") == 1
    refused(ValueError, (partial(pop, "once"), "stashed: nothing"))


ORDINARY_STEPS = """
import torch
from torch import nn
import axonmpi as ax
from axonmpi.testing import run_ranks

def train(world):
    stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
    options = {"num_microbatches": 2, "loss_fn": nn.functional.mse_loss}
    pipe = ax.Pipeline.from_modules(stages, world.default_group, **options)
    own = list(pipe.parameters())
    optimizers = torch.optim.Adafactor(own), torch.optim.SGD(own, momentum=0.9)
    for _ in range(2):
        pipe.train_step(torch.ones(4, 3), torch.zeros(4, 3))
        for optimizer in optimizers:
            optimizer.step()
    kinds = {type(state["momentum_buffer"]) for state in optimizers[1].state.values()}
    assert kinds == {torch.Tensor}, kinds

run_ranks(2, train)
"""


def test_steps_see_ordinary_gradients_if_a_pipeline_is_all_that_a_process_has() -> None:
    done = run_alone(ORDINARY_STEPS)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
