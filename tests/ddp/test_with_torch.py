"""DistributedDataParallel under what else torch does with a model and its backward."""

import contextlib
import copy

import pytest
import torch
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_alone, gradients_of, refused
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
    WAYS,
    Checkpointed,
    MayFail,
    batch_norm,
    batch_of,
    built,
    check_averaged,
    check_backward,
    equals_alone,
    joined_loss,
    large,
    mlp,
    own_data,
    own_loss,
    part_of,
    wrapped,
)
from helpers.operation_log import logged
from helpers.settings import each_pair
from helpers.steps import (
    accumulates_averages,
    adamw,
    asks_for_gradients_of_inputs,
    checkpoints_the_model,
    evaluates_between_steps,
    forwards_and_backwards_later,
    forwards_before_one_backward,
    goes_backward_twice,
    loss_of,
    penalised,
)
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import GradSyncStrategy
from axonmpi.errors import RankFailedError

# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "make"), [(SYNCHRONOUS, mlp), (OVERLAPPED, large)])
def test_autocast(world, strategy, make):
    @torch.autocast("cpu", torch.bfloat16)
    def loss(module: nn.Module, rank: int) -> Tensor:
        inputs, targets = part_of(batch_of(module, 0), rank, world.size)
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
        factor = torch.inf if step == 1 and world.rank == world.size - 1 else 1.0
        scaler.scale(factor * own_loss(model, world, step)).backward()
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


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
@pytest.mark.parametrize("compiled", ["module", "wrapper", "step"])
def test_compile(world, compiled):
    def own(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        loss_of(model(inputs), targets).backward()
        model.sync_gradients()

    module = built(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    backward = torch.compile(own, backend="eager") if compiled == "step" else own
    if compiled == "module":  # compiles the backward, too
        module.compile(backend="aot_eager")
    model = wrapped(world, module, bucket_cap_mb=SMALL)
    if compiled == "wrapper":
        model.compile(backend="eager")
    for step in range(2):
        model.zero_grad()
        backward(model, *own_data(model, world, step))
        check_averaged(world, model, lambda alone, step=step: joined_loss(alone, step))


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
    model.module[2].requires_grad_(False)
    for _ in range(2):
        loss = own_loss(model, world)
        refused(ValueError, (loss.backward, r"1.0.(weight|bias)' got a second gradient .*use_reentrant=False"))
    model.module.reentrant = False
    check_backward(world, model)


# ---- other ways to run backward ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@each_pair(
    step=[
        *(forwards_before_one_backward, forwards_and_backwards_later, accumulates_averages, goes_backward_twice),
        *(evaluates_between_steps, asks_for_gradients_of_inputs, penalised, checkpoints_the_model),
    ],
    way=WAYS,
    as_view=[True, False],
    make=[mlp, large],
)
def test_each_step_equals_one_process(world, step, way, as_view, make):
    """What has no part in a gradient penalty is an unused parameter of its backward."""
    options = {"gradient_as_bucket_view": as_view, "find_unused_parameters": step is penalised, **way}
    equals_alone(world, make, step, wrapper=ax.DDP, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm", ["evaluates", "is frozen", "trains"])
def test_a_batch_norm_in_several_forwards_before_one_backward(world, norm):
    """Its buffers are broadcast in between; where it trains its statistics are those of each rank's part."""
    model = wrapped(world, built(batch_norm))
    model.train(norm != "evaluates")
    model.module.norm.train(norm == "trains")
    with logged(world) as log:
        (own_loss(model, world, 0) + 2 * own_loss(model, world, 1)).backward()
    assert sum(operation == "all_reduce" for operation, _ in log.calls) == len(model.bucket_sizes) + 1
    if norm == "trains":
        assert_same_on_all_ranks(world, gradients_of(model.module))
    else:
        check_averaged(world, model, lambda alone: joined_loss(alone) + 2 * joined_loss(alone, 1))


@pytest.mark.ranks(2)
@each_pair(
    of=["inputs", "parameters", "first"],
    strategy=[SYNCHRONOUS, OVERLAPPED],
    find_unused=[True, False],
    make=[mlp, large],
)
def test_autograd_grad_disturbs_nothing(world, of, strategy, find_unused, make):
    model = wrapped(world, built(make), sync_strategy=strategy, find_unused_parameters=find_unused)
    inputs, targets = own_data(model, world)
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
        both = nn.Sequential(first.module, second.module)
        both.zero_grad()
        mine, wanted = part_of((inputs, targets), world.rank, world.size)
        loss_of(second(first(mine)), wanted).backward()
        assert_close(gradients_of(both), gradients_alone(both, lambda alone: loss_of(alone(inputs), targets)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ax.DDP, ax.FSDP])
def test_a_sparse_gradient_is_refused(world, wrap):
    model = wrap(built(lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))))
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
    x[0, 1] = float("nan") if world.rank == 1 else 1.0
    message = r"rank 1: the gradient of '0.weight' has 2 values that are nan on this rank, of 6"
    with pytest.warns(RuntimeWarning, match=message) if world.rank == 1 else contextlib.nullcontext():
        model(x).sum().backward()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # used by torch itself
def test_transforms_of_functions(model):
    inputs, direction = (batch_of(model, index)[0] for index in range(2))
    found, expected = (torch.func.jvp(each, (inputs,), (direction,)) for each in (model, model.module))
    assert_close((*found, torch.func.vmap(model)(inputs)), (*expected, model.module(inputs)))
    found = torch.func.grad(lambda values: torch.func.functional_call(model, values, (inputs,)).square().mean())(
        dict(model.named_parameters())
    )
    assert_close(found, gradients_alone(model.module, lambda alone: alone(inputs).square().mean()))


# ---- exceptions -------------------------------------------------------------------------------------------------


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
        model.module.fails = "backward"
        refused(ArithmeticError, (lambda: own_loss(model, world).backward(), "in the middle"))
        model.module.fails = ""
        if next_step == "by hand":
            model.sync_gradients()
        check_backward(world, model)


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
        model.module.fails = "backward" if world.rank == 1 else ""
        kind, message = RankFailedError, "backward ended in an exception on rank 1, which then went on"
        if world.rank == 1:
            kind, message = ArithmeticError, "in the middle"
        refused(kind, (own_loss(model, world, step).backward, message))
        model.module.fails = ""
        check_backward(world, model, step)
