"""Training while parameters are gathered by hand, against one process."""

from __future__ import annotations

import contextlib

import pytest
import torch
from alongside import adamw_of, equals_alone, usual_step
from models import assert_close, built, loss_of, part_of
from sharded import Blocks, TiedBlocks, alone, data_for, new_group, train
from torch import nn

import axonmpi as ax
from axonmpi import CPUOffload, ScatteredParameterError, ShardingStrategy


def whole(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a sharded model have whole parameters for a block."""
    return model.full_parameters() if isinstance(model, ax.FSDP) else contextlib.nullcontext()


def apart_from(model: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    return getattr(model, name)() if isinstance(model, ax.FSDP) else contextlib.nullcontext()


def momentum_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


# ---- loops ------------------------------------------------------------------------------------------------------


def gathers_for_forward_and_backward(model, optimizer, batch):
    optimizer.zero_grad()
    with whole(model):
        loss_of(model(batch[0]), batch[1]).backward()
    if isinstance(model, ax.FSDP):
        model.sync_gradients()
    optimizer.step()


def does_all_of_it_meanwhile(model, optimizer, batch):
    with whole(model):
        model.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        if isinstance(model, ax.FSDP):
            model.sync_gradients()
            model.clip_grad_norm(0.05)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        loss_of(model(-batch[0]), batch[1]).backward()  # computes with what the step has made
        optimizer.step()


def goes_backward_later(model, optimizer, batch):
    with whole(model):
        loss = loss_of(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def steps_and_clears_meanwhile(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    with whole(model):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    loss_of(model(batch[0]), batch[1]).backward()
    with whole(model):
        model.zero_grad()
    loss_of(model(-batch[0]), batch[1]).backward()
    optimizer.step()


def clears_what_was_computed_meanwhile(model, optimizer, batch):
    with whole(model):
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.zero_grad()
    loss_of(model(-batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulates_meanwhile(model, optimizer, batch):
    optimizer.zero_grad()
    with whole(model), apart_from(model, "no_sync"):
        loss_of(model(batch[0]), batch[1]).backward()
    with apart_from(model, "no_sync"):
        loss_of(model(0.5 * batch[0]), batch[1]).backward()
    with whole(model):
        loss_of(model(-batch[0]), batch[1]).backward()
    optimizer.step()


def changes_values_and_steps(model, optimizer, batch):
    optimizer.zero_grad()
    with whole(model):
        for number, parameter in enumerate(model.parameters()):
            if number % 2:
                parameter.data.mul_(0.9)
            else:
                parameter.data = parameter.data * 0.9
        loss_of(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        optimizer.step()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


LOOPS = [
    gathers_for_forward_and_backward,
    does_all_of_it_meanwhile,
    goes_backward_later,
    steps_and_clears_meanwhile,
    clears_what_was_computed_meanwhile,
    accumulates_meanwhile,
    changes_values_and_steps,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_equals_one_process(world, setting, loop):
    equals_alone(world, Blocks, loop, momentum_of, sharding_strategy=setting)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
def test_each_loop_on_two_nodes_equals_one_process(world, monkeypatch, strategy):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    for loop in (gathers_for_forward_and_backward, accumulates_meanwhile, changes_values_and_steps):
        equals_alone(world, Blocks, loop, shard_by="parameters", sharding_strategy=strategy)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loop", LOOPS)
def test_no_shard_equals_one_process(world, loop):
    equals_alone(world, Blocks, loop, momentum_of, sharding_strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [CPUOffload.PARAMS, CPUOffload.FULL])
def test_from_files_equals_one_process(world, shared_tmp_path, offload):
    options = {"cpu_offload": offload, "offload_folder": shared_tmp_path}
    equals_alone(world, Blocks, does_all_of_it_meanwhile, **options)


@pytest.mark.ranks(2)
def test_mixed_precision_equals_that_without_gathering(world):
    states = []
    for loop in (gathers_for_forward_and_backward, usual_step):
        model = ax.FSDP(built(Blocks), mixed_precision=True)
        optimizer = adamw_of(model)
        for number in range(3):
            inputs, targets = part_of(data_for(model.module, number), world.rank, world.size)
            loop(model, optimizer, (inputs, targets.bfloat16()))
        states.append(model.full_state_dict())
    assert_close(*states, 0.0)


# ---- optimizers made meanwhile, and state -----------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_an_optimizer_made_meanwhile(world, strategy):
    def made_meanwhile(model):
        with whole(model):
            return adamw_of(model)

    equals_alone(world, Blocks, usual_step, made_meanwhile, sharding_strategy=strategy)


@pytest.mark.ranks(2)
def test_state_is_taken_and_loaded_meanwhile(world, setting):
    first, second = built(Blocks), built(Blocks, seed=1)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        optimizer = train(model, group, steps=2)
        moments = model.full_optimizer_state_dict(optimizer)
        with model.full_parameters():
            assert_close(model.full_state_dict(), alone(Blocks, steps=2))
            during = model.full_optimizer_state_dict(optimizer)
            assert_close(during["state"]["head.weight"], moments["state"]["head.weight"], 0.0)
            model.load_full_state_dict(second.state_dict())
            assert_close(dict(model.named_parameters()), second.state_dict(), 0.0)
            model.module.load_state_dict(first.state_dict())
            assert_close(model.full_state_dict(), first.state_dict(), 0.0)
        assert_close(model.full_state_dict(), first.state_dict(), 0.0)


@pytest.mark.ranks(2)
def test_values_that_were_put_elsewhere_are_in_the_state(world, setting):
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        for module in (model, plain):
            for part in module.parameters():
                part.data = part.data * 0.5
        assert_close(model.full_state_dict(), plain.state_dict(), 0.0)


# ---- looking at parameters, and changing them -------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("shard_by", "writeback"), [("elements", True), ("parameters", True), ("elements", False)])
def test_full_parameters(world, setting, shard_by, writeback):
    plain = built(TiedBlocks)
    inputs, _ = data_for(plain, 0)
    with new_group(world) as group:
        model = ax.FSDP(built(TiedBlocks), group, sharding_strategy=setting, shard_by=shard_by)
        model(inputs)
        with model.full_parameters(writeback=writeback):
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
            assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 0.0)
            with torch.no_grad():
                if group.rank == 0:  # needs no other rank
                    torch.testing.assert_close(model(inputs), plain(inputs))
                torch.testing.assert_close(
                    model.module.blocks[0](torch.ones(1, 8)), plain.blocks[0](torch.ones(1, 8))
                )
                for parameter in model.parameters():
                    parameter.mul_(2)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2 if writeback else 1)
        assert_close(model.full_state_dict(), plain.state_dict(), 0.0)
        torch.testing.assert_close(model(inputs), plain(inputs))


@pytest.mark.ranks(2)
def test_gathering_twice(world, setting):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        inputs, targets = data_for(model.module, 0)
        model.gather_parameters()
        model.gather_parameters()  # nothing more to do
        model.reshard_parameters()
        model.reshard_parameters()
        with model.full_parameters():
            for gather in (model.gather_parameters, model.full_parameters().__enter__):
                with pytest.raises(ValueError, match="parameters are gathered already"):
                    gather()
        handle = model.module.head.register_forward_hook(lambda *_: model.gather_parameters())
        with pytest.raises(ValueError, match=r"gathered already: .* or in a forward"):
            model(inputs)
        handle.remove()
        loss_of(model(inputs), targets).backward()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_gradients_that_nobody_would_average(world, strategy):
    model = ax.FSDP(built(Blocks), sharding_strategy=strategy)
    with model.full_parameters():
        with pytest.raises(ScatteredParameterError, match=r"or use it .* torch.no_grad\(\)"):
            model.module.head(torch.ones(2, 12))
        for weight in (model.module.head.weight, model.module.blocks[0].up.bias):
            with pytest.raises(ValueError, match="would not be averaged: compute the loss from what the wrapped"):
                weight.square().sum().backward()
    assert all(part.grad is None for part in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use", ["forward", "step"])
def test_changes_that_are_to_be_dropped_are_not_computed_with(world, setting, use):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        optimizer = train(model, group, steps=1)
        before = model.full_state_dict()
        with model.full_parameters(writeback=False):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            with pytest.raises(ValueError, match=r"was changed within full_parameters\(writeback=False\), which"):
                model(data_for(model.module, 0)[0]) if use == "forward" else optimizer.step()
        assert_close(model.full_state_dict(), before, 0.0)


@pytest.mark.ranks(2)
def test_a_change_of_one_ranks_part_that_is_to_be_dropped_is_an_error_on_all_ranks(world, setting):
    model = ax.FSDP(built(Blocks), sharding_strategy=setting)
    with model.full_parameters(writeback=False):
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1
        with pytest.raises(ValueError, match=r"was changed within full_parameters\(writeback=False\), which"):
            model(data_for(model.module, 0)[0])


@pytest.mark.ranks(2)
def test_an_exception_with_full_parameters(world):
    model = ax.FSDP(built(Blocks))
    with pytest.raises(ArithmeticError), model.full_parameters():
        raise ArithmeticError
    assert sum(part.numel() for part in model.parameters()) < sum(whole.numel() for whole in Blocks().parameters())
    model(data_for(model.module, 0)[0])
