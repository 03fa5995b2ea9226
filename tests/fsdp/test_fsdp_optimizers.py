"""Each optimizer of torch on sharded parameters: as in one process, or refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from alongside import adamw_of, equals_alone, usual_step
from models import assert_close, built, loss_of, part_of
from sharded import Blocks, data_for, new_group
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import ShardingStrategy

ELEMENTWISE = {
    "ASGD": {"lr": 0.05, "t0": 1, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "maximize": True},
    "Adamax": {"lr": 1e-2, "weight_decay": 0.1},
    "NAdam": {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "centered": True, "momentum": 0.9, "eps": 1e-3},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "nesterov": False},
}
OF_WHOLE_PARAMETERS = {"Adafactor": {"lr": 1e-2, "weight_decay": 0.1}, "Muon": {"lr": 1e-2}}
OF_SPARSE_GRADIENTS = {"SparseAdam"}
LBFGS = {"lr": 0.5, "max_iter": 4, "history_size": 3}


def optimizer_of(kind: str, options: dict[str, object]):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        own = [p for p in model.parameters() if kind != "Muon" or p.ndim == 2]
        return getattr(torch.optim, kind)(own, **options)

    return make


def test_each_class_of_torch_is_among_them():
    classes = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert classes - {"Optimizer", "LBFGS"} == {*ELEMENTWISE, *OF_WHOLE_PARAMETERS, *OF_SPARSE_GRADIENTS}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_steps_on_each_element(world, kind):
    equals_alone(world, Blocks, optimizer_of=optimizer_of(kind, ELEMENTWISE[kind]))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("kind", "tolerance"), [("Adafactor", 1e-5), ("Muon", 2e-3)])
def test_steps_on_whole_parameters(world, setting, kind, tolerance):
    make = optimizer_of(kind, OF_WHOLE_PARAMETERS[kind])
    options = {"sharding_strategy": setting, "tolerance": tolerance}
    equals_alone(world, Blocks, optimizer_of=make, shard_by="parameters", **options)


def refuses(world, model: ax.FSDP, step, message: str) -> None:
    before = model.full_state_dict()
    with pytest.raises(ValueError, match=message):
        step()
    assert_close(model.full_state_dict(), before, 0.0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", OF_WHOLE_PARAMETERS)
def test_steps_on_whole_parameters_of_which_a_rank_has_a_part(world, setting, kind):
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        optimizer = optimizer_of(kind, OF_WHOLE_PARAMETERS[kind])(model)
        model(data_for(model.module, 0)[0]).sum().backward()
        if model.process_group.size == 1:  # replicas
            optimizer.step()
        else:
            refuses(
                world, model, optimizer.step, f"the step of {kind} needs whole parameters.* shard_by='parameters'"
            )


def with_closure(model, optimizer, batch):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        mean = loss.detach().clone()
        if isinstance(model, ax.FSDP):
            ax.all_reduce_mean(mean)
        return mean

    optimizer.step(closure)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_products_over_all_parameters(world, search):
    make = optimizer_of("LBFGS", {**LBFGS, "line_search_fn": search})
    for strategy in [ShardingStrategy.NO_SHARD] + [ShardingStrategy.FULL_SHARD] * (world.size == 1):
        equals_alone(world, Blocks, with_closure, make, sharding_strategy=strategy, tolerance=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_products_over_all_parameters_of_which_a_rank_has_a_part(world, shard_by):
    model = ax.FSDP(built(Blocks), shard_by=shard_by)
    optimizer = torch.optim.LBFGS(model.parameters(), **LBFGS)
    batch = part_of(data_for(model.module, 0), world.rank, world.size)
    message = "LBFGS takes products over all parameters.* sharding_strategy=ax.ShardingStrategy.NO_SHARD"
    refuses(world, model, lambda: with_closure(model, optimizer, batch), message)


# ---- steps that would be lost -----------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_a_step_before_gradients_are_averaged(world, setting):
    plain = built(Blocks)
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        optimizers = adamw_of(model), adamw_of(plain)
        inputs, targets = data_for(plain, 0)
        mine = part_of((inputs, targets), group.rank, group.size)
        with model.no_sync():
            loss_of(model(mine[0]), mine[1]).backward()
            refuses(world, model, optimizers[0].step, r"'.*' has accumulated in no_sync\(\) and was not averaged")
            torch.optim.SGD([next(model.parameters())], lr=0.1, maximize=True)
        refuses(world, model, optimizers[0].step, r"or sync_gradients\(\), before the step")
        model.sync_gradients()
        optimizers[0].step()
        loss_of(plain(inputs), targets).backward()
        optimizers[1].step()
        assert_close(model.full_state_dict(), plain.state_dict())
        with model.no_sync():
            loss_of(model(mine[0]), mine[1]).backward()
        model.zero_grad()  # drops them
        plain.zero_grad()
        for module, optimizer, batch in (
            (model, optimizers[0], mine),
            (plain, optimizers[1], (inputs, targets)),
        ):
            optimizer.step()
            usual_step(module, optimizer, batch)
        assert_close(model.full_state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_made_in_a_forward(world, setting):
    made = []
    with new_group(world) as group:
        model = ax.FSDP(built(Blocks), group, sharding_strategy=setting)
        model.module.head.register_forward_hook(lambda head, *_: made.append(adamw_of(head)))
        model(data_for(model.module, 0)[0]).sum().backward()
        refuses(world, model, made[0].step, r"has parameter 'head.weight' as it is within a forward")


@pytest.mark.ranks(2, 4)
def test_steps_in_hooks_on_parameters(world, setting):
    """Each parameter by itself as soon as its gradient is there; some ranks have no part of it, or of any."""

    def made_for_each(model: nn.Module) -> torch.optim.Optimizer:
        own = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(model.parameters(), lr=1.0)  # finds no gradient

    for make in (Blocks, lambda: nn.Linear(5, 3)):
        equals_alone(world, make, optimizer_of=made_for_each, sharding_strategy=setting)
