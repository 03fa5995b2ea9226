"""Different numbers of batches on each rank, against sums taken by hand in one process."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from models import (
    BatchNormalised,
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    built,
    gradients_of,
    logged,
    loss_of,
    mlp,
    wrapped,
)
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import CollectiveMismatchError, GradSyncStrategy, RankFailedError
from axonmpi.errors import UnusedParameterError

SYNCHRONOUS, OVERLAPPED, NO_SYNC = GradSyncStrategy
COUNTS = {1: [3], 2: [4, 2], 3: [0, 5, 2], 4: [1, 3, 0, 6]}


def batch(module: nn.Module, rank: int, number: int) -> tuple[Tensor, Tensor]:
    return batch_of(module, 100 * rank + number, size=4)


def train(
    model: ax.DDP, world: ax.World, count: int, *, accumulation: int = 1, by_hand: bool = False, **options
) -> None:
    optimizer = adamw(model)
    with model.join(**options):
        for step in range(count):
            optimizer.zero_grad()
            for micro in range(accumulation):
                inputs, targets = batch(model.module, world.rank, accumulation * step + micro)
                with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                    loss_of(model(inputs), targets).backward()
            if by_hand:
                model.sync_gradients()
            optimizer.step()


def trained_by_hand(
    make, counts: list[int], *, accumulation: int = 1, initial_size: bool = True
) -> dict[str, Tensor]:
    """Sum the gradients of the ranks that have a batch; batch norm begins with the first of their buffers."""
    model = built(make)
    optimizer = adamw(model)
    buffers = [{name: value.clone() for name, value in model.named_buffers()} for _ in counts]
    active = [0]
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if count > step]
        optimizer.zero_grad()
        for micro in range(accumulation):
            first = copy.deepcopy(buffers[active[0]])
            for rank in active:
                model.load_state_dict(first, strict=False)
                inputs, targets = batch(model, rank, accumulation * step + micro)
                divisor = len(counts) if initial_size else len(active)
                (loss_of(model(inputs), targets) / divisor).backward()
                buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
        optimizer.step()
    model.load_state_dict(buffers[active[0]], strict=False)
    return copy.deepcopy(model.state_dict())


def check(world: ax.World, model: ax.DDP, expected: dict[str, Tensor]) -> None:
    assert_close(model.state_dict(), expected)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_uneven_batches(world, strategy):
    counts = COUNTS[world.size]
    model = wrapped(world, built(mlp), sync_strategy=strategy, bucket_cap_mb=0.001)
    train(model, world, counts[world.rank], by_hand=strategy is NO_SYNC)
    check(world, model, trained_by_hand(mlp, counts))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_options_of_the_wrapper(world, find_unused, as_view, overlaps):
    counts = COUNTS[world.size]
    model = wrapped(
        world,
        built(mlp),
        overlaps=overlaps,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=as_view,
        bucket_cap_mb=1e-6,
    )
    train(model, world, counts[world.rank], by_hand=True)
    check(world, model, trained_by_hand(mlp, counts))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, OVERLAPPED])
def test_averages_over_the_ranks_that_still_train(world, strategy):
    counts = COUNTS[world.size]
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    train(model, world, counts[world.rank], divide_by_initial_world_size=False)
    check(world, model, trained_by_hand(mlp, counts, initial_size=False))
    assert model.current_reducer.scale == 1.0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("initial_size", [True, False])
def test_accumulation_inside(world, initial_size):
    counts = COUNTS[world.size]
    model = wrapped(world, built(mlp))
    train(model, world, counts[world.rank], accumulation=3, divide_by_initial_world_size=initial_size)
    check(world, model, trained_by_hand(mlp, counts, accumulation=3, initial_size=initial_size))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, OVERLAPPED])
def test_batch_norm(world, strategy):
    counts = COUNTS[world.size]
    model = wrapped(world, built(BatchNormalised), sync_strategy=strategy)
    train(model, world, counts[world.rank])
    check(world, model, trained_by_hand(BatchNormalised, counts))


@pytest.mark.ranks(2)
def test_no_batches_anywhere(world):
    model = wrapped(world, built(mlp))
    before = copy.deepcopy(model.state_dict())
    train(model, world, 0)
    check(world, model, before)


@pytest.mark.ranks(2)
def test_again_and_without(world):
    """Two epochs with a context each, and then an even one outside."""
    model = wrapped(world, built(mlp))
    train(model, world, world.rank)
    train(model, world, 1 - world.rank)
    train(model, world, 2, enable=False)
    model.zero_grad()
    with logged(world) as log:
        loss_of(*(model(batch(model, 0, 0)[0]), batch(model, 0, 0)[1])).backward()
    assert {operation for operation, _ in log.calls} <= {"all_reduce", "broadcast"}
    assert_same_on_all_ranks(world, model.state_dict())
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("initial_size", [True, False])
def test_an_optimizer_and_its_scheduler_stay_in_step(world, initial_size):
    """Two epochs with Adam: the second begins with the state of a rank that trained to the end of the first."""
    epochs = [COUNTS[world.size], list(reversed(COUNTS[world.size]))]

    def prepare(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = adamw(module)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    model, alone = wrapped(world, built(mlp)), built(mlp)
    ours, our_rates = prepare(model)
    theirs, their_rates = prepare(alone)
    for counts in epochs:
        with model.join(ours, our_rates, divide_by_initial_world_size=initial_size):
            for step in range(counts[world.rank]):
                ours.zero_grad()
                inputs, targets = batch(model.module, world.rank, step)
                loss_of(model(inputs), targets).backward()
                ours.step()
                our_rates.step()
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if count > step]
            theirs.zero_grad()
            for rank in active:
                inputs, targets = batch(alone, rank, step)
                divisor = world.size if initial_size else len(active)
                (loss_of(alone(inputs), targets) / divisor).backward()
            theirs.step()
            their_rates.step()
        check(world, model, alone.state_dict())
    assert our_rates.state_dict() == their_rates.state_dict()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours.state[own], theirs.state[other])


def scheduled(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("make", [adamw, scheduled, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)])
def test_an_optimizer_that_was_not_given_refuses_to_go_on_out_of_step(world, make, uneven):
    model = wrapped(world, built(mlp))
    optimizer = make(model)

    def train_on(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            inputs, targets = batch(model.module, world.rank, step)
            loss_of(model(inputs), targets).backward()
            optimizer.step()

    with model.join():
        train_on(2 - world.rank if uneven else 2)
    if uneven and (make is adamw or make is scheduled):
        with pytest.raises(RuntimeError, match=r"different numbers of steps .*model.join\(optimizer, scheduler\)"):
            train_on(1)
        optimizer.load_state_dict(ax.broadcast_object(optimizer.state_dict()))
    train_on(2)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("given", [True, 1, "optimizer"])
def test_what_has_no_state_is_refused(world, given):
    model = wrapped(world, built(mlp))
    with pytest.raises(TypeError, match=r"join: expected optimizers, schedulers .* settings go by name"):
        model.join(given)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.ranks(2)
def test_what_no_rank_uses_has_no_gradient(world):
    model = wrapped(world, built(Head), find_unused_parameters=True)
    with model.join():
        for _ in range(2 - world.rank):
            model(torch.ones(1, 2)).sum().backward()
    assert model.module.unused.weight.grad is None


@pytest.mark.ranks(2, 3)
def test_unused_parameters_are_an_error_on_ranks_that_have_left_too(world):
    model = wrapped(world, built(Head))

    def train_on_rank_1() -> None:
        with model.join():
            for _ in range(int(world.rank == 1)):
                model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(UnusedParameterError, match=r"unused.weight \(rank 1\)"):
        train_on_rank_1()
    model.zero_grad()
    model.module.unused.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("make", [mlp, BatchNormalised])
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_throwing_as_soon_as_one_has_left(world, strategy, make):
    model = wrapped(world, built(make), sync_strategy=strategy, bucket_cap_mb=1e-6)
    counts = [2, 1, 2][: world.size]
    others = {2: "[0]", 3: "[0, 2]"}[world.size]
    with pytest.raises(RankFailedError) as error:
        train(model, world, counts[world.rank], by_hand=True, throw_on_early_termination=True)
    assert f"ranks [1] ran out of batches while ranks {others} were still training" in str(error.value)
    # afterwards all ranks train on, with the parameters of the one step they all made
    assert_same_on_all_ranks(world, {name: p.detach() for name, p in model.module.named_parameters()})
    train(model, world, 2, by_hand=True)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(2)
def test_throwing_nothing_if_all_leave_together(world):
    model = wrapped(world, built(mlp))
    train(model, world, 3, throw_on_early_termination=True)
    check(world, model, trained_by_hand(mlp, [3, 3]))


@pytest.mark.ranks(2)
def test_an_exception_inside_is_not_held_up(world):
    model = wrapped(world, built(mlp))

    def fail() -> None:
        with model.join():
            loss_of(model(batch(model, 0, 0)[0]), batch(model, 0, 0)[1]).backward()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    with logged(world) as log:
        model.zero_grad()
        inputs, targets = batch(model, world.rank, 1)
        loss_of(model(inputs), targets).backward()
    assert [size for _, size in log.calls if size == 8 * world.size] == []  # nobody asks who still trains
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(3)
def test_ranks_that_are_not_at_the_same_step(world):
    model = wrapped(world, built(mlp), sync_strategy=SYNCHRONOUS)

    def train_differently() -> None:
        with model.join():
            if world.rank == 0:
                loss_of(model(batch(model, 0, 0)[0]), batch(model, 0, 0)[1]).backward()
            elif world.rank == 2:
                model.sync_gradients()

    message = "the ranks that still train are not at the same step: rank 0: gradients, rank 2: by hand"
    with pytest.raises(CollectiveMismatchError, match=message):
        train_differently()


@pytest.mark.ranks(2)
def test_an_optimizer_stays_in_step_where_a_rank_has_made_steps_by_itself(world):
    model = wrapped(world, built(mlp))
    optimizer = adamw(model)
    with model.join(optimizer):
        loss_of(model(batch(model.module, world.rank, 0)[0]), batch(model.module, world.rank, 0)[1]).backward()
        optimizer.step()
        for number in range(3 * world.rank):
            with model.no_sync():
                inputs, targets = batch(model.module, world.rank, number)
                loss_of(model(inputs), targets).backward()
            optimizer.step()
    for parameter in model.parameters():
        assert_same_on_all_ranks(world, optimizer.state[parameter])
