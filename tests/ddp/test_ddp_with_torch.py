"""DistributedDataParallel under what else torch does with a model and its backward."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable

import pytest
import torch
from models import (
    BatchNormalised,
    Words,
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    built,
    gradients_alone,
    gradients_of,
    logged,
    loss_of,
    mlp,
    part_of,
    train,
    trained_alone,
    wrapped,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import GradSyncStrategy
from axonmpi.errors import RankFailedError

SYNCHRONOUS, OVERLAPPED, NO_SYNC = GradSyncStrategy
AUTOMATIC = pytest.mark.parametrize("strategy", [SYNCHRONOUS, OVERLAPPED])


def own_loss(model: nn.Module, world: ax.World, step: int = 0) -> Tensor:
    inputs, targets = part_of(batch_of(model, step), world.rank, world.size)
    return loss_of(model(inputs), targets)


def joined_loss(step: int = 0) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        inputs, targets = batch_of(model, step)
        return loss_of(model(inputs), targets)

    return loss


def check_gradients(model: ax.DDP, expected: dict[str, Tensor | None]) -> None:
    assert_close(gradients_of(model.module), expected)


# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@AUTOMATIC
def test_autocast(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    with torch.autocast("cpu", torch.bfloat16):
        loss = own_loss(model, world)
    loss.backward()
    local = copy.deepcopy(model.module)
    with torch.autocast("cpu", torch.bfloat16):
        loss = own_loss(local, world)
    local.zero_grad()
    loss.backward()
    for parameter in local.parameters():
        ax.all_reduce_mean(parameter.grad)
    check_gradients(model, gradients_of(local))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_gradient_scaler_skips_a_step_on_all_ranks_together(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(4):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss = own_loss(model, world, step)
        if step == 1 and world.rank == world.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        model.sync_gradients()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert changed == (step != 1)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    assert_same_on_all_ranks(world, model.state_dict())


@pytest.mark.ranks(2)
def test_training_in_bfloat16(world):
    model = wrapped(world, built(mlp).bfloat16())
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = part_of(batch_of(model, step), world.rank, world.size)
        loss_of(model(inputs.bfloat16()), targets.bfloat16()).backward()
        optimizer.step()
    assert_same_on_all_ranks(world, model.state_dict())


# ---- torch.compile ----------------------------------------------------------------------------------------------


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


@pytest.mark.ranks(1, 2)
@AUTOMATIC
def test_compiled_inside(world, strategy):
    model = wrapped(world, compiled(built(mlp)), sync_strategy=strategy, bucket_cap_mb=0.001)
    train(model, world, steps=5)
    names = [name.removeprefix("_orig_mod.") for name in model.state_dict()]
    expected = trained_alone(mlp, 1, 5)
    assert_close(dict(zip(names, model.state_dict().values(), strict=True)), expected)


@pytest.mark.ranks(1, 2)
@AUTOMATIC
def test_compiled_outside(world, strategy):
    model = wrapped(world, built(BatchNormalised), sync_strategy=strategy)
    plain = wrapped(world, built(BatchNormalised))
    program = compiled(model)
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        own_loss(program, world, step).backward()
        optimizer.step()
    train(plain, world, steps=4)
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # asked for by the compiler
def test_compiled_training_step(world):
    model = wrapped(world, built(mlp), bucket_cap_mb=0.001)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss_of(model(inputs), targets).backward()
        model.sync_gradients()

    program = compiled(step)
    for number in range(3):
        model.zero_grad()
        program(*part_of(batch_of(model, number), world.rank, world.size))
        check_gradients(model, gradients_alone(model.module, joined_loss(number)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.rank_timeout(240)
def test_compiled_by_inductor(world):
    model = wrapped(world, built(mlp))
    program = torch.compile(model)
    optimizer = adamw(model)
    for step in range(5):
        optimizer.zero_grad()
        own_loss(program, world, step).backward()
        optimizer.step()
    assert_close(model.state_dict(), trained_alone(mlp, 1, 5))


# ---- checkpointing ----------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        if shared:
            self.blocks[2] = self.blocks[0]
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.ranks(2, 3)
@AUTOMATIC
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_checkpointing(world, reentrant, strategy, find_unused):
    model = wrapped(
        world,
        built(lambda: Checkpointed(reentrant, False)),
        sync_strategy=strategy,
        bucket_cap_mb=1e-6,
        find_unused_parameters=find_unused,
    )
    for step in range(3):
        model.zero_grad()
        with logged(world) as log:
            own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))
    assert len(log.calls) == len(model.bucket_sizes) + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("reentrant", "strategy", "overlaps"),
    [(True, SYNCHRONOUS, True), (True, OVERLAPPED, False), (False, OVERLAPPED, True), (False, SYNCHRONOUS, True)],
)
def test_checkpointed_parts_that_share_parameters(world, reentrant, strategy, overlaps):
    model = wrapped(
        world,
        built(lambda: Checkpointed(reentrant, True)),
        overlaps=overlaps,
        sync_strategy=strategy,
        bucket_cap_mb=1e-6,
    )
    for step in range(3):
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))


@pytest.mark.ranks(2)
def test_shared_parameters_under_reentrant_checkpointing_cannot_be_sent_early(world):
    backend = world.default_group.backend
    overlaps, backend.overlaps = backend.overlaps, True  # also where ranks have no core to spare for it
    model = wrapped(world, built(lambda: Checkpointed(True, True)), bucket_cap_mb=1e-6)
    model.module.blocks[1].requires_grad_(False)
    for _ in range(2):
        loss = own_loss(model, world)
        with pytest.raises(
            ValueError, match=r"blocks.0.0.(weight|bias)' got a second gradient .*use_reentrant=False"
        ):
            loss.backward()
    model.module.reentrant = False
    model.zero_grad()
    own_loss(model, world).backward()
    backend.overlaps = overlaps
    check_gradients(model, gradients_alone(model.module, joined_loss()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_wrapped_model_is_itself_checkpointed(world, reentrant):
    model = wrapped(world, built(mlp))
    inputs, targets = part_of(batch_of(model, 0), world.rank, world.size)
    output = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
    loss_of(output, targets).backward()
    check_gradients(model, gradients_alone(model.module, joined_loss()))


# ---- other ways to run backward ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@AUTOMATIC
def test_clipping_uses_the_norm_of_the_average(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    alone = copy.deepcopy(model.module)
    for _ in range(2):
        own_loss(model, world).backward()
        joined_loss()(alone).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        check_gradients(model, gradients_of(alone))


@pytest.mark.ranks(2, 3)
@AUTOMATIC
@pytest.mark.parametrize("make", [mlp, BatchNormalised])
def test_several_forwards_before_one_backward(world, strategy, make):
    model = wrapped(world, built(make), sync_strategy=strategy)
    model.eval() if make is BatchNormalised else model.train()
    with logged(world) as log:
        (own_loss(model, world, 0) + 2 * own_loss(model, world, 1)).backward()
    assert sum(operation == "all_reduce" for operation, _ in log.calls) == len(model.bucket_sizes) + 1
    check_gradients(
        model, gradients_alone(model.module, lambda alone: joined_loss(0)(alone) + 2 * joined_loss(1)(alone))
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen_norm", [True, False])
def test_several_forwards_with_buffers_that_are_broadcast(world, frozen_norm):
    model = wrapped(world, built(BatchNormalised))
    model.module.norm.train(not frozen_norm)
    loss = own_loss(model, world, 0) + own_loss(model, world, 1)
    loss.backward()
    assert_same_on_all_ranks(world, gradients_of(model.module))
    if frozen_norm:
        expected = gradients_alone(model.module, lambda alone: joined_loss(0)(alone) + joined_loss(1)(alone))
        check_gradients(model, expected)


@pytest.mark.ranks(2)
@AUTOMATIC
def test_two_backwards_through_one_graph(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    loss = own_loss(model, world)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    expected = gradients_alone(model.module, lambda alone: 4 * joined_loss()(alone))
    check_gradients(model, expected)


@pytest.mark.ranks(2)
@AUTOMATIC
@pytest.mark.parametrize("find_unused", [True, False])
@pytest.mark.parametrize("of", ["inputs", "parameters", "first"])
def test_autograd_grad_disturbs_nothing(world, strategy, of, find_unused):
    model = wrapped(world, built(mlp), sync_strategy=strategy, find_unused_parameters=find_unused)
    inputs, targets = part_of(batch_of(model, 0), world.rank, world.size)
    inputs.requires_grad_()
    wanted = {
        "inputs": [inputs],
        "parameters": list(model.parameters()),
        "first": [model.module[0].weight],
    }[of]
    with model.no_sync():
        loss_of(model(inputs), targets).backward()
    before = gradients_of(model.module)
    if world.rank == 0:  # the other rank need not take part
        with logged(world) as log:
            torch.autograd.grad(loss_of(model(inputs), targets), wanted)
        assert log.calls == []
        assert_close(gradients_of(model.module), before, tolerance=0)
    own_loss(model, world).backward()
    expected = gradients_alone(model.module, lambda alone: 2 * joined_loss()(alone))
    check_gradients(model, expected)


def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
    """Sum of a loss and of the squares of the gradient with respect to the inputs."""
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    return output.square().mean() + gradient.square().sum() / len(inputs)


@pytest.mark.ranks(2)
@AUTOMATIC
@pytest.mark.parametrize("as_view", [True, False])
def test_gradient_penalty(world, strategy, as_view):
    model = wrapped(
        world,
        built(mlp),
        sync_strategy=strategy,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=True,  # the last bias has no part in the penalty, but in the loss
    )
    inputs, _ = batch_of(model, 0)
    for _ in range(2):
        model.zero_grad()
        penalised(model, inputs.chunk(world.size)[world.rank]).backward()
        check_gradients(model, gradients_alone(model.module, lambda alone: penalised(alone, inputs)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_backward_that_creates_a_graph(world, as_view):
    model = wrapped(world, built(mlp), gradient_as_bucket_view=as_view)
    for _ in range(2):
        own_loss(model, world).backward(create_graph=True)
    check_gradients(model, gradients_alone(model.module, lambda alone: 2 * joined_loss()(alone)))
    for parameter in model.parameters():  # the graph holds itself alive through them
        parameter.grad = None


@pytest.mark.ranks(2)
@AUTOMATIC
def test_two_wrapped_models_in_one_backward(world, strategy):
    first = wrapped(world, built(mlp, 1), sync_strategy=strategy, bucket_cap_mb=1e-6)
    second = wrapped(world, built(lambda: nn.Linear(3, 3), 2), sync_strategy=strategy)
    inputs, targets = batch_of(first, 0)
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        mine, wanted = part_of((inputs, targets), world.rank, world.size)
        loss_of(second(first(mine)), wanted).backward()
        both = nn.Sequential(first.module, second.module)
        expected = gradients_alone(both, lambda alone: loss_of(alone(inputs), targets))
        assert_close(gradients_of(both), expected)


@dataclasses.dataclass(slots=True)
class Result:
    logits: Tensor
    hidden: dict[str, list[Tensor]]
    note: str = "as it is"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = built(mlp)

    def forward(self, x: Tensor, *, scale: float) -> Result:
        logits = checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)
        return Result(logits, {"both": [logits * scale, torch.ones(1)]})


@pytest.mark.ranks(2)
def test_outputs_of_any_structure_and_keyword_arguments(world):
    model = wrapped(world, Structured(), bucket_cap_mb=1e-6)
    inputs, targets = part_of(batch_of(model, 0), world.rank, world.size)
    with logged(world) as log:
        result = model(inputs, scale=2.0)
        loss_of(result.hidden["both"][0], targets).backward()
    assert result.note == "as it is"
    assert len([1 for operation, _ in log.calls if operation == "all_reduce"]) == len(model.bucket_sizes) + 1
    full, wanted = batch_of(model, 0)
    check_gradients(
        model, gradients_alone(model.module, lambda alone: loss_of(alone(full, scale=2.0).logits * 2.0, wanted))
    )


@pytest.mark.ranks(2)
def test_a_sparse_gradient_is_refused(world):
    model = wrapped(world, built(lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))))
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse, .* sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.ranks(3)
def test_cross_entropy_over_tied_words_with_every_option_at_once(world):
    model = wrapped(
        world,
        built(Words),
        find_unused_parameters=True,
        gradient_as_bucket_view=False,
        reduce_dtype=torch.float64,
        bucket_cap_mb=1e-6,
    )
    train(model, world, accumulation=2, set_to_none=False)
    assert_close(model.state_dict(), trained_alone(Words, 2))


# ---- exceptions -------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("in the middle of backward")
        return gradient, None


class MayFail(nn.Module):
    """Backward reaches the last layer, and then fails or goes on to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Fails.apply(self.first(x), self.fails))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", GradSyncStrategy)
@pytest.mark.parametrize("next_step", ["forward", "by hand"])
def test_an_exception_in_backward_on_all_ranks(world, strategy, next_step):
    model = wrapped(world, built(MayFail), sync_strategy=strategy, bucket_cap_mb=1e-6)
    for _ in range(2):
        model.module.fails = True
        with pytest.raises(ArithmeticError, match="in the middle"):
            own_loss(model, world).backward()
        model.module.fails = False
        if next_step == "by hand" and strategy is not NO_SYNC:
            model.sync_gradients()
        model.zero_grad()
        own_loss(model, world).backward()
        model.sync_gradients()
        check_gradients(model, gradients_alone(model.module, joined_loss()))


@pytest.mark.ranks(2, 3)
@AUTOMATIC
@pytest.mark.parametrize("find_unused", [True, False])
def test_an_exception_in_backward_on_one_rank_is_told_to_the_others(world, strategy, find_unused):
    """The rank that caught its exception and goes on must not be taken for one that is a step behind."""
    model = wrapped(
        world, built(MayFail), sync_strategy=strategy, bucket_cap_mb=1e-6, find_unused_parameters=find_unused
    )
    for step in range(2):
        model.module.fails = world.rank == 1
        loss = own_loss(model, world, step)
        if world.rank == 1:
            with pytest.raises(ArithmeticError, match="in the middle"):
                loss.backward()
        else:
            with pytest.raises(
                RankFailedError, match="backward ended in an exception on rank 1, which then went on"
            ):
                loss.backward()
        model.module.fails = False
        model.zero_grad()
        own_loss(model, world, step).backward()
        check_gradients(model, gradients_alone(model.module, joined_loss(step)))
