"""Training while parameters are gathered by hand, against one process."""

import functools

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.models import (
    Blocks,
    TiedBlocks,
    batch_of,
    built,
    equals_alone,
    fail,
    in_turn,
    own_data,
    train,
    trained_alone,
)
from helpers.steps import adamw, clip, loss_of, usual_step, within

import axonmpi as ax
from axonmpi import CPUOffload, ScatteredParameterError, ShardingStrategy

whole = functools.partial(within, name="full_parameters")
no_sync = functools.partial(within, name="no_sync")


# ---- loops ------------------------------------------------------------------------------------------------------


def does_all_of_it_meanwhile(model, optimizer, batch):
    with whole(model):
        model.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        if isinstance(model, ax.FSDP):
            model.sync_gradients()
        clip(model, 0.05)
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
        loss_of(model(batch[0]), batch[1]).backward()
        model.zero_grad()
    loss_of(model(-batch[0]), batch[1]).backward()
    optimizer.step()


def accumulates_meanwhile(model, optimizer, batch):
    optimizer.zero_grad()
    with whole(model), no_sync(model):
        loss_of(model(batch[0]), batch[1]).backward()
    with no_sync(model):
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


@pytest.mark.ranks(2)
@in_turn(
    "loop",
    [
        does_all_of_it_meanwhile,
        goes_backward_later,
        steps_and_clears_meanwhile,
        accumulates_meanwhile,
        changes_values_and_steps,
    ],
)
def test_each_loop_equals_one_process(world, setting, loop):
    equals_alone(world, Blocks, loop, sharding_strategy=setting)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@pytest.mark.parametrize("loop", [accumulates_meanwhile, changes_values_and_steps])
def test_loops_on_two_nodes_equal_one_process(world, monkeypatch, loop, strategy):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    equals_alone(world, Blocks, loop, adamw, shard_by="parameters", sharding_strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [CPUOffload.PARAMS, CPUOffload.FULL])
def test_from_files_equals_one_process(world, shared_tmp_path, offload):
    options = {"cpu_offload": offload, "offload_folder": shared_tmp_path}
    equals_alone(world, Blocks, does_all_of_it_meanwhile, **options)


@pytest.mark.ranks(2)
def test_mixed_precision_equals_that_without_gathering(world):
    states = []
    for loop in (goes_backward_later, usual_step):
        model = ax.FSDP(built(Blocks), mixed_precision=True)
        optimizer = adamw(model)
        for number in range(2):
            inputs, targets = own_data(model, world, number)
            loop(model, optimizer, (inputs, targets.bfloat16()))
        states.append(model.full_state_dict())
    assert_close(*states, 0.0)


# ---- state ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_state_is_taken_and_loaded_meanwhile(world, model):
    first, second = built(Blocks), built(Blocks, seed=1)
    optimizer = train(model, world, 2)
    moments = model.full_optimizer_state_dict(optimizer)
    with model.full_parameters():
        assert_close(model.full_state_dict(), trained_alone(Blocks, 2).state_dict())
        assert_close(model.full_optimizer_state_dict(optimizer)["state"], moments["state"], 0.0)
        model.load_full_state_dict(second.state_dict())
        assert_close(dict(model.named_parameters()), second.state_dict(), 0.0)
        model.module.load_state_dict(first.state_dict())
        assert_close(model.full_state_dict(), first.state_dict(), 0.0)
    assert_close(model.full_state_dict(), first.state_dict(), 0.0)


# ---- looking at parameters, and changing them -------------------------------------------------------------------


@pytest.mark.ranks(2)
@in_turn("choice", [("elements", True), ("parameters", True), ("elements", False)])
def test_full_parameters(world, wrap, choice):
    shard_by, writeback = choice
    plain = built(TiedBlocks)
    inputs, _ = batch_of(plain, 0)
    model = wrap(built(TiedBlocks), shard_by=shard_by)
    model(inputs)
    with model.full_parameters(writeback=writeback), torch.no_grad():
        assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 0.0)
        if world.rank == 0:  # needs no other rank
            torch.testing.assert_close(model(inputs), plain(inputs))
        torch.testing.assert_close(model.module.blocks[0](torch.ones(1, 8)), plain.blocks[0](torch.ones(1, 8)))
        for module in (model, plain):
            for parameter in module.parameters():
                parameter.mul_(2 if writeback or module is model else 1)
    assert_close(model.full_state_dict(), plain.state_dict(), 0.0)
    torch.testing.assert_close(model(inputs), plain(inputs))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["one_node", "apart"], indirect=True)
def test_gathering_twice(model):
    inputs, targets = batch_of(model.module, 0)
    for method in (model.gather_parameters, model.reshard_parameters):
        method()
        method()  # nothing more to do
    with model.full_parameters():
        for gather in (model.gather_parameters, model.full_parameters().__enter__):
            refused(ValueError, (gather, "parameters are gathered already"))
    handle = model.module.head.register_forward_hook(lambda *_: model.gather_parameters())
    refused(ValueError, (lambda: model(inputs), r"gathered already: .* or in a forward"))
    handle.remove()
    loss_of(model(inputs), targets).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_gradients_that_nobody_would_average(world, strategy):
    model = ax.FSDP(built(Blocks), sharding_strategy=strategy)
    with model.full_parameters():
        with pytest.raises(ScatteredParameterError, match=r"or use it .* torch.no_grad\(\)"):
            model.module.head(torch.ones(2, 12))
        for weight in (model.module.head.weight, model.module.blocks[0].up.bias):
            refused(ValueError, (weight.square().sum().backward, "would not be averaged: compute the loss from"))
    assert all(part.grad is None for part in model.parameters())


@pytest.mark.ranks(2)
@in_turn("use", ["forward", "step", "one rank's"])
def test_changes_that_are_to_be_dropped_are_not_computed_with(world, model, use):
    """An error on all ranks, where one has the part that was changed."""
    optimizer = train(model, world, 1)
    before = model.full_state_dict()
    with model.full_parameters(writeback=False):
        with torch.no_grad():
            for parameter in [*model.parameters()][: 1 if use == "one rank's" else None]:
                parameter.view(-1)[: 1 if use == "one rank's" else None].add_(1)
        with pytest.raises(ValueError, match=r"was changed within full_parameters\(writeback=False\), which"):
            optimizer.step() if use == "step" else model(batch_of(model.module, 0)[0])
    assert_close(model.full_state_dict(), before, 0.0)


@pytest.mark.ranks(2)
def test_an_exception_with_full_parameters(usual):
    with pytest.raises(ArithmeticError), usual.full_parameters():
        fail()
    assert sum(part.numel() for part in usual.parameters()) < sum(whole.numel() for whole in Blocks().parameters())
    usual(batch_of(usual.module, 0)[0])
