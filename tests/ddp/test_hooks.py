"""Hooks of users, and what else decides which gradients are averaged: results are those of one process."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_alone, gradients_of, refused
from helpers.models import (
    AFTER,
    AS_VIEW,
    AUTOMATIC,
    BESIDE,
    EACH_WAY,
    IN_ORDER,
    TINY,
    WAYS,
    Checkpointed,
    PassesNothing,
    Weights,
    batch_of,
    built,
    check_averaged,
    check_backward,
    fail,
    joined_loss,
    large,
    mlp,
    own_loss,
    part_of,
    wrapped,
)
from helpers.operation_log import logged
from helpers.settings import each_pair
from helpers.steps import loss_of
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import GradSyncStrategy


def check_own(model: ax.DDP, loss: Callable[[nn.Module], Tensor]) -> None:
    assert_close(gradients_of(model.module), gradients_alone(model.module, loss))


def two_losses(model: nn.Module) -> Tensor:
    return joined_loss(model) + joined_loss(model, 1)


# ---- hooks of users ---------------------------------------------------------------------------------------------


def clamp_in_place(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01).mul_(3)


def clamp_and_replace(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01) * 3


def shares_layers() -> nn.Module:
    return Checkpointed(False, shared=True)


@pytest.mark.ranks(2)
@each_pair(
    way=WAYS,
    as_view=[True, False],
    hook=[clamp_in_place, clamp_and_replace],
    make=[mlp, large, shares_layers],
)
def test_hooks_on_gradients_come_before_the_average(world, way, as_view, hook, make):
    """Each rank's gradient is changed where it has been computed, whenever the hook was registered."""
    model = wrapped(world, built(make), **way, gradient_as_bucket_view=as_view, bucket_cap_mb=TINY)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        expected: dict[str, Tensor] = {}
        for rank in range(world.size):
            inputs, targets = part_of(batch_of(model, step), rank, world.size)
            alone = copy.deepcopy(model.module)
            alone.zero_grad()
            loss_of(alone(inputs), targets).backward()
            for name, parameter in alone.named_parameters():
                hook(parameter)
                expected[name] = expected.get(name, 0) + parameter.grad / world.size
        model.zero_grad()
        own_loss(model, world, step).backward()
        assert_close(gradients_of(model.module), expected, tolerance=1e-6)
        assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(2)
@AUTOMATIC
def test_parameters_added_and_replaced_after_wrapping(world, strategy):
    """They begin with rank 0's values, and are averaged."""
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    own_loss(model, world).backward()
    model.module[-1] = built(lambda: nn.Linear(16, 3), seed=world.rank)
    model.module.append(built(lambda: nn.Linear(3, 3), seed=5 + world.rank))
    model.zero_grad()
    own_loss(model, world, 1).backward()
    assert_same_on_all_ranks(world, dict(model.named_parameters()))
    assert torch.equal(model.module[-1].weight, built(lambda: nn.Linear(3, 3), seed=5).weight)
    check_averaged(world, model, lambda alone: joined_loss(alone, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
@pytest.mark.parametrize("part", [slice(None), slice(5, 6)], ids=["all", "last"])
def test_parameters_that_were_converted_and_back(world, strategy, part):
    """Between two forwards, as for an evaluation in another dtype: autograd has new nodes for them."""
    model = wrapped(world, built(mlp), sync_strategy=strategy, bucket_cap_mb=TINY)
    for _ in range(3):
        check_backward(world, model)
        model.module[part].double().float()


# ---- gradients that are not there -------------------------------------------------------------------------------


def undefined(weights: nn.ParameterList, x: Tensor, defined: bool) -> Tensor:
    """Backward comes to the second weight, and has a gradient for it if that is asked for."""
    result = PassesNothing.apply(x * weights[0], weights[1])
    return result * weights[1] if defined else result


@pytest.mark.ranks(2)
@each_pair(way=WAYS, as_view=[True, False], find_unused=[True, False])
def test_undefined_gradients_as_in_torch(world, way, as_view, find_unused):
    """With the flag left alone, where no rank has one, so that weight decay is as well; zeros without."""
    options = {"gradient_as_bucket_view": as_view, "find_unused_parameters": find_unused, **way}
    model = wrapped(world, Weights(undefined, [torch.ones(1), torch.ones(1)]), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    first, second = model.parameters()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1.0 + world.rank]), False).sum().backward()
        assert (first.grad, second.grad) == ((1 + world.size) / 2, None if find_unused else 0)
    optimizer.step()
    assert second.item() == pytest.approx(1.0 if find_unused else 0.99)
    optimizer.zero_grad()
    model(torch.tensor([1.0]), world.rank == world.size - 1).sum().backward()
    assert second.grad.item() == pytest.approx(first.item() / world.size)


@pytest.mark.ranks(2)
@AS_VIEW
def test_gradients_kept_over_zero_grad(world, as_view):
    """With views of buckets the next backward overwrites them, without it does not."""
    model = wrapped(world, built(mlp), gradient_as_bucket_view=as_view)
    for step in range(2):  # after the first one the buckets are laid out anew
        model.zero_grad()
        own_loss(model, world, step).backward()
    kept = {name: p.grad for name, p in model.module.named_parameters()}
    check_backward(world, model, 2)
    assert_close(kept, gradients_alone(model.module, lambda alone: joined_loss(alone, 2 if as_view else 1)))


@pytest.mark.ranks(2)
@AUTOMATIC
def test_parameters_frozen_between_forward_and_backward(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    loss = own_loss(model, world)
    expected = gradients_alone(model.module, joined_loss)
    model.module[0].weight.requires_grad_(False)
    loss.backward()
    frozen = model.module[0].weight.grad
    assert frozen is None or not frozen.any()
    assert_close({**gradients_of(model.module), "0.weight": None}, {**expected, "0.weight": None})


# ---- which backwards are averaged -------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "reentrant"), [(AFTER, None), (BESIDE, None), (AFTER, False), (IN_ORDER, True), (BESIDE, True)]
)
def test_the_forward_decides_whether_gradients_are_averaged(world, way, reentrant):
    make = mlp if reentrant is None else lambda: Checkpointed(reentrant)
    model = wrapped(world, built(make), **way, bucket_cap_mb=TINY)

    with model.no_sync():
        loss = own_loss(model, world)
    with logged(world) as log:
        loss.backward()
    assert log.calls == []
    check_own(model, lambda alone: own_loss(alone, world))

    loss = own_loss(model, world, 1)
    with model.no_sync():
        loss.backward()
    check_averaged(world, model, two_losses)


@pytest.mark.ranks(2)
@EACH_WAY
def test_forwards_of_both_kinds_and_calls_of_the_module_itself(world, way):
    model = wrapped(world, built(mlp), **way, bucket_cap_mb=TINY)

    def losses() -> tuple[Tensor, Tensor]:
        with model.no_sync():
            inside = own_loss(model, world, 1)
        return own_loss(model, world), inside

    outside, inside = losses()
    (outside + inside).backward()
    check_averaged(world, model, two_losses)

    model.zero_grad()
    outside, inside = losses()
    inside.backward()
    check_own(model, lambda alone: own_loss(alone, world, 1))
    outside.backward()
    check_averaged(world, model, two_losses)

    model.zero_grad()  # the wrapper sees nothing of these forwards: where the backward is decides
    with model.no_sync():
        own_loss(model.module, world).backward()
    check_own(model, lambda alone: own_loss(alone, world))
    own_loss(model.module, world, 1).backward()
    check_averaged(world, model, two_losses)


@pytest.mark.ranks(2)
def test_a_backward_in_no_sync_that_ends_in_an_exception(world, model):
    with model.no_sync():
        loss = own_loss(model, world)
    handle = model.module[3].weight.register_hook(fail)
    refused(ArithmeticError, (loss.backward, "in the middle"))
    handle.remove()
    check_backward(world, model)


@pytest.mark.ranks(2)
@each_pair(way=WAYS, as_view=[True, False], make=[mlp, large])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_averaged_gradients(world, way, as_view, make):
    """`create_graph=True` leaves averages that backward can go through, as in one process."""
    model = wrapped(world, built(make), **way, gradient_as_bucket_view=as_view)
    if as_view:
        own_loss(model, world, 3).backward()  # the buckets are laid out anew afterwards

    def second(module: nn.Module, loss: Callable[[int], Tensor]) -> dict[str, Tensor | None]:
        module.zero_grad()
        loss(0).backward(create_graph=True)
        first = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        (sum(gradient.square().sum() for gradient in first) + loss(1)).backward()
        return gradients_of(module)

    alone = copy.deepcopy(model.module)
    got = second(model, lambda step: own_loss(model, world, step))
    assert_close(got, second(alone, lambda step: joined_loss(alone, step)), tolerance=1e-4)
    assert_same_on_all_ranks(world, got)
