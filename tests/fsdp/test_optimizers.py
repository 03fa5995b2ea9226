"""Each optimizer of torch on sharded parameters: as in one process, or refused before anything changes."""

import pytest
import torch
from helpers.compare import assert_close, refused
from helpers.models import Blocks, batch_of, built, equals_alone, in_turn, own_data, own_loss, trained_alone
from helpers.steps import adamw, loss_of, optimizer_of, sgd, usual_step, within
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import ShardingStrategy


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    plain, decayed = (
        [p for name, p in model.named_parameters() if ("norm" in name or name.endswith("bias")) is is_plain]
        for is_plain in (True, False)
    )
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def by_dims(model: nn.Module) -> torch.optim.Optimizer:
    plain, decayed = ([p for p in model.parameters() if (p.ndim < 2) is is_plain] for is_plain in (True, False))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}])


def rate_by_parameter(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())])


ELEMENTWISE = {
    "ASGD": optimizer_of("ASGD", lr=0.05, t0=1, weight_decay=0.1),
    "Adadelta": optimizer_of("Adadelta", lr=1.0),
    "Adagrad": optimizer_of("Adagrad", lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": optimizer_of("Adam", lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": optimizer_of("AdamW", lr=1e-2, maximize=True),
    "Adamax": optimizer_of("Adamax", lr=1e-2, weight_decay=0.1),
    "NAdam": optimizer_of("NAdam", lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": optimizer_of("RAdam", lr=1e-2),
    "RMSprop": optimizer_of("RMSprop", lr=1e-2, centered=True, momentum=0.9, eps=1e-3),
    "Rprop": optimizer_of("Rprop", lr=1e-2),
    "SGD": optimizer_of("SGD", lr=0.05, momentum=0.9, dampening=0.1, nesterov=False),
    "fused": optimizer_of("AdamW", lr=1e-2, fused=True),
    "foreach": optimizer_of("AdamW", lr=1e-2, foreach=True, amsgrad=True),
    "named": lambda model: torch.optim.NAdam(model.named_parameters(), lr=1e-2),
    "by_name": by_name,
    "by_dims": by_dims,
    "rate_by_parameter": rate_by_parameter,
}
OF_WHOLE_PARAMETERS = {"Adafactor": optimizer_of("Adafactor", lr=1e-2, weight_decay=0.1)}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OF_WHOLE_PARAMETERS["Muon"] = lambda model: torch.optim.Muon(
        [p for p in model.parameters() if p.ndim == 2], lr=1e-2
    )


def test_each_class_of_torch_is_among_them():
    classes = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert classes - {"Optimizer", "LBFGS"} <= {*ELEMENTWISE, *OF_WHOLE_PARAMETERS, "SparseAdam"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("number", "kind"), list(enumerate(ELEMENTWISE)))
def test_steps_on_each_element(world, number, kind):
    shard_by = ("elements", "parameters")[number % 2]
    equals_alone(world, Blocks, make_optimizer=ELEMENTWISE[kind], shard_by=shard_by)


@pytest.mark.ranks(3)
@in_turn("kind", OF_WHOLE_PARAMETERS)
def test_steps_on_whole_parameters(world, setting, kind):
    """Newton-Schulz iterations in bfloat16 magnify rounding."""
    options = {"sharding_strategy": setting, "tolerance": 1e-5 if kind == "Adafactor" else 2e-3}
    equals_alone(world, Blocks, make_optimizer=OF_WHOLE_PARAMETERS[kind], shard_by="parameters", **options)


def refuses(model: ax.FSDP, step, message: str) -> None:
    before = model.full_state_dict()
    refused(ValueError, (step, message))
    assert_close(model.full_state_dict(), before, 0.0)


@pytest.mark.ranks(3)
@in_turn("kind", OF_WHOLE_PARAMETERS)
def test_steps_on_whole_parameters_of_which_a_rank_has_a_part(model, kind):
    optimizer = OF_WHOLE_PARAMETERS[kind](model)
    model(batch_of(model.module, 0)[0]).sum().backward()
    refuses(model, optimizer.step, f"the step of {kind} needs whole parameters.* shard_by='parameters'")


lbfgs_of = optimizer_of("LBFGS", lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


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


@pytest.mark.ranks(1, 2)
def test_products_over_all_parameters(world):
    """Of a rank that has them, or refused."""
    strategy = ShardingStrategy.NO_SHARD if world.size > 1 else ShardingStrategy.FULL_SHARD
    equals_alone(world, Blocks, with_closure, lbfgs_of, sharding_strategy=strategy, tolerance=1e-4)
    if world.size > 1:
        model = ax.FSDP(built(Blocks), shard_by="parameters")
        message = "LBFGS takes products over all parameters.* sharding_strategy=ax.ShardingStrategy.NO_SHARD"
        optimizer, batch = lbfgs_of(model), own_data(model, world)
        refuses(model, lambda: with_closure(model, optimizer, batch), message)


@pytest.mark.ranks(2)
def test_a_closure(world):
    equals_alone(world, Blocks, with_closure)


# ---- steps that would be lost -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_step_before_gradients_are_averaged(world, model):
    optimizer = adamw(model)
    with model.no_sync():
        own_loss(model, world).backward()
        refuses(model, optimizer.step, r"'.*' has accumulated in no_sync\(\) and was not averaged")
    refuses(model, optimizer.step, r"or sync_gradients\(\), before the step")
    model.sync_gradients()
    optimizer.step()
    assert_close(model.full_state_dict(), trained_alone(Blocks, 1, adamw).state_dict())
    with model.no_sync():
        own_loss(model, world).backward()
    model.zero_grad()  # drops what has accumulated
    optimizer.step()
    usual_step(model, optimizer, own_data(model, world, 1))
    assert_close(model.full_state_dict(), trained_alone(Blocks, 2, adamw).state_dict())


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_made_in_a_forward(model):
    made = []
    model.module.head.register_forward_hook(lambda head, *_: made.append(adamw(head)))
    model(batch_of(model.module, 0)[0]).sum().backward()
    refuses(model, made[0].step, r"has parameter 'head.weight' as it is within a forward")


@pytest.mark.ranks(1, 2)
def test_an_optimizer_of_before_wrapping(world):
    plain = built(Blocks)
    optimizer = adamw(plain)
    model = ax.FSDP(plain)
    optimizer.zero_grad()
    refuses(model, optimizer.step, "this optimizer has parameter 'scale' as it was before the model was")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("make", [Blocks, lambda: nn.Linear(5, 3)])
def test_steps_in_hooks_on_parameters(world, setting, make):
    """Each parameter by itself as soon as its gradient is there; some ranks have no part of it, or of any."""

    def made_for_each(model: nn.Module) -> torch.optim.Optimizer:
        own = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(model.parameters(), lr=1.0)  # finds no gradient

    equals_alone(world, make, make_optimizer=made_for_each, sharding_strategy=setting)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_an_optimizer_made_while_parameters_are_whole(world, strategy):
    def made_meanwhile(model):
        with within(model, "full_parameters"):
            return sgd(model)

    equals_alone(world, Blocks, usual_step, made_meanwhile, sharding_strategy=strategy)
