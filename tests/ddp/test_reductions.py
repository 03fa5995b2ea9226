"""What is sent, when, in which order and dtype, and where gradients lie in memory."""

import math
import threading

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_alone, gradients_of
from helpers.limits import limit
from helpers.models import (
    AS_VIEW,
    DEFAULT,
    NO_SYNC,
    OVERLAPPED,
    SMALL,
    SYNCHRONOUS,
    TINY,
    Weights,
    batch_of,
    built,
    channels_last,
    joined_loss,
    mlp,
    own_data,
    own_loss,
    part_of,
    strided_weight,
    wrapped,
)
from helpers.operation_log import Log, logged
from helpers.placements import REAL
from helpers.steps import loss_of
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import DDP, GradSyncStrategy, MockBackend, ReduceOp

# ---- when and what ----------------------------------------------------------------------------------------------


class Watch(Log):
    """A log that lets another thread wait for a number of reductions to be complete."""

    def __init__(self) -> None:
        super().__init__()
        self._completed = threading.Semaphore(0)

    def leave(self, at: int) -> None:
        if self.calls[at][0] == "all_reduce":
            self._completed.release()

    def wait_until_left(self, count: int) -> bool:
        return all(self._completed.acquire(timeout=limit(30)) for _ in range(count))


@pytest.mark.ranks(2)
@pytest.mark.real_ranks
def test_reductions_are_complete_before_backward_ends(world):
    """A hook on the first layer, the last one in backward, waits for the reductions of all layers above."""
    model = wrapped(world, built(mlp), overlaps=True, bucket_cap_mb=TINY)
    own_loss(model, world).backward()
    seen = []
    with logged(world, Watch()) as watch:
        hidden = model.module[0].register_forward_hook(
            lambda layer, inputs, output: (
                output.register_hook(lambda gradient: seen.append(watch.wait_until_left(5))) and None
            )
        )
        own_loss(model, world).backward()
    hidden.remove()
    assert seen == [True]
    assert len(watch.calls) == 7 + 1  # seven gradients, of which the first layer's two came later


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, NO_SYNC])
def test_other_strategies_reduce_nothing_during_backward(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    inputs, targets = own_data(model, world)
    inputs.requires_grad_()
    during = []
    with logged(world) as log:
        inputs.register_hook(lambda gradient: during.append(len(log.calls)))
        loss_of(model(inputs), targets).backward()
        after = len(log.calls)
        model.sync_gradients()
    assert (model.sync_strategy, during) == (strategy, [0])
    buckets_and_status = len(model.bucket_sizes) + 1
    assert after == (buckets_and_status if strategy is SYNCHRONOUS else 0)
    assert len(log.calls) == 1 + buckets_and_status  # one asks whether there is something to reduce


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("cap", "count", "overlaps", "finds"),
    [(TINY, 7, True, False), (SMALL, 3, False, True), (SMALL, 3, True, True), (DEFAULT, 1, False, False)],
)
def test_one_reduction_a_bucket_and_one_status(world, cap, count, overlaps, finds):
    """Of five bytes, and one for each parameter if those that no rank uses are to be found."""
    model = wrapped(world, built(mlp), overlaps=overlaps, bucket_cap_mb=cap, find_unused_parameters=finds)
    flags = 5 + 7 * finds
    own_loss(model, world).backward()
    for step in range(2):
        with logged(world) as log:
            own_loss(model, world, step).backward()
        assert log.calls == [("all_reduce", 4 * size) for size in model.bucket_sizes] + [("all_reduce", flags)]
    numel = sum(p.numel() for p in model.parameters())
    assert (len(model.bucket_sizes), sum(model.bucket_sizes)) == (count, numel)


def in_order(weights: nn.ParameterList, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Use parameters in another order than the one in which they are registered."""
    return math.prod((weights[position].mean() for position in order), start=x)


def other_order() -> nn.Module:
    return Weights(in_order, (torch.ones(size) for size in (2, 4, 6, 8)))


@pytest.mark.ranks(2)
@AS_VIEW
def test_buckets_follow_the_order_of_gradients_on_rank_0(world, as_view):
    model = wrapped(world, other_order(), bucket_cap_mb=TINY, gradient_as_bucket_view=as_view)
    assert model.bucket_sizes == [8, 6, 4, 2]
    x = torch.tensor(1.0 + world.rank)
    model(x, (0, 2, 1, 3) if world.rank == 0 else (3, 2, 1, 0)).backward()
    assert model.bucket_sizes == [8, 4, 6, 2]
    model.zero_grad()
    model(x, (3, 2, 1, 0)).backward()  # any other order still works, and is not learned again
    assert model.bucket_sizes == [8, 4, 6, 2]
    mean = sum(1.0 + rank for rank in range(world.size)) / world.size
    expected = [torch.full_like(weight, mean / weight.numel()) for weight in model.parameters()]
    assert_close([weight.grad for weight in model.parameters()], expected)


@pytest.mark.ranks(2)
def test_nothing_is_learned_from_a_backward_that_one_rank_did_not_complete(world):
    model = wrapped(world, other_order(), bucket_cap_mb=TINY, find_unused_parameters=True)
    x = torch.tensor(1.0)
    model(x, (0, 1, 2, 3) if world.rank == 0 else (0, 1)).backward()
    assert model.bucket_sizes == [8, 6, 4, 2]
    model(x, (1, 0, 2, 3)).backward()
    assert model.bucket_sizes == [8, 6, 2, 4]


@pytest.mark.ranks(2)
def test_how_gradients_are_divided_among_buckets(world):
    """One dtype each, a large gradient by itself; the first is small, so that it is soon sent."""
    kinds = [(10, torch.float32), (5, torch.float64), (1000, torch.float32), (20, torch.float32)]
    module = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in kinds)
    assert wrapped(world, module, bucket_cap_mb=400 / (1 << 20)).bucket_sizes == [20, 1000, 5, 10]
    assert wrapped(world, module).bucket_sizes == [5, 1030]  # in the order of their last gradients
    module = nn.ParameterList(nn.Parameter(torch.ones(100_000)) for _ in range(12))
    assert wrapped(world, module).bucket_sizes == [200_000, 1_000_000]
    assert wrapped(world, module, sync_strategy=SYNCHRONOUS).bucket_sizes == [1_200_000]


@REAL
@pytest.mark.ranks(2)
@pytest.mark.real_ranks
def test_a_small_model_has_more_buckets_between_nodes(world, monkeypatch):
    """They are reduced beside backward there; the ranks believe that each is alone on its node."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    group = world.new_group([0, 1])
    module = nn.ParameterList(nn.Parameter(torch.ones(1 << 18)) for _ in range(24))
    assert DDP(module, group).bucket_sizes == [1 << 18, *[3 << 18] * 7, 2 << 18]
    assert DDP(module, group, bucket_cap_mb=2).bucket_sizes == [1 << 18, *[2 << 18] * 11, 1 << 18]
    assert DDP(module, group, sync_strategy=SYNCHRONOUS).bucket_sizes == [24 << 18]


# ---- in which dtype ---------------------------------------------------------------------------------------------


def loss_on_rank(model: nn.Module, world: ax.World, rank: int) -> Tensor:
    """Compute the loss of one rank's part of a batch, in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    inputs, targets = (tensor.to(dtype) for tensor in part_of(batch_of(model, 0), rank, world.size))
    return loss_of(model(inputs), targets)


def gradients_of_ranks(model: DDP, world: ax.World) -> dict[str, Tensor]:
    """Return, for each parameter, the gradients that the ranks have before the average, computed in one process."""
    each = [
        gradients_alone(model.module, lambda alone, r=r: loss_on_rank(alone, world, r)) for r in range(world.size)
    ]
    return {name: torch.stack([own[name].float() for own in each]) for name in each[0]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "as_view"), [(SYNCHRONOUS, False), (OVERLAPPED, True), (NO_SYNC, True)])
def test_gradients_travel_in_bfloat16(world, strategy, as_view):
    model = wrapped(
        world, built(mlp), sync_strategy=strategy, reduce_dtype=torch.bfloat16, gradient_as_bucket_view=as_view
    )
    with logged(world) as log:
        own_loss(model, world).backward()
        if strategy is NO_SYNC:
            model.sync_gradients()
    sent = [size for operation, size in log.calls if operation == "all_reduce" and size > 5]
    assert sent == [2 * size for size in model.bucket_sizes]
    backend = world.default_group.backend
    if isinstance(backend, MockBackend):
        sent = [call.dtype for call in backend.log if call.op is ReduceOp.AVERAGE]
        assert sent == [torch.bfloat16] * len(model.bucket_sizes)
    each, rounding = gradients_of_ranks(model, world), 2.0**-8  # of a bfloat16, which has eight significant bits
    for name, parameter in model.named_parameters():
        gradients = each[name]
        bound = 1.01 * rounding * (gradients.abs().mean(0) + gradients.mean(0).abs()) + 1e-6
        assert parameter.grad.dtype == torch.float32
        assert ((parameter.grad - gradients.mean(0)).abs() <= bound).all(), name
        assert (parameter.grad != gradients.mean(0)).any(), name
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reduce_dtype", "nbytes"), [(None, 2), (torch.float32, 4)])
def test_gradients_in_bfloat16_that_travel_in_it_or_in_a_wider_dtype(world, reduce_dtype, nbytes):
    model = wrapped(world, built(mlp).bfloat16(), reduce_dtype=reduce_dtype)
    with logged(world) as log:
        loss_on_rank(model, world, world.rank).backward()
    assert log.calls[0] == ("all_reduce", nbytes * model.bucket_sizes[0])
    expected = {name: gradients.mean(0) for name, gradients in gradients_of_ranks(model, world).items()}
    assert_close({name: g.float() for name, g in gradients_of(model.module).items()}, expected, tolerance=2**-7)
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_same_on_all_ranks(world, gradients_of(model.module))


@pytest.mark.ranks(2)
def test_complex_gradients_keep_their_imaginary_part(world):
    def product(weights: nn.ParameterList, x: Tensor) -> Tensor:
        return x * ((weights[0] * 1j).real.sum() + weights[1].sum())

    module = Weights(product, [torch.ones(3, dtype=torch.complex64), torch.ones(3)])
    model = wrapped(world, module, reduce_dtype=torch.bfloat16)
    model(torch.tensor(1.0 + world.rank)).backward()
    assert_close([weight.grad for weight in module.weights], [torch.full((3,), -1.5j), torch.full((3,), 1.5)])


# ---- memory -----------------------------------------------------------------------------------------------------


def storages(model: nn.Module) -> list[int]:
    return [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_gradients_are_views_of_their_bucket(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy, bucket_cap_mb=SMALL)
    for step in range(3):  # the second time in the buckets that were learned
        model.zero_grad(set_to_none=step != 2)
        own_loss(model, world, step).backward()
        model.sync_gradients()
        assert len(set(storages(model))) == len(model.bucket_sizes)
        in_buckets = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in model.parameters()}
        assert sum(map(len, in_buckets.values())) == sum(p.nbytes for p in model.parameters())
    before = storages(model)
    model.zero_grad(set_to_none=False)
    own_loss(model, world).backward()
    assert storages(model) == before


@pytest.mark.ranks(2)
@AS_VIEW
def test_gradients_have_the_strides_of_their_parameters(world, as_view):
    """In a bucket, or in memory of their own."""
    model = wrapped(world, built(channels_last), gradient_as_bucket_view=as_view)
    own_loss(model, world).backward()
    assert len(set(storages(model))) == (1 if as_view else len(list(model.parameters())))
    assert model.module[0].weight.stride() == (18, 1, 6, 2)
    assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]
    model = wrapped(world, built(strided_weight), gradient_as_bucket_view=as_view)
    own_loss(model, world).backward()
    assert [model.module[layer].weight.grad.stride() for layer in (0, 5)] == [(1, 16), (16, 1)]


@pytest.mark.ranks(2)
def test_a_gradient_that_the_user_replaced_is_averaged(world, model):
    own_loss(model, world).backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(world.rank))
    with model.no_sync():
        own_loss(model, world).backward()
    model.sync_gradients()
    expected = gradients_alone(model.module, joined_loss)
    assert_close(gradients_of(model.module), {name: gradient + 0.5 for name, gradient in expected.items()})
