"""DistributedDataParallel against one process on the joined batch: parameters after 20 steps of AdamW."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    STEPS,
    ZOO,
    BatchNormalised,
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    built,
    loss_of,
    mlp,
    part_of,
    train,
    trained_alone,
    wrapped,
)
from torch import nn

import axonmpi as ax
from axonmpi import GradSyncStrategy

SYNCHRONOUS, OVERLAPPED, NO_SYNC = GradSyncStrategy
TINY, SMALL, DEFAULT = 1e-6, 0.001, 25
"""Bucket sizes in MiB: one gradient each, a few, and all of them."""


def check(world: ax.World, model: ax.DistributedDataParallel, expected: dict[str, torch.Tensor]) -> None:
    assert_close(model.state_dict(), expected)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_each_strategy_equals_one_process(world, strategy, accumulation):
    model = wrapped(world, built(mlp), sync_strategy=strategy, bucket_cap_mb=SMALL)
    train(model, world, accumulation=accumulation)
    check(world, model, trained_alone(mlp, accumulation))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("cap", [TINY, SMALL, DEFAULT])
def test_each_layout_of_gradients_equals_one_process(world, cap, as_view, set_to_none, overlaps):
    model = wrapped(world, built(mlp), overlaps=overlaps, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
    train(model, world, accumulation=2, set_to_none=set_to_none)
    check(world, model, trained_alone(mlp, 2))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("kind", ZOO)
def test_each_kind_of_model_equals_one_process(world, kind, as_view):
    model = wrapped(world, built(ZOO[kind]), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view)
    train(model, world)
    check(world, model, trained_alone(ZOO[kind]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, NO_SYNC])
@pytest.mark.parametrize("kind", ["mixed_dtypes", "tied_embedding", "empty_parameters"])
def test_models_with_other_strategies(world, kind, strategy):
    model = wrapped(world, built(ZOO[kind]), sync_strategy=strategy)
    train(model, world)
    check(world, model, trained_alone(ZOO[kind]))


def batch_norm_alone(size: int, broadcasts: bool) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Normalise each rank's part of the batch by itself, beginning with rank 0's statistics or the rank's own.

    Returns:
        The parameters, and the buffers that each rank ends with.
    """
    model = built(BatchNormalised)
    optimizer = adamw(model)
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        before = copy.deepcopy(buffers)
        for rank in range(size):
            model.load_state_dict(before[0 if broadcasts else rank], strict=False)
            inputs, targets = part_of(batch_of(model, step), rank, size)
            (loss_of(model(inputs), targets) / size).backward()
            buffers[rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, buffers


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("broadcasts", [True, False])
def test_batch_norm(world, broadcasts):
    model = wrapped(world, built(BatchNormalised), broadcast_buffers=broadcasts)
    train(model, world)
    parameters, buffers = batch_norm_alone(world.size, broadcasts)
    assert_close({name: value.detach() for name, value in model.module.named_parameters()}, parameters)
    assert_close(dict(model.module.named_buffers()), buffers[world.rank])
    assert int(model.module.norm.num_batches_tracked) == STEPS


@pytest.mark.ranks(2)
def test_evaluation_sends_nothing_and_keeps_buffers(world):
    model = wrapped(world, built(BatchNormalised), broadcast_buffers=False)
    inputs, _ = batch_of(model.module, world.rank)
    model.module.norm.running_mean.fill_(world.rank)
    if world.rank == 1:  # the other rank does not take part
        with torch.no_grad():
            model(inputs)
        model.eval()
        model(inputs)
        with torch.inference_mode():
            model(inputs)
    assert world.rank == 0 or not torch.equal(model.module.norm.running_mean, torch.zeros(4))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_after_training_warns_where_buffers_are_not_rank_0s(world, grad, recwarn):
    """Each rank ends with statistics of its own batch; after `sync_parameters()` all have rank 0's."""
    model = wrapped(world, built(BatchNormalised))
    same, _ = batch_of(model, 100)

    def evaluate() -> list[torch.Tensor]:
        model.eval()
        with torch.set_grad_enabled(grad):
            output = model(same).detach()
        model.train()
        return ax.all_gather_object(output)

    def warned() -> list[bool]:
        """Mock ranks are threads, whose warnings are all in one list."""
        mine = [str(entry.message) for entry in recwarn.list if "sync_parameters()" in str(entry.message)]
        return ax.all_gather_object(bool(mine))

    first = evaluate()
    assert not any(warned())
    train(model, world, steps=2)
    second = evaluate()
    assert any(warned()) == (world.size > 1)
    ax.barrier()
    recwarn.clear()
    train(model, world, steps=2)
    ax.barrier()
    model.sync_parameters()
    third = evaluate()
    assert not any(warned())
    for outputs, equal in ((first, True), (second, world.size == 1), (third, True)):
        assert all(torch.equal(output, outputs[0]) for output in outputs) == equal


def one_stage_a_rank(module: nn.Module) -> ax.Pipeline:
    return ax.Pipeline.from_modules([module] * ax.get_world_size())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrapper", [ax.DDP, ax.FSDP, one_stage_a_rank])
def test_a_batch_norm_of_all_ranks_is_refused(world, wrapper):
    """It would be an ordinary one."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(built(BatchNormalised))
    with pytest.raises(ValueError, match=r"norm is a torch.nn.SyncBatchNorm, .*BatchNorm1d.*GroupNorm"):
        wrapper(module)


@pytest.mark.ranks(2)
def test_buffers_of_every_kind_are_copied_from_rank_0(world):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([world.rank == 0, False]))
    module.register_buffer("count", torch.tensor(world.rank))
    module.register_buffer("passing", torch.full((2, 3), float(world.rank)), persistent=False)
    module.register_buffer("empty", torch.zeros(0))
    model = wrapped(world, module)
    expected = [True, False], 0, 0.0
    assert (module.mask.tolist(), int(module.count), float(module.passing.sum())) == expected
    for buffer in (module.mask, module.count, module.passing):
        buffer.fill_(1 if world.rank == 1 else 0)
    model(torch.zeros(1, 2))
    assert (module.mask.tolist(), int(module.count), float(module.passing.sum())) == ([False, False], 0, 0.0)


@pytest.mark.ranks(2)
def test_no_sync_leaves_gradients_to_each_rank(world):
    model = wrapped(world, built(mlp))
    local = copy.deepcopy(model.module)
    inputs, targets = part_of(batch_of(local, 0), world.rank, world.size)
    loss_of(local(inputs), targets).backward()
    with model.no_sync():
        loss_of(model(inputs), targets).backward()
        with model.no_sync():
            pass
        loss_of(model(inputs), targets).backward()
    for own, alone in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(own.grad, 2 * alone.grad)
    model.sync_gradients()
    ax.all_reduce_mean(next(local.parameters()).grad)
    torch.testing.assert_close(next(model.parameters()).grad, 2 * next(local.parameters()).grad)


@pytest.mark.ranks(2)
def test_sync_gradients_does_nothing_a_second_time(world):
    model = wrapped(world, built(mlp), sync_strategy=NO_SYNC)
    inputs, targets = part_of(batch_of(model.module, 0), world.rank, world.size)
    loss_of(model(inputs), targets).backward()
    model.sync_gradients()
    gradient = model.module[0].weight.grad
    gradient.mul_(world.rank + 1)
    before = gradient.clone()
    model.sync_gradients()
    assert torch.equal(gradient, before)


@pytest.mark.ranks(4)
def test_a_part_of_the_ranks(world):
    pairs = [world.new_group([0, 1]), world.new_group([2, 3])]
    group = pairs[world.rank // 2]
    model = wrapped(world, built(mlp), process_group=group)
    assert model.process_group is group
    pair = ax.World(group.backend, ax.topology.Topology.of([0, 0], group.rank))
    train(model, pair, steps=5)
    check(world, model, trained_alone(mlp, 1, 5))
