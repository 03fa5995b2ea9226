"""Training in a pipeline equals training in one process: every schedule, cut and number of micro-batches."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from reference import SAMPLES, adamw, assert_stages_equal, batches, block, built, train, trained
from torch.nn import functional as F

from axonmpi import Pipeline, PipelineSchedule
from axonmpi.pipeline import make_schedule

GPIPE, ZERO_BUBBLE = PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE
ONE_F_ONE_B, INTERLEAVED = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
MICRO_BATCHES = (1, 2, 5, 8)
SEED, DROPOUT = 3, 0.3
_once = threading.Lock()


@functools.lru_cache(maxsize=64)
def _reference(stages: int, parts: int, seed: int | None):
    return trained(built(_maker(seed), stages), batches(), parts=parts, seed=seed)


@functools.lru_cache
def _maker(seed: int | None):
    return functools.partial(block, dropout=0.0 if seed is None else DROPOUT)


def reference(stages: int, parts: int, seed: int | None):
    """Train in one process, once for all ranks of this process."""
    with _once:
        return _reference(stages, parts if seed is not None else 1, seed)


def check_training(world, schedule, chunks: int, parts: int, seed: int | None) -> None:
    stages = world.size * chunks
    model, losses, _ = reference(stages, parts, seed)
    pipeline = Pipeline.from_modules(
        built(_maker(seed), stages), schedule=schedule, num_microbatches=parts, loss_fn=F.mse_loss, seed=seed
    )
    train(pipeline, batches(), losses)
    assert_stages_equal(pipeline, model, (schedule, chunks, parts, seed))


def test_schedules_that_are_the_same() -> None:
    """So that each of them need not be trained with twice."""
    for ranks in (1, 2, 3, 4):
        for count in MICRO_BATCHES:
            for chunks in (1, 2):
                one, other = (make_schedule(kind, ranks, count, chunks) for kind in (ONE_F_ONE_B, INTERLEAVED))
                assert one == other


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [(GPIPE, 1), (GPIPE, 2), (ONE_F_ONE_B, 1), (INTERLEAVED, 2), (ZERO_BUBBLE, 1), (ZERO_BUBBLE, 2)],
    ids=lambda value: getattr(value, "value", str(value)),
)
def test_every_schedule_equals_one_process(world, schedule, chunks) -> None:
    for parts in MICRO_BATCHES:
        for seed in (None, SEED):
            check_training(world, schedule, chunks, parts, seed)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_messages_between_nodes_carry_the_same(world, monkeypatch, ranks_per_node) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    group = world.new_group(range(world.size))
    assert len(group.backend.node_ranks) == int(ranks_per_node)
    for schedule in PipelineSchedule:
        model, losses, _ = reference(2 * world.size, 1, None)
        pipeline = Pipeline.from_modules(
            built(_maker(None), 2 * world.size), group, schedule=schedule, num_microbatches=5, loss_fn=F.mse_loss
        )
        train(pipeline, batches(), losses)
        assert_stages_equal(pipeline, model, schedule)


@pytest.mark.ranks(1, 2, 4)
def test_batches_of_any_size_one_after_the_other(world) -> None:
    """The last batch is smaller, another has fewer samples than micro-batches; then the first size comes again."""
    sizes = (11, 11, 3, 1, 8, 11, 3)
    data = [(x[:size], y[:size]) for size, (x, y) in zip(sizes, batches(len(sizes)), strict=True)]
    model, losses, _ = trained(built(block, 2 * world.size), data)
    pipeline = Pipeline.from_modules(built(block, 2 * world.size), num_microbatches=4, loss_fn=F.mse_loss)
    train(pipeline, data, losses)
    assert_stages_equal(pipeline, model)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("schedule", PipelineSchedule, ids=lambda schedule: schedule.value)
def test_evaluation_between_steps(world, schedule) -> None:
    """Dropout is off, nothing is kept, gradients stay as they are, and training goes on as without it."""
    stages = 2 * world.size
    model, _, _ = reference(stages, 2, SEED)
    pipeline = Pipeline.from_modules(
        built(_maker(SEED), stages), schedule=schedule, num_microbatches=2, loss_fn=F.mse_loss, seed=SEED
    )
    untrained = torch.nn.Sequential(*built(_maker(SEED), stages)).eval()
    optimizer = adamw(pipeline.parameters())
    for step, (inputs, targets) in enumerate(batches()):
        optimizer.zero_grad()
        pipeline.train_step(inputs, targets)
        before = [parameter.grad.clone() for parameter in pipeline.parameters()]
        pipeline.eval()
        output, loss = pipeline(inputs), pipeline.eval_step(inputs, targets)
        pipeline.train()
        assert (output is not None) == (loss is not None) == pipeline.has_last_stage
        if pipeline.has_last_stage and step == 0:  # no optimizer has changed anything yet
            expected = untrained(inputs).detach()
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(loss, F.mse_loss(expected, targets))
        for parameter, gradient in zip(pipeline.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)
        optimizer.step()
    assert_stages_equal(pipeline, model)


@pytest.mark.ranks(2, 4)
def test_gradients_can_be_added_up_and_clipped(world) -> None:
    """Two steps of half a batch each, under one norm over all stages, are one step of the batch."""
    data = [(x[:10], y[:10]) for x, y in batches(5)]
    model, _, norms = trained(built(block, world.size), data, max_norm=0.1)
    pipeline = Pipeline.from_modules(built(block, world.size), num_microbatches=2, loss_fn=F.mse_loss)
    optimizer = adamw(pipeline.parameters())
    for (inputs, targets), norm in zip(data, norms, strict=True):
        optimizer.zero_grad()
        with pipeline.no_sync():
            pipeline.train_step(inputs[:5], targets[:5])
        pipeline.train_step(inputs[5:], targets[5:])
        for parameter in pipeline.parameters():
            parameter.grad /= 2
        seen = pipeline.clip_grad_norm(0.1)
        torch.testing.assert_close(seen, norm, atol=1e-6, rtol=1e-5)
        optimizer.step()
    assert_stages_equal(pipeline, model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_of_all_kinds(world, norm_type) -> None:
    pipeline = Pipeline.from_modules(built(block, 2), loss_fn=F.mse_loss)
    ((inputs, targets),) = batches(1)
    pipeline.train_step(inputs, targets)
    model = torch.nn.Sequential(*built(block, 2))
    F.mse_loss(model(inputs), targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    torch.testing.assert_close(pipeline.clip_grad_norm(0.01, norm_type), expected)
    for number, module in pipeline.stages.items():
        for own, other in zip(module.parameters(), model[int(number)].parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.ranks(2)
def test_the_loss_is_weighed_as_it_says(world) -> None:
    """Targets that count for nothing are no part of the mean, in whichever micro-batch they are."""
    inputs = batches(1)[0][0]
    targets = torch.arange(SAMPLES) % 8
    targets[[0, 1, 2, 7]] = -100
    model = torch.nn.Sequential(*built(block, 2))
    expected = F.cross_entropy(model(inputs), targets)
    expected.backward()
    pipeline = Pipeline.from_modules(
        built(block, 2),
        num_microbatches=4,
        loss_fn=lambda output, target: F.cross_entropy(output, target, reduction="sum") / max(counted(target), 1),
        loss_weight=counted,
    )
    loss = pipeline.train_step(inputs, targets)
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach())
    for number, module in pipeline.stages.items():
        for own, other in zip(module.parameters(), model[int(number)].parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def counted(target: torch.Tensor) -> int:
    return int((target != -100).sum())
