"""Parts of an optimizer's state: beside plain torch, and given to the optimizer of another layout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.assembled import assembled, fill
from helpers.layouts import LAYOUTS, laid_out, optimizer_for, train_alone, whole_model
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.checkpoint.catalogue import merged
from axonmpi.checkpoint.model_parts import model_parts
from axonmpi.checkpoint.optimizer_parts import optimizer_parts, prepare_optimizer
from axonmpi.checkpoint.tensor_file import TensorSpec
from axonmpi.checkpoint.values import decoded

KINDS = ("adamw_fused", "sgd", "adagrad")
MANNER = {"params", "foreach", "fused", "capturable", "differentiable"}


def saved(world: ax.World, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Any]:
    """Put the tensors together that all ranks have of both, and send the rest through JSON; collective."""
    found = model_parts(model, world.default_group)
    with found.stable():
        own = optimizer_parts(optimizer, found)
        tensors = assembled(world, [*found.parts, *own.parts])
    return tensors, json.loads(json.dumps(merged(world.default_group.all_gather_object(own.state))))


def load(
    world: ax.World, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Any
) -> None:
    """Give a model and an optimizer whole tensors; collective."""
    found = model_parts(model, world.default_group)
    with found.stable():
        fill(found.parts, tensors)
        specs = {
            name: TensorSpec(name, value.dtype, tuple(value.shape))
            for name, value in tensors.items()
            if name not in model.state_dict() and name.rpartition(".")[0] in state["parameters"]
        }
        parts, give = prepare_optimizer(optimizer, found, specs, state)
        fill(parts, tensors)
        give()
        found.loaded()


def of_one_process(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a plain model and of its optimizer by name."""
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    first = {id(parameter): name for name, parameter in reversed([*model.named_parameters()])}
    kept = {f"{first[id(p)]}.{key}": v for p, own in optimizer.state.items() for key, v in own.items()}
    aliases = {name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    return {name: value for name, value in {**state, **kept}.items() if name not in aliases}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ranks(1, 2, 4)
def test_a_state_goes_into_every_layout_and_training_goes_on(world: ax.World, layout: str) -> None:
    check_that_training_goes_on(world, layout, "adamw", tied=True)


@pytest.mark.parametrize(("layout", "kind"), zip(LAYOUTS, itertools.cycle(KINDS), strict=False))
@pytest.mark.ranks(4)
def test_states_of_other_optimizers(world: ax.World, layout: str, kind: str) -> None:
    check_that_training_goes_on(world, layout, kind, tied=False)


def check_that_training_goes_on(world: ax.World, layout: str, kind: str, *, tied: bool) -> None:
    plain = whole_model(tied=tied)
    optimizer = optimizer_for(plain.parameters(), kind)
    train_alone(plain, optimizer, range(3))
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.5 + number  # a schedule has changed it
    expected, options = of_one_process(plain, optimizer), {}
    expected = {name: value.clone() for name, value in expected.items()}
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in MANNER}
        options |= {names[id(parameter)]: own for parameter in group["params"]}
    _, state = saved(world, plain, optimizer)

    laid = laid_out(layout, world, optimizer=kind, tied=tied, seed=1)
    laid.step(7)  # it has a state of its own
    load(world, laid.model, laid.optimizer, expected, state)
    tensors, again = saved(world, laid.model, laid.optimizer)
    assert sorted(tensors) == sorted(expected)
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value), name
    assert again == state
    assert {name: of for name, (of, *_) in again["parameters"].items()}.keys() == options.keys()
    for name, (label, dtype, shape) in again["parameters"].items():
        assert {key: decoded(value) for key, value in again["groups"][label].items()} == options[name]
        assert (dtype, tuple(shape)) == (str(expected[name].dtype), expected[name].shape)
    losses = [laid.step(number) for number in range(3, 6)]
    assert losses == pytest.approx(train_alone(plain, optimizer, range(3, 6)), rel=1e-5)
