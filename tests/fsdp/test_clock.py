"""The table of a sharded model's states, and forwards on the clock."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.compare import refused
from helpers.models import Blocks, built
from helpers.steps import sgd
from torch import nn

import axonmpi as ax
from axonmpi.fsdp.clock import BACKWARD, BETWEEN, FORWARD, IDLE, STEP, Clock, Forward, TrainingState

TABLE = {
    #            IDLE FORWARD BETWEEN BACKWARD STEP
    "IDLE": "     .      x       .       x     x  ",
    "FORWARD": "  .      .       x       x     .  ",
    "BETWEEN": "  x      x       .       x     x  ",
    "BACKWARD": " x      x       x       .     .  ",
    "STEP": "     x      x       .       x     x  ",
}
"""From each state, to each state: x where that is allowed."""


@pytest.mark.parametrize(("before", "after"), list(product(TrainingState, TrainingState)))
def test_each_transition_is_made_or_names_both_states(before, after):
    clock = Clock()
    clock.state = before
    if TABLE[before.name].split()[after.value - 1] == "x":
        clock.advance(after)
        assert clock.state is after
    else:
        message = f"expected .* after {before.name}, got {after.name}: let a forward or backward end"
        refused(RuntimeError, (lambda: clock.advance(after), message))
        assert clock.state is before


def forward_of(unit: Any) -> Forward:
    return Forward(unit, 0, True, 0, None)


def test_the_outermost_forward_is_a_state_but_in_backward():
    clock, outer, inner = Clock(), forward_of(SimpleNamespace()), forward_of(SimpleNamespace())
    clock.begin_forward(outer)
    clock.begin_forward(inner)
    assert (clock.end_forward(), clock.state) == (inner, FORWARD)
    assert (clock.end_forward(), clock.state) == (outer, BETWEEN)
    clock.advance(BACKWARD)
    clock.begin_forward(inner)
    clock.end_forward()
    assert clock.state is BACKWARD


def test_ranks_that_meet_are_idle_after_a_forward_alone():
    for before, after in ((BETWEEN, IDLE), (IDLE, IDLE), (BACKWARD, BACKWARD), (STEP, STEP)):
        clock = Clock()
        clock.state = before
        clock.meet()
        assert clock.state is after


# ---- a model's clock --------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_the_states_of_training(world, setting):
    model = ax.FSDP(built(Blocks), sharding_strategy=setting)
    optimizer, clock, inputs = sgd(model), model.runtime.clock, torch.ones(2, 5)
    states: list[TrainingState] = []
    model.module.head.register_forward_hook(lambda *_: states.append(clock.state))
    model.module.head.weight.register_post_accumulate_grad_hook(lambda _: states.append(clock.state))

    def closure() -> torch.Tensor:
        states.append(clock.state)
        optimizer.zero_grad()
        loss = model(inputs).sum()
        states.append(clock.state)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert states == [STEP, FORWARD, BETWEEN, IDLE]
    assert clock.state is IDLE
    with model.no_sync():
        model(inputs).sum().backward()
    assert clock.state is BETWEEN
    model.sync_gradients()
    assert clock.state is IDLE
    model(inputs)
    optimizer.step()
    assert clock.state is IDLE


class _Fails(torch.autograd.Function):
    """Fails in backward on one rank."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, fails: bool) -> torch.Tensor:
        context.fails = fails
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.fails:
            raise ArithmeticError("in backward")
        return gradients[0], None


@pytest.mark.ranks(2)
@pytest.mark.not_over_double("units are gathered in backward, in an order that the failure changes")
@pytest.mark.parametrize("then", ["full_state_dict", "sync_gradients"])
def test_a_backward_in_no_sync_that_fails_on_one_rank_leaves_the_ranks_together(world, then):
    model = ax.FSDP(built(Blocks))
    optimizer, inputs = sgd(model), torch.ones(2, 5)
    fails = world.rank == 0
    with model.no_sync():
        # At the very end of backward, when no unit is gathered any more.
        loss = model(_Fails.apply(inputs.clone().requires_grad_(), fails)).sum()
        if fails:
            refused(ArithmeticError, (loss.backward, "in backward"))
        else:
            loss.backward()
    getattr(model, then)()
    if then == "sync_gradients":
        optimizer.step()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    assert model.runtime.clock.state is IDLE


@pytest.mark.ranks(2)
def test_a_step_within_a_forward_or_backward_is_refused(world, setting):
    model = ax.FSDP(built(Blocks), sharding_strategy=setting)
    optimizer, inputs = sgd(model), torch.ones(2, 5)
    before = model.full_state_dict()
    handle = model.module.head.register_forward_hook(lambda *_: optimizer.step())
    refused(RuntimeError, (lambda: model(inputs), "expected BETWEEN or BACKWARD after FORWARD, got STEP"))
    handle.remove()

    def step_in_backward(head: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: optimizer.step())

    handle = model.module.blocks[0].up.register_forward_hook(step_in_backward)
    loss = model(inputs).sum()
    refused(RuntimeError, (loss.backward, "after BACKWARD, got STEP"))
    handle.remove()
    optimizer.step()  # nothing was averaged
    model(inputs).sum().backward()
    after = model.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
