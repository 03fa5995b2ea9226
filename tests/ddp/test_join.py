"""Different numbers of batches on each rank, against sums taken by hand in one process."""

import contextlib
import copy

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_of, refused
from helpers.models import NO_SYNC, SYNCHRONOUS, TINY, batch_norm, batch_of, built, fail, large, mlp, wrapped
from helpers.operation_log import logged
from helpers.settings import each_pair
from helpers.steps import adamw, loss_of, optimizer_of, sgd
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import CollectiveMismatchError, GradSyncStrategy, RankFailedError
from axonmpi.errors import UnusedParameterError

COUNTS = {1: [2], 2: [3, 1], 3: [0, 3, 2], 4: [1, 2, 0, 3]}


def own_loss(model: nn.Module, rank: int, number: int) -> Tensor:
    inputs, targets = batch_of(model, 100 * rank + number, size=4)
    return loss_of(model(inputs), targets)


def train(
    model: ax.DDP,
    world: ax.World,
    count: int,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulation: int = 1,
    by_hand: bool = False,
    **options,
) -> None:
    optimizer = optimizer or sgd(model)
    with model.join(**options):
        for step in range(count):
            optimizer.zero_grad()
            for micro in range(accumulation):
                with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                    own_loss(model, world.rank, accumulation * step + micro).backward()
            if by_hand or model.sync_strategy is NO_SYNC:
                model.sync_gradients()
            optimizer.step()


def trained_by_hand(
    make, counts: list[int], *, accumulation: int = 1, initial_size: bool = True, broadcasts: bool = True
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Sum the gradients of the ranks that have a batch; return the state, and the buffers of each rank.

    Batch norm begins with the buffers of the first of them where gradients are averaged, else with a rank's own.
    """
    model = built(make)
    optimizer = sgd(model)
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in counts]
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if count > step]
        optimizer.zero_grad()
        for micro in range(accumulation):
            before = list(buffers)
            for rank in active:
                copied = broadcasts and micro == accumulation - 1
                model.load_state_dict(before[active[0] if copied else rank], strict=False)
                divisor = len(counts) if initial_size else len(active)
                (own_loss(model, rank, accumulation * step + micro) / divisor).backward()
                buffers[rank] = copy.deepcopy(dict(model.named_buffers()))
        optimizer.step()
    model.load_state_dict(buffers[active[0]], strict=False)
    return copy.deepcopy(model.state_dict()), buffers


@pytest.mark.ranks(3)
@pytest.mark.parametrize("broadcasts", [True, False])
def test_even_batches_of_a_batch_norm(world, broadcasts):
    """Each rank's statistics are of its own batches, which begin with rank 0's or with its own."""
    model = wrapped(world, built(batch_norm), broadcast_buffers=broadcasts)
    train(model, world, 3, enable=False)
    state, buffers = trained_by_hand(batch_norm, [3, 3, 3], broadcasts=broadcasts)
    assert_close(model.state_dict(), {**state, **buffers[world.rank]})
    assert int(model.module.norm.num_batches_tracked) == 3


def check(world: ax.World, model: ax.DDP, expected: dict[str, Tensor]) -> None:
    assert_close(model.state_dict(), expected)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(3)
@each_pair(
    make=[mlp, batch_norm, large],
    strategy=list(GradSyncStrategy),
    overlaps=[True, False],
    as_view=[True, False],
    find_unused=[True, False],
    initial_size=[True, False],
    accumulation=[1, 3],
    cap=[TINY, 25],
    by_hand=[False, True],
)
def test_uneven_batches(
    world, make, strategy, overlaps, as_view, find_unused, initial_size, accumulation, cap, by_hand
):
    """By hand as well as in backward, where that has averaged before: then nothing is left to do."""
    counts = COUNTS[world.size]
    model = wrapped(
        world,
        built(make),
        overlaps=overlaps,
        sync_strategy=strategy,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=find_unused,
        bucket_cap_mb=cap,
    )
    train(
        model,
        world,
        counts[world.rank],
        accumulation=accumulation,
        by_hand=by_hand,
        divide_by_initial_world_size=initial_size,
    )
    check(world, model, trained_by_hand(make, counts, accumulation=accumulation, initial_size=initial_size)[0])


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.real_ranks
def test_uneven_batches_on_each_number_of_ranks(world):
    counts = COUNTS[world.size]
    model = wrapped(world, built(batch_norm))
    train(model, world, counts[world.rank])
    check(world, model, trained_by_hand(batch_norm, counts)[0])


@pytest.mark.ranks(2)
def test_again_and_without(world, model):
    """An epoch without batches, two with a context each, an even one outside, with averages over all ranks."""
    train(model, world, 0)
    check(world, model, built(mlp).state_dict())
    for count in (world.rank, 1 - world.rank):
        train(model, world, count, divide_by_initial_world_size=False)
    train(model, world, 1, enable=False)
    alone = copy.deepcopy(model.module)
    model.zero_grad()
    with logged(world) as log:
        own_loss(model, world.rank, 5).backward()
    assert [operation for operation, _ in log.calls] == ["all_reduce"] * (len(model.bucket_sizes) + 1)
    alone.zero_grad()
    for rank in range(world.size):
        (own_loss(alone, rank, 5) / world.size).backward()
    assert_close(gradients_of(model.module), gradients_of(alone))
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("initial_size", [True, False])
def test_an_optimizer_and_its_scheduler_stay_in_step(world, model, initial_size):
    """Two epochs with Adam: the second begins with the state of a rank that trained to the end of the first."""
    alone = built(mlp)
    ours, theirs = adamw(model), adamw(alone)
    our_rates, their_rates = (torch.optim.lr_scheduler.CosineAnnealingLR(own, 20) for own in (ours, theirs))
    for counts in (COUNTS[world.size], COUNTS[world.size][::-1]):
        with model.join(ours, our_rates, divide_by_initial_world_size=initial_size):
            for step in range(counts[world.rank]):
                ours.zero_grad()
                own_loss(model, world.rank, step).backward()
                ours.step()
                our_rates.step()
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if count > step]
            theirs.zero_grad()
            for rank in active:
                (own_loss(alone, rank, step) / (world.size if initial_size else len(active))).backward()
            theirs.step()
            their_rates.step()
        check(world, model, alone.state_dict())
    assert our_rates.state_dict() == their_rates.state_dict()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours.state[own], theirs.state[other])


def scheduled(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = plain(module)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


plain = optimizer_of("SGD", lr=0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "uneven", "refuses"),
    [(adamw, True, True), (scheduled, True, True), (plain, True, False), (adamw, False, False)],
)
def test_an_optimizer_that_was_not_given_refuses_to_go_on_out_of_step(world, model, make, uneven, refuses):
    optimizer = make(model)
    train(model, world, 2 - world.rank if uneven else 2, optimizer)
    if refuses:
        with pytest.raises(RuntimeError, match=r"different numbers of steps .*model.join\(optimizer, scheduler\)"):
            train(model, world, 1, optimizer, enable=False)
        optimizer.load_state_dict(ax.broadcast_object(optimizer.state_dict()))
    train(model, world, 2, optimizer, enable=False)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("given", [True, "optimizer"])
def test_what_has_no_state_is_refused(model, given):
    refused(TypeError, (lambda: model.join(given), r"join: expected optimizers, schedulers .* settings go by name"))


class FirstOfTwo(nn.Sequential):
    """Two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


@pytest.mark.ranks(2)
def test_what_no_rank_uses_has_no_gradient(world):
    model = wrapped(world, built(FirstOfTwo), find_unused_parameters=True)
    with model.join():
        for _ in range(2 - world.rank):
            model(torch.ones(1, 2)).sum().backward()
    assert model.module[1].weight.grad is None


@pytest.mark.ranks(3)
def test_unused_parameters_are_an_error_on_ranks_that_have_left_too(world):
    model = wrapped(world, built(FirstOfTwo))

    def train_on_rank_1() -> None:
        with model.join():
            for _ in range(int(world.rank == 1)):
                model(torch.ones(1, 2)).sum().backward()

    refused(UnusedParameterError, (train_on_rank_1, r"1.weight \(rank 1\)"))
    model.zero_grad()
    model.module[1].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(3)
@each_pair(strategy=list(GradSyncStrategy), make=[mlp, batch_norm])
def test_throwing_as_soon_as_one_has_left(world, strategy, make):
    model = wrapped(world, built(make), sync_strategy=strategy, bucket_cap_mb=TINY)
    message = r"ranks \[1\] ran out of batches while ranks \[0, 2\] were still training"
    with pytest.raises(RankFailedError, match=message):
        train(model, world, [2, 1, 2][world.rank], throw_on_early_termination=True)
    # afterwards all ranks train on, with the parameters of the one step they all made
    assert_same_on_all_ranks(world, dict(model.module.named_parameters()))
    train(model, world, 1, throw_on_early_termination=True)
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(2)
def test_an_exception_inside_is_not_held_up(world, model):
    def fail_within() -> None:
        with model.join():
            own_loss(model, 0, 0).backward()
            fail()

    refused(ArithmeticError, (fail_within, "in the middle"))
    with logged(world) as log:
        model.zero_grad()
        own_loss(model, world.rank, 1).backward()
    assert [size for _, size in log.calls if size == 8 * world.size] == []  # nobody asks who still trains
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(3)
def test_ranks_that_are_not_at_the_same_step(world):
    model = wrapped(world, built(mlp), sync_strategy=SYNCHRONOUS)

    def train_differently() -> None:
        with model.join():
            if world.rank == 0:
                own_loss(model, 0, 0).backward()
            elif world.rank == 2:
                model.sync_gradients()

    message = "the ranks that still train are not at the same step: rank 0: gradients, rank 2: by hand"
    refused(CollectiveMismatchError, (train_differently, message))


@pytest.mark.ranks(2)
def test_an_optimizer_stays_in_step_where_a_rank_has_made_steps_by_itself(world, model):
    optimizer = adamw(model)
    with model.join(optimizer):
        own_loss(model, world.rank, 0).backward()
        optimizer.step()
        for number in range(3 * world.rank):
            with model.no_sync():
                own_loss(model, world.rank, number).backward()
            optimizer.step()
    for parameter in model.parameters():
        assert_same_on_all_ranks(world, optimizer.state[parameter])
