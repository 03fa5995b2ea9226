"""DistributedDataParallel under what else torch does with a model and its backward."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers.models import (
    AFTER,
    AS_VIEW,
    AUTOMATIC,
    BESIDE,
    IN_ORDER,
    NO_SYNC,
    OVERLAPPED,
    SMALL,
    SYNCHRONOUS,
    TINY,
    BatchNormalised,
    Checkpointed,
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_norm_alone,
    batch_of,
    built,
    check_averaged,
    gradients_alone,
    gradients_of,
    joined_loss,
    large,
    logged,
    loss_of,
    mlp,
    own_loss,
    part_of,
    sgd,
    wrapped,
)
from helpers.settings import each_pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import GradSyncStrategy
from axonmpi.errors import RankFailedError

# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "make"), [(SYNCHRONOUS, mlp), (OVERLAPPED, large)])
def test_autocast(world, strategy, make):
    def loss(module: nn.Module, rank: int) -> Tensor:
        inputs, targets = part_of(batch_of(module, 0), rank, world.size)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(module(inputs), targets)

    model = wrapped(world, built(make), sync_strategy=strategy)
    loss(model, world.rank).backward()
    check_averaged(world, model, lambda alone: sum(loss(alone, rank) for rank in range(world.size)) / world.size)


@pytest.mark.ranks(2)
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


# ---- torch.compile ----------------------------------------------------------------------------------------------


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


@pytest.mark.ranks(2)
def test_compiled_inside(world):
    model = wrapped(world, compiled(built(mlp)), sync_strategy=SYNCHRONOUS)
    for step in range(2):
        model.zero_grad()
        own_loss(model, world, step).backward()
        expected = gradients_alone(built(mlp), lambda alone, step=step: joined_loss(alone, step))
        gradients = gradients_of(model)
        assert_close({name.removeprefix("_orig_mod."): value for name, value in gradients.items()}, expected)


@pytest.mark.ranks(2)
def test_compiled_outside(world):
    model = wrapped(world, built(BatchNormalised))
    program = compiled(model)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        own_loss(program, world, step).backward()
        optimizer.step()
    parameters, buffers = batch_norm_alone(world.size, steps=2)
    assert_close({name: value.detach() for name, value in model.named_parameters()}, parameters)
    assert_close(dict(model.named_buffers()), buffers[world.rank])


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # asked for by the compiler
def test_compiled_training_step(world):
    model = wrapped(world, built(mlp), bucket_cap_mb=SMALL)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss_of(model(inputs), targets).backward()
        model.sync_gradients()

    program = compiled(step)
    for number in range(2):
        model.zero_grad()
        program(*part_of(batch_of(model, number), world.rank, world.size))
        check_averaged(world, model, lambda alone, number=number: joined_loss(alone, number))


# ---- checkpointing ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("reentrant", "shared", "way", "find_unused"),
    [
        (True, False, AFTER, False),
        (True, False, BESIDE, True),
        (True, True, AFTER, True),
        (True, True, IN_ORDER, False),
        (False, False, IN_ORDER, True),
        (False, True, AFTER, False),
        (False, True, BESIDE, False),
    ],
)
def test_checkpointing(world, reentrant, shared, way, find_unused):
    model = wrapped(
        world,
        built(lambda: Checkpointed(reentrant, shared)),
        **way,
        bucket_cap_mb=TINY,
        find_unused_parameters=find_unused,
    )
    for step in range(2):
        model.zero_grad()
        with logged(world) as log:
            own_loss(model, world, step).backward()
        check_averaged(world, model, lambda alone, step=step: joined_loss(alone, step))
    assert len(log.calls) == len(model.bucket_sizes) + 1


@pytest.mark.ranks(2)
@pytest.mark.not_over_double("its mistake is one of order as well")
def test_shared_parameters_under_reentrant_checkpointing_cannot_be_sent_early(world):
    model = wrapped(world, built(lambda: Checkpointed(True, True)), overlaps=True, bucket_cap_mb=TINY)
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
    check_averaged(world, model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_wrapped_model_is_itself_checkpointed(world, reentrant):
    model = wrapped(world, built(mlp))
    inputs, targets = part_of(batch_of(model, 0), world.rank, world.size)
    output = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
    loss_of(output, targets).backward()
    check_averaged(world, model)


# ---- other ways to run backward ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "make", "norm"),
    [
        (SYNCHRONOUS, mlp, ""),
        (OVERLAPPED, mlp, ""),
        (OVERLAPPED, BatchNormalised, "evaluates"),
        (SYNCHRONOUS, BatchNormalised, "is frozen"),
        (OVERLAPPED, BatchNormalised, "trains"),
    ],
)
def test_several_forwards_before_one_backward(world, strategy, make, norm):
    """Also of a batch norm, whose buffers are broadcast in between."""
    model = wrapped(world, built(make), sync_strategy=strategy)
    model.train(norm != "evaluates")
    if norm == "is frozen":
        model.module.norm.eval()
    with logged(world) as log:
        (own_loss(model, world, 0) + 2 * own_loss(model, world, 1)).backward()
    assert sum(operation == "all_reduce" for operation, _ in log.calls) == len(model.bucket_sizes) + 1
    if norm == "trains":  # with statistics of each rank's part
        assert_same_on_all_ranks(world, gradients_of(model.module))
    else:
        check_averaged(world, model, lambda alone: joined_loss(alone) + 2 * joined_loss(alone, 1))


@pytest.mark.ranks(2)
@AUTOMATIC
def test_two_backwards_through_one_graph(world, strategy):
    model = wrapped(world, built(mlp), sync_strategy=strategy)
    loss = own_loss(model, world)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    check_averaged(world, model, lambda alone: 4 * joined_loss(alone))


@pytest.mark.ranks(2)
@each_pair(
    of=["inputs", "parameters", "first"],
    strategy=[SYNCHRONOUS, OVERLAPPED],
    find_unused=[True, False],
    make=[mlp, large],
)
def test_autograd_grad_disturbs_nothing(world, of, strategy, find_unused, make):
    model = wrapped(world, built(make), sync_strategy=strategy, find_unused_parameters=find_unused)
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
    check_averaged(world, model, lambda alone: 2 * joined_loss(alone))


def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
    """Sum of a loss and of the squares of the gradient with respect to the inputs."""
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    return output.square().mean() + gradient.square().sum() / len(inputs)


@pytest.mark.ranks(2)
@each_pair(strategy=[SYNCHRONOUS, OVERLAPPED], as_view=[True, False], make=[mlp, large])
def test_gradient_penalty(world, strategy, as_view, make):
    model = wrapped(
        world,
        built(make),
        sync_strategy=strategy,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=True,  # the last bias has no part in the penalty, but in the loss
    )
    inputs, _ = batch_of(model, 0)
    for _ in range(2):
        model.zero_grad()
        penalised(model, inputs.chunk(world.size)[world.rank]).backward()
        check_averaged(world, model, lambda alone: penalised(alone, inputs))


@pytest.mark.ranks(2)
@AS_VIEW
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_backward_that_creates_a_graph(world, as_view):
    model = wrapped(world, built(mlp), gradient_as_bucket_view=as_view)
    for _ in range(2):
        own_loss(model, world).backward(create_graph=True)
    check_averaged(world, model, lambda alone: 2 * joined_loss(alone))
    for parameter in model.parameters():  # the graph holds itself alive through them
        parameter.grad = None


@pytest.mark.ranks(2)
@AUTOMATIC
def test_two_wrapped_models_in_one_backward(world, strategy):
    first = wrapped(world, built(mlp, 1), sync_strategy=strategy, bucket_cap_mb=TINY)
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
        self.first, self.inner = nn.Linear(5, 5), mlp()

    def forward(self, x: Tensor, *, scale: float) -> Result:
        logits = checkpoint(self.inner, self.first(x), use_reentrant=True)
        return Result(logits.detach(), {"both": [logits * scale, torch.ones(1)]})


@pytest.mark.ranks(2)
def test_outputs_of_any_structure_and_keyword_arguments(world):
    model = wrapped(world, built(Structured), bucket_cap_mb=TINY)
    inputs, targets = part_of(batch_of(model, 0), world.rank, world.size)
    with logged(world) as log:
        result = model(inputs, scale=2.0)
        loss_of(result.hidden["both"][0], targets).backward()
    assert result.note == "as it is"
    assert len([1 for operation, _ in log.calls if operation == "all_reduce"]) == len(model.bucket_sizes) + 1
    full, wanted = batch_of(model, 0)
    check_averaged(world, model, lambda alone: loss_of(alone(full, scale=2.0).hidden["both"][0], wanted))


@pytest.mark.ranks(2)
def test_a_sparse_gradient_is_refused(world):
    model = wrapped(world, built(lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))))
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse, .* sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("AXONMPI_DEBUG", "1")


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("wrap", [ax.DDP, ax.FSDP])
def test_nan_in_the_gradient_of_a_rank_is_told_with_its_number(world, wrap):
    model = wrap(built(lambda: nn.Sequential(nn.Linear(3, 2))))
    x = torch.ones(2, 3)
    if world.rank == 1:
        x[0, 1] = float("nan")
        message = r"rank 1: the gradient of '0.weight' has 2 values that are nan on this rank, of 6"
        with pytest.warns(RuntimeWarning, match=message):
            model(x).sum().backward()
    else:
        model(x).sum().backward()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # used by torch itself
def test_transforms_of_functions(world):
    model = wrapped(world, built(mlp))
    inputs, _ = batch_of(model, 0)
    direction, _ = batch_of(model, 1)
    _, slope = torch.func.jvp(model, (inputs,), (direction,))
    torch.testing.assert_close(slope, torch.func.jvp(model.module, (inputs,), (direction,))[1])
    torch.testing.assert_close(torch.func.vmap(model)(inputs), model.module(inputs))
    found = torch.func.grad(lambda values: torch.func.functional_call(model, values, (inputs,)).square().mean())(
        dict(model.named_parameters())
    )
    assert_close(found, gradients_alone(model.module, lambda alone: alone(inputs).square().mean()))


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "next_step"),
    [
        (SYNCHRONOUS, "forward"),
        (OVERLAPPED, "forward"),
        (NO_SYNC, "forward"),
        (SYNCHRONOUS, "by hand"),
        (OVERLAPPED, "by hand"),
    ],
)
def test_an_exception_in_backward_on_all_ranks(world, strategy, next_step):
    model = wrapped(world, built(MayFail), sync_strategy=strategy, bucket_cap_mb=TINY)
    for _ in range(2):
        model.module.fails = True
        with pytest.raises(ArithmeticError, match="in the middle"):
            own_loss(model, world).backward()
        model.module.fails = False
        if next_step == "by hand":
            model.sync_gradients()
        model.zero_grad()
        own_loss(model, world).backward()
        model.sync_gradients()
        check_averaged(world, model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("strategy", "find_unused"),
    [(SYNCHRONOUS, False), pytest.param(OVERLAPPED, True, marks=pytest.mark.real_ranks)],
)
def test_an_exception_in_backward_on_one_rank_is_told_to_the_others(world, strategy, find_unused):
    """The rank that caught its exception and goes on must not be taken for one that is a step behind."""
    model = wrapped(
        world, built(MayFail), sync_strategy=strategy, bucket_cap_mb=TINY, find_unused_parameters=find_unused
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
        check_averaged(world, model, lambda alone, step=step: joined_loss(alone, step))
