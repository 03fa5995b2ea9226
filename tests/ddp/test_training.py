"""DistributedDataParallel against one process on the joined batch: parameters after a few steps."""

import warnings

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_alone, gradients_of, refused
from helpers.models import (
    DEFAULT,
    NO_SYNC,
    OVERLAPPED,
    SMALL,
    STEPS,
    SYNCHRONOUS,
    TINY,
    ZOO,
    batch_norm,
    batch_of,
    built,
    check_averaged,
    equals_alone,
    joined_loss,
    large,
    mlp,
    own_loss,
    train,
    trained_alone,
    wrapped,
)
from helpers.settings import each_pair
from helpers.steps import accumulating_step, usual_step
from torch import nn

import axonmpi as ax
from axonmpi import GradSyncStrategy
from axonmpi.launch.topology import Topology


@pytest.mark.ranks(2)
@each_pair(
    kind=list(ZOO),
    strategy=list(GradSyncStrategy),
    cap=[TINY, SMALL, DEFAULT],
    as_view=[True, False],
    overlaps=[True, False],
    find_unused=[False, True],
    reduce_dtype=[None, torch.float64],
    step=[usual_step, accumulating_step],
)
def test_training_equals_one_process(
    world, kind, strategy, cap, as_view, overlaps, find_unused, reduce_dtype, step
):
    equals_alone(
        world,
        ZOO[kind],
        step,
        wrapper=ax.DDP,
        steps=STEPS,
        overlaps=overlaps,
        sync_strategy=strategy,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=find_unused,
        reduce_dtype=reduce_dtype,
    )


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("strategy", "make"),
    [(SYNCHRONOUS, mlp), (NO_SYNC, mlp), pytest.param(OVERLAPPED, large, marks=pytest.mark.real_ranks)],
)
def test_each_number_of_ranks_equals_one_process(world, strategy, make):
    options = {"sync_strategy": strategy, "bucket_cap_mb": SMALL}
    equals_alone(world, make, accumulating_step, wrapper=ax.DDP, steps=STEPS, **options)


@pytest.mark.ranks(2)
def test_evaluation_sends_nothing_and_keeps_buffers(world):
    model = wrapped(world, built(batch_norm), broadcast_buffers=False)
    inputs, _ = batch_of(model.module, world.rank)
    model.module.norm.running_mean.fill_(world.rank)
    if world.rank == 1:  # the other rank does not take part
        with torch.no_grad():
            model(inputs)
        model.eval()
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                model(inputs)
        assert model.module.norm.running_mean.any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_after_training_warns_where_buffers_are_not_rank_0s(world, grad, recwarn):
    """Each rank ends with statistics of its own batch; after `sync_parameters()` all have rank 0's."""
    warnings.simplefilter("always")  # not only the first one of a line
    model = wrapped(world, built(batch_norm))
    same, _ = batch_of(model, 100)

    def evaluate() -> tuple[bool, bool]:
        """Return whether all ranks have the same output, and whether one was warned: mock ranks share the list."""
        model.eval()
        with torch.set_grad_enabled(grad):
            outputs = ax.all_gather_object(model(same).detach())
        model.train()
        warned = ax.all_gather_object(any("sync_parameters()" in str(entry.message) for entry in recwarn.list))
        return all(torch.equal(output, outputs[0]) for output in outputs), any(warned)

    assert evaluate() == (True, False)
    train(model, world, steps=1)
    assert evaluate() == (False, True)
    ax.barrier()
    recwarn.clear()
    train(model, world, steps=1)
    ax.barrier()
    model.sync_parameters()
    assert evaluate() == (True, False)


def one_stage_a_rank(module: nn.Module) -> ax.Pipeline:
    return ax.Pipeline.from_modules([module] * ax.get_world_size())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [ax.DDP, ax.FSDP, one_stage_a_rank])
def test_a_batch_norm_of_all_ranks_is_refused(world, wrapper):
    """It would be an ordinary one."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(built(batch_norm))
    refused(ValueError, (lambda: wrapper(module), r"norm is a torch.nn.SyncBatchNorm, .*BatchNorm1d.*GroupNorm"))


@pytest.mark.ranks(2)
def test_buffers_of_every_kind_are_copied_from_rank_0(world):
    module, rank = nn.Linear(2, 2), torch.tensor(world.rank)
    buffers = torch.stack([rank == 0, rank < 0]), rank, rank.float().repeat(2, 3)
    for name, buffer in zip(("mask", "count", "passing"), buffers, strict=True):
        module.register_buffer(name, buffer, persistent=name != "passing")
    module.register_buffer("empty", torch.zeros(0))
    model = wrapped(world, module)
    assert [buffer.tolist() for buffer in buffers] == [[True, False], 0, [[0.0] * 3] * 2]
    for buffer in buffers:
        buffer.fill_(world.rank)
    with model.no_sync():
        model(torch.zeros(1, 2))
    assert float(module.passing.sum()) == 6 * world.rank
    model(torch.zeros(1, 2))
    assert [bool(buffer.any()) for buffer in buffers] == [False] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [OVERLAPPED, NO_SYNC])
def test_gradients_of_no_sync_are_averaged_by_hand_once(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    with model.no_sync():
        own_loss(model, world).backward()
        with model.no_sync():
            pass
        own_loss(model, world).backward()
    assert_close(
        gradients_of(model.module), gradients_alone(model.module, lambda alone: 2 * own_loss(alone, world))
    )
    model.sync_gradients()
    check_averaged(world, model, lambda alone: 2 * joined_loss(alone))
    gradient = model.module[0].weight.grad
    changed = gradient.mul_(world.rank + 1).clone()
    model.sync_gradients()  # changes made by hand are left alone
    assert torch.equal(gradient, changed)


@pytest.mark.ranks(4)
@pytest.mark.real_ranks
def test_a_part_of_the_ranks(world):
    group = [world.new_group([0, 1]), world.new_group([2, 3])][world.rank // 2]
    model = wrapped(world, built(mlp), process_group=group)
    assert model.process_group is group
    train(model, ax.World(group.backend, Topology.of([0, 0], group.rank)))
    assert_close(model.state_dict(), trained_alone(mlp).state_dict())
    assert_same_on_all_ranks(world, model.state_dict())
