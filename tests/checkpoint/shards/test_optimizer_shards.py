"""Shards of an optimizer's state: beside plain torch, and given to the optimizer of another layout."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoint_shards import assembled, fill
from helpers.checkpoints import by_name
from helpers.compare import assert_close, assert_equal, refused
from helpers.layouts import LAYOUTS, OPTIMIZERS, laid_out, optimizer_for, train_alone, whole_model
from helpers.models import Blocks, built, own_data, train, trained_alone
from helpers.steps import optimizer_of, usual_step
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.checkpoint.files.tensor_file import TensorSpec
from axonmpi.checkpoint.files.values import decoded
from axonmpi.checkpoint.global_specs import merged
from axonmpi.checkpoint.shards.model_shards import model_shards
from axonmpi.checkpoint.shards.optimizer_shards import optimizer_shards, prepare_optimizer

MANNER = {"params", "foreach", "fused", "capturable", "differentiable"}


def saved(world: ax.World, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Any]:
    """Put the tensors together that all ranks have of both, and send the rest through JSON; collective."""
    found = model_shards(model, world.default_group)
    with found.stable():
        own = optimizer_shards(optimizer, found)
        tensors = {**assembled(world, found.shards), **assembled(world, own.shards)}
    return tensors, json.loads(json.dumps(merged(world.default_group.all_gather_object(own.state))))


def load(
    world: ax.World, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Any
) -> None:
    """Give a model and an optimizer whole tensors; collective."""
    found = model_shards(model, world.default_group)
    with found.stable():
        fill([shard for shard in found.shards if shard.name in tensors], tensors)
        specs = {
            name: TensorSpec(name, value.dtype, tuple(value.shape))
            for name, value in tensors.items()
            if name not in model.state_dict() and name.rpartition(".")[0] in state["parameters"]
        }
        shards, give = prepare_optimizer(optimizer, found, specs, state)
        fill(shards, tensors)
        give()
        found.loaded({})


def of_one_process(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a plain model and of its optimizer by name."""
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    first = {id(parameter): name for name, parameter in reversed([*model.named_parameters()])}
    kept = {f"{first[id(p)]}.{key}": v for p, own in optimizer.state.items() for key, v in own.items()}
    aliases = {name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    return {name: value for name, value in {**state, **kept}.items() if name not in aliases}


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=LAYOUTS)
@pytest.mark.ranks(4)
def test_a_state_goes_into_every_layout_and_training_goes_on(world: ax.World, number: int) -> None:
    kind, tied = [*OPTIMIZERS][number // 3], number % 2 == 0
    plain = whole_model(tied=tied)
    optimizer = optimizer_for(plain.parameters(), kind)
    train_alone(plain, optimizer, range(2))
    options = {}
    names = {parameter: name for name, parameter in plain.named_parameters()}
    for factor, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.5 + factor  # a schedule has changed it
        own = {key: value for key, value in group.items() if key not in MANNER}
        options |= {names[parameter]: own for parameter in group["params"]}
    expected = {name: value.clone() for name, value in of_one_process(plain, optimizer).items()}
    _, state = saved(world, plain, optimizer)

    laid = laid_out([*LAYOUTS][number], world, optimizer=kind, tied=tied, seed=1)
    laid.step(7)  # it has a state of its own
    load(world, laid.model, laid.optimizer, expected, state)
    tensors, again = saved(world, laid.model, laid.optimizer)
    assert_equal(by_name(tensors), by_name(expected))
    assert (again, again["parameters"].keys()) == (state, options.keys())
    for name, (label, dtype, shape) in again["parameters"].items():
        assert {key: decoded(value) for key, value in again["groups"][label].items()} == options[name]
        assert (dtype, tuple(shape)) == (str(expected[name].dtype), expected[name].shape)
    losses = [laid.step(number) for number in (2, 3)]
    assert losses == pytest.approx(train_alone(plain, optimizer, (2, 3)), rel=1e-5)


# ---- what optimizers keep ---------------------------------------------------------------------------------------


WHOLE = functools.partial(ax.FSDP, shard_by="parameters")
CASES = {
    "Adafactor": (optimizer_of("Adafactor", lr=0.01), ax.DDP, WHOLE),
    "Adafactor, back": (optimizer_of("Adafactor", lr=0.01), WHOLE, ax.DDP),
    "NAdam": (optimizer_of("NAdam", lr=0.01), ax.DDP, ax.FSDP),
    "ASGD": (optimizer_of("ASGD", lr=0.01), ax.FSDP, WHOLE),
    "Rprop": (optimizer_of("Rprop", lr=0.01), ax.FSDP, ax.DDP),
    "Adadelta": (optimizer_of("Adadelta", lr=0.1), WHOLE, ax.FSDP),
    "RMSprop": (optimizer_of("RMSprop", lr=0.01, eps=1e-2, centered=True, momentum=0.5), ax.DDP, ax.FSDP),
    "a rate that is a tensor": (optimizer_of("Adam", lr=torch.tensor(0.01), capturable=False), ax.FSDP, ax.DDP),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks(3)
def test_each_optimizer_goes_on(world: ax.World, case: str) -> None:
    """Train, save, load into another model and optimizer, train on: beside one process."""
    make, before, after = CASES[case]
    plain = trained_alone(Blocks, 4, make)
    first = before(built(Blocks))
    tensors, state = saved(world, first, train(first, world, 2, make))
    second = after(built(Blocks, seed=1))
    optimizer = make(second)
    load(world, second, optimizer, tensors, state)
    for number in (2, 3):
        usual_step(second, optimizer, own_data(second, world, number))
    found = model_shards(second, world.default_group)
    with found.stable():
        assert_close(assembled(world, found.shards), plain.state_dict())


@pytest.mark.ranks(2)
def test_state_in_files_stays_there(world: ax.World) -> None:
    """Memory for a loaded state is made as the optimizer makes it."""
    model, other = (ax.FSDP(built(Blocks), cpu_offload="full") for _ in range(2))
    tensors, state = saved(world, model, train(model, world, 1))
    fresh = optimizer_of("SGD", lr=0.1, momentum=0.9)(other)
    load(world, other, fresh, tensors, state)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split()[0].split("-") for line in lines if "/axonmpi-" in line]
    spans = [range(int(low, 16), int(high, 16)) for low, high in files]
    kept = [own["momentum_buffer"] for own in fresh.state.values()]
    assert {any(tensor.data_ptr() in span for span in spans) for tensor in kept} == {True}


@pytest.mark.ranks(3)
def test_parameters_without_state_get_none(world: ax.World) -> None:
    """One was never used, one is frozen since; FSDP's ranks without elements of a parameter have none either."""
    model = ax.FSDP(built(Blocks))
    optimizer = optimizer_of("AdamW", lr=0.1)(model)
    model.head.bias.requires_grad_(False)
    for number in range(2):
        usual_step(model, optimizer, own_data(model, world, number))
    tensors, state = saved(world, model, optimizer)
    of_head = [name for name in tensors if name.startswith("head.bias.")]
    assert ("head.bias" in state["parameters"], of_head) == (True, [])
    before = {id(parameter) for parameter in optimizer.state}
    other = ax.FSDP(built(Blocks))
    fresh = train(other, world, 1, optimizer_of("AdamW", lr=0.1))
    load(world, other, fresh, tensors, state)
    names = {name for name, parameter in model.named_parameters() if id(parameter) in before}
    assert {name for name, parameter in other.named_parameters() if parameter in fresh.state} == names
    assert all(own["step"] == 2 for own in fresh.state.values())


@pytest.mark.ranks(1)
def test_options_come_back_in_the_types_of_the_optimizer(world: ax.World) -> None:
    model = nn.Linear(2, 2)
    make = functools.partial(torch.optim.AdamW, [*model.parameters()], betas=(0.8, 0.9))
    both = (torch.tensor(0.1), False), (0.5, True)
    for (rate, foreach), (rate_before, foreach_before) in (both, both[::-1]):
        source, target = make(lr=rate, foreach=foreach), make(lr=rate_before, foreach=foreach_before)
        others = {"initial_lr": 0.25, "note": None, "bounds": (1, math.inf), "count": 3}
        source.param_groups[0] |= {**others, "count": np.int64(3)}
        load(world, model, target, *saved(world, model, source))
        found = target.param_groups[0]
        assert (type(found["lr"]), float(found["lr"])) == (type(rate_before), float(rate))
        assert (found["foreach"], found["betas"]) == (foreach_before, (0.8, 0.9))
        assert {name: found[name] for name in others} == others


# ---- mistakes ---------------------------------------------------------------------------------------------------


class Keeping(torch.optim.SGD):
    """An optimizer that keeps more than others do."""

    kept: Any = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["more"] = self.kept
        return super().step(closure)


@pytest.mark.ranks(3)
def test_state_that_a_file_cannot_hold(world: ax.World) -> None:
    plain, sharded = built(Blocks), ax.FSDP(built(Blocks))

    def keeping(model: nn.Module, kept: Any) -> torch.optim.Optimizer:
        optimizer = Keeping(model.parameters(), lr=0.1)
        optimizer.kept = kept
        optimizer.step()
        return optimizer

    rule, number, text = (torch.optim.SGD(plain.parameters(), lr=0.1) for _ in range(3))
    rule.param_groups[0]["rule"] = print
    number.state[plain.scale][7] = 3
    text.state["all"]["count"] = 3
    of_scale = "state 'more' that Keeping keeps for 'scale'"
    for model, optimizer, message in (
        (plain, keeping(plain, {1, 2}), f"{of_scale}: a checkpoint holds None, .* got set"),
        (plain, keeping(plain, [torch.zeros(9999)]), f"{of_scale}.* at most 4096 elements, got 9999"),
        (sharded, keeping(sharded, torch.zeros(3, 2)), r"keeps for '.*' has shape \[3, 2\], and this rank's shard"),
        (plain, rule, "SGD's option 'rule': a checkpoint holds .* got builtin"),
        (plain, torch.optim.LBFGS(plain.parameters()), "LBFGS keeps vectors over all parameters"),
        (plain, optimizer_of("SGD")(sharded), "group 0 has a parameter of shape .* that is not of this model"),
        (plain, number, "SGD keeps state under 7 for 'scale', expected a text"),
        (plain, text, "SGD keeps state for 'all', which is none of its parameters"),
    ):
        found = model_shards(model, world.default_group)
        with found.stable(), pytest.raises(ValueError, match=message):
            optimizer_shards(optimizer, found)


def halves(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with two groups."""
    even, odd = ([*model.parameters()][first::2] for first in range(2))
    return torch.optim.SGD([{"params": even}, {"params": odd, "lr": 0.2}], 0.1, momentum=0.9)


@pytest.mark.ranks(3)
def test_a_state_that_does_not_fit(world: ax.World) -> None:
    """The optimizer is as it was, on all ranks."""
    model = ax.FSDP(built(Blocks))
    tensors, state = saved(world, model, train(model, world, 1, halves))

    larger = ax.FSDP(built(functools.partial(Blocks, depth=5)))
    mismatched = {**state, "parameters": {**state["parameters"], "scale": [*state["parameters"]["scale"][:2], [5]]}}
    other_options = "its group 0 has 'scale', .* and .*, which had different options when they were saved"
    not_there = "the checkpoint's optimizer did not have 'blocks.4.norm.weight', .* and 2 more, which group 0 has"
    momentum = optimizer_of("SGD", lr=0.1, momentum=0.9)
    for other, optimizer, given, message in (
        (model, optimizer_of("AdamW")(model), state, "expected a SGD, whose state was saved, got a AdamW"),
        (model, momentum(model), state, other_options),
        (larger, momentum(larger.blocks[4]), state, not_there),
        (model, halves(model), mismatched, r"expected the state of 'scale' for shape \[12\], got one for \[5\]"),
    ):
        before = [{**group} for group in optimizer.param_groups]
        refused(ValueError, (functools.partial(load, world, other, optimizer, tensors, given), message))
        assert ([{**group} for group in optimizer.param_groups], optimizer.state) == (before, {})
