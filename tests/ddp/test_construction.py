"""What wrapping a model checks, copies and leaves behind."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from helpers.compare import assert_close, gradients_alone, gradients_of, refused
from helpers.models import (
    AS_VIEW,
    batch_norm,
    batch_of,
    built,
    check_averaged,
    check_backward,
    joined_loss,
    mlp,
    own_loss,
    part_of,
    wrapped,
)
from helpers.operation_log import logged
from helpers.steps import loss_of
from torch import nn

import axonmpi as ax
from axonmpi import GradSyncStrategy

# ---- the same model everywhere ----------------------------------------------------------------------------------


def layer(**changes: object) -> nn.Module:
    """Make a layer, some of whose parameters and buffers are others."""
    module = nn.Linear(2, 2)
    for name, value in changes.items():
        if isinstance(value, nn.Parameter):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return module


def pair(tied: bool) -> nn.Module:
    first = nn.Linear(2, 2)
    return nn.Sequential(first, layer(weight=first.weight) if tied else layer())


WEIGHT = "parameter 'weight' float32 [2, 2]"
DIFFERENCES = {
    "shape": (layer, lambda: nn.Linear(3, 2), WEIGHT, "parameter 'weight' float32 [2, 3]"),
    "dtype": (layer, lambda: nn.Linear(2, 2).double(), WEIGHT, "parameter 'weight' float64 [2, 2]"),
    "name": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        lambda: nn.ModuleDict({"one": nn.Linear(2, 2)}),
        "parameter '0.weight' float32",
        "parameter 'one.weight' float32",
    ),
    "number": (
        layer,
        lambda: nn.Linear(2, 2, bias=False),
        "parameter 'bias' float32 [2]",
        "no further parameter or buffer",
    ),
    "frozen": (layer, lambda: layer().requires_grad_(False), WEIGHT, "parameter 'weight' float32 [2, 2], frozen"),
    "tied": (
        lambda: pair(False),
        lambda: pair(True),
        "parameter '1.weight' float32 [2, 2]",
        "parameter '1.bias' float32 [2]",
    ),
    "strides": (
        layer,
        lambda: layer(weight=nn.Parameter(torch.ones(2, 2).t())),
        WEIGHT,
        "parameter 'weight' float32 [2, 2], strides [1, 2]",
    ),
    "buffer": (
        lambda: layer(table=torch.zeros(3)),
        lambda: layer(table=torch.zeros(3, dtype=torch.int64)),
        "buffer 'table' float32 [3]",
        "buffer 'table' int64 [3]",
    ),
    "uninitialised": (layer, lambda: nn.LazyLinear(2), WEIGHT, "parameter 'weight' float32 without a shape yet"),
}


@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_models_that_differ_are_refused_on_every_rank(world, kind):
    usual, other, text_of_usual, text_of_other = DIFFERENCES[kind]
    with pytest.raises(ValueError, match="the model is not the same on all ranks") as error:
        ax.DistributedDataParallel((other if world.rank == 1 else usual)())
    text = str(error.value)
    assert (f"ranks 0, 2: {text_of_usual}" in text, f"rank 1: {text_of_other}" in text) == (True, True), text
    assert ax.all_gather_object(text) == [text] * world.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ({}, {"bucket_cap_mb": 1}),
        ({}, {"sync_strategy": GradSyncStrategy.NO_SYNC}),
        ({}, {"reduce_dtype": torch.bfloat16}),
        ({"find_unused_parameters": True}, {}),
        ({}, {"broadcast_buffers": False}),
    ],
)
def test_arguments_that_differ_are_refused_on_every_rank(world, usual, other):
    name = next(iter({**usual, **other}))
    with pytest.raises(ValueError, match=rf"rank 0: argument '{name}' .*\n  rank 1: argument '{name}' "):
        ax.DistributedDataParallel(nn.Linear(2, 2), **(usual if world.rank == 0 else other))


@pytest.mark.ranks(3)
def test_values_become_those_of_rank_0(world):
    module = built(batch_norm, seed=world.rank)
    module.norm.running_var.fill_(world.rank)
    model = ax.DistributedDataParallel(module)
    expected = built(batch_norm, seed=0)
    expected.norm.running_var.fill_(0)
    assert_close(module.state_dict(), expected.state_dict(), tolerance=0)
    if world.rank == 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.fill_(5)
    model.sync_parameters()
    assert_close(module.state_dict(), expected.state_dict(), tolerance=0)


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (TypeError, "module: expected a torch.nn.Module, got list", {"module": []}),
        (TypeError, "process_group: expected an axonmpi.ProcessGroup or None, got int", {"process_group": 0}),
        (ValueError, "sync_strategy: expected an axonmpi.GradSyncStrategy, .* got 'no'", {"sync_strategy": "no"}),
        (TypeError, "bucket_cap_mb: expected a number, got '25'", {"bucket_cap_mb": "25"}),
        (TypeError, "bucket_cap_mb: expected a number, got True", {"bucket_cap_mb": True}),
        (ValueError, "bucket_cap_mb: expected a positive, finite number of MiB, got 0", {"bucket_cap_mb": 0}),
        (ValueError, "bucket_cap_mb: expected a positive, finite", {"bucket_cap_mb": math.inf}),
        (ValueError, "bucket_cap_mb: expected a positive, finite", {"bucket_cap_mb": math.nan}),
        (TypeError, "gradient_as_bucket_view: expected True or False, got 1", {"gradient_as_bucket_view": 1}),
        (TypeError, "reduce_dtype: expected a torch.dtype or None, got 'bfloat16'", {"reduce_dtype": "bfloat16"}),
        (TypeError, "reduce_dtype: expected torch.bfloat16, .* got torch.int8", {"reduce_dtype": torch.int8}),
        (ValueError, "reduce_dtype: expected .* got torch.complex64", {"reduce_dtype": torch.complex64}),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(world, kind, message, options):
    with logged(world) as log, pytest.raises(kind, match=message):
        ax.DistributedDataParallel(**{"module": nn.Linear(2, 2), **options})
    assert log.calls == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "frozen"])
def test_nothing_to_train(world, module):
    with pytest.raises(ValueError, match="no parameter of it requires grad, so there is nothing to average"):
        ax.DistributedDataParallel(module)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_has_to_be_run_first(world):
    module = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="parameter 'weight' has no shape yet: run one forward before wrapping"):
        ax.DistributedDataParallel(module)
    with torch.random.fork_rng(devices=[]):
        module(torch.zeros(1, 5))
    check_backward(world, wrapped(world, module))


@pytest.mark.ranks(2)
def test_a_group_that_this_rank_is_not_in(world):
    group, message = world.new_group([0]), r"rank 1 is not in this group of ranks \[0\]"
    if world.rank == 1:
        refused(ValueError, (lambda: ax.DDP(nn.Linear(2, 2), group), message))


@pytest.mark.ranks(2)
def test_a_module_cannot_be_wrapped_twice_at_once(world):
    model = ax.DDP(nn.Linear(2, 2))
    inner = nn.Sequential(nn.ModuleDict({"inner": model}))
    refused(
        ValueError,
        (lambda: ax.DDP(model), "module: it is wrapped in DistributedDataParallel already"),
        (lambda: ax.DDP(inner), "module: 0.inner is wrapped in DistributedDataParallel already"),
    )


# ---- attributes, copies, life -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_dropped_wrapper_leaves_nothing_behind(world):
    module = built(mlp)
    model = wrapped(world, module)
    own_loss(model, world).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    module.zero_grad()
    with logged(world) as log:
        own_loss(module, world).backward()
    assert log.calls == []


@pytest.mark.ranks(2)
def test_a_module_can_be_wrapped_again(world):
    module = built(mlp)
    for _ in range(3):
        model = wrapped(world, module)
        module.zero_grad()
    with logged(world) as log:
        own_loss(model, world).backward()
    reductions = [call for call in log.calls if call[0] != "symmetric_empty"]
    assert len(reductions) == len(model.bucket_sizes) + 1 + 1  # and once to learn the order
    check_averaged(world, model)


@pytest.mark.ranks(2)
def test_a_deep_copy_trains_by_itself(world, model):
    own_loss(model, world).backward()
    twin = copy.deepcopy(model)
    assert twin.process_group is model.process_group
    assert twin.module[0].weight is not model.module[0].weight
    before = gradients_of(model.module)
    check_backward(world, twin)
    assert_close(gradients_of(model.module), before, tolerance=0)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert averaged.module is not model


@pytest.mark.ranks(1)
def test_pickling_says_what_to_do_instead(world):
    model = ax.DDP(nn.Linear(2, 2))
    refused(TypeError, (lambda: pickle.dumps(model), r"cannot be pickled, .* save its .state_dict"))
    assert isinstance(pickle.loads(pickle.dumps(model.module)), nn.Linear)


# ---- a model that changes ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@AS_VIEW
def test_freezing_and_unfreezing(world, as_view):
    model = wrapped(world, built(mlp), gradient_as_bucket_view=as_view, bucket_cap_mb=1e-4)
    for frozen in ([0], [0, 3], [], [5], [0, 1, 3, 5], []):
        for position, layer in enumerate(model.module):
            layer.requires_grad_(position not in frozen)
        model.zero_grad()
        if frozen == [0, 1, 3, 5]:
            assert not model(batch_of(model, 0)[0]).requires_grad
            continue
        own_loss(model, world).backward()
        check_averaged(world, model)
        assert sum(model.bucket_sizes) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.ranks(2)
def test_accumulated_gradients_are_kept_when_others_are_frozen(world, model):
    with model.no_sync():
        own_loss(model, world).backward()
    model.module[5].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'5.(weight|bias)' was frozen while its gradient was not averaged"):
        own_loss(model, world).backward()
    model.module[5].zero_grad()
    expected = gradients_alone(model.module, lambda alone: 2 * joined_loss(alone))
    with model.no_sync():
        loss = own_loss(model, world)
        with logged(world) as log:
            loss.backward()
    assert log.calls == []
    model.sync_gradients()
    assert_close(gradients_of(model.module), expected)


@pytest.mark.ranks(2)
def test_conversion_to_another_dtype(world, model):
    own_loss(model, world).backward()
    model.double()
    model.zero_grad()
    inputs, targets = (tensor.double() for tensor in batch_of(model, 0))
    mine, wanted = part_of((inputs, targets), world.rank, world.size)
    loss_of(model(mine), wanted).backward()
    check_averaged(world, model, lambda alone: loss_of(alone(inputs), targets), tolerance=1e-12)
