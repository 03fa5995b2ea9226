"""What a rank has a part of, where it would be taken for the whole: norms, loss scaling and files."""

import copy
import io
import math
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, gradients_of, refused
from helpers.models import Whole, built
from helpers.transformer_parts import floats
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.tensor import full_state_dict
from axonmpi.wrapping.optimizer_hooks import OF_ALL_PARAMETERS, OF_WHOLE_PARAMETERS


def divided(group: ax.ProcessGroup | None = None, seed: int = 0) -> nn.Module:
    return ax.tensor_parallelize(built(Whole, seed), {"up": "column", "down": "row"}, group)


def sharded(strategy: ax.ShardingStrategy = ax.ShardingStrategy.FULL_SHARD, **options: Any) -> ax.FSDP:
    return ax.FSDP(built(Whole), sharding_strategy=strategy, **options)


def data() -> Tensor:
    """The same on all ranks, so that averages over ranks change nothing."""
    return floats(4, 6)


def backward(model: nn.Module) -> None:
    (100 * model(data()).square().mean()).backward()


def around_divided(world: ax.World, wrapper: Any = ax.FSDP, **options: Any) -> nn.Module:
    """Wrap layers along one axis that are divided along the other."""
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2})
    return wrapper(divided(mesh.group("tp")), mesh.group("dp"), **options)


MODELS = {
    "tensor": lambda world: divided(),
    "fsdp": lambda world: sharded(),
    "fsdp parameters": lambda world: sharded(shard_by="parameters"),
    "fsdp around tensor": around_divided,
    "none around tensor": partial(around_divided, sharding_strategy=ax.ShardingStrategy.NO_SHARD),
    "ddp around tensor": partial(around_divided, wrapper=ax.DDP),
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def refused_where(has: bool, world: ax.World, message: str, function: Any, *args: Any) -> None:
    """Check that each rank that has a part of something is refused; at least one has."""
    with pytest.raises((TypeError, ValueError), match=message) if has else nullcontext():
        function(*args)
    assert any(world.default_group.all_gather_object(has))


CLIP = r"axonmpi.clip_grad_norm\(model, max_norm\)"


# ---- norms ------------------------------------------------------------------------------------------------------


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


NORMS = (
    lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, math.inf, foreach=True),
    lambda parameters: nn.utils.get_total_norm(gradients(parameters)),
    lambda parameters: [gradient.detach().norm() for gradient in gradients(parameters)],
    lambda parameters: [torch.norm(gradient.data.float()) for gradient in gradients(parameters)],
)


@pytest.mark.ranks(2)
@models
def test_torchs_norms_of_parts_are_refused(world, make):
    model = make(world)
    backward(model)
    before = gradients_of(model)
    for norm in NORMS:
        refused_where(any(g is not None for g in before.values()), world, CLIP, norm, list(model.parameters()))
    assert_equal({name: p.grad for name, p in model.named_parameters()}, before)


def sharded_and_replicated(world: ax.World) -> ax.FSDP:
    mesh = ax.DeviceMesh({"replica": world.size // 2, "shard": 2})
    strategy = ax.ShardingStrategy.HYBRID_SHARD
    return ax.FSDP(built(Whole), (mesh.group("shard"), mesh.group("replica")), sharding_strategy=strategy)


REPLICAS = (
    lambda world: ax.DDP(built(Whole)),
    lambda world: sharded(ax.ShardingStrategy.NO_SHARD),
    sharded_and_replicated,
)
WAYS = (
    ax.clip_grad_norm,
    lambda model, *limits: ax.clip_grad_norm(list(model.parameters()), *limits),
    lambda model, *limits: getattr(model, "clip_grad_norm", partial(ax.clip_grad_norm, model))(*limits),
)


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_the_norm_knows_what_is_divided(world):
    """With no more said than the model and the limit, as with torch's function for one process."""
    for number, make in enumerate((*MODELS.values(), *REPLICAS)):
        norm_type, clip = (2.0, math.inf)[(number + world.size // 2) % 2], WAYS[number % 3]
        whole, model = built(Whole), make(world)
        backward(whole)
        backward(model)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        norms = clip(model, 0.1, norm_type), ax.clip_grad_norm(model, math.inf, norm_type)
        assert_close(norms, (expected, torch.tensor(0.1)))


@pytest.mark.ranks(2, 4)
def test_the_norm_of_a_pipeline(world):
    """Of stages that on 4 ranks are divided."""
    mesh = ax.DeviceMesh({"pp": 2, "tp": world.size // 2})
    whole = nn.Sequential(built(Whole), built(Whole, 1))
    F.mse_loss(whole(data()), torch.zeros(4, 6)).backward()
    stages = [built(Whole, seed) if world.size == 2 else divided(mesh.group("tp"), seed) for seed in range(2)]
    pipe = ax.Pipeline.from_modules(stages, mesh.group("pp"), num_microbatches=2, loss_fn=F.mse_loss)
    pipe.train_step(data(), torch.zeros(4, 6))
    clip = nn.utils.clip_grad_norm_
    refused(ValueError, (lambda: clip(pipe.parameters(), 1.0), r"pipeline.clip_grad_norm\(max_norm\)"))
    assert_close(pipe.clip_grad_norm(0.1), clip(whole.parameters(), 0.1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tensor", "fsdp"])
def test_gradients_are_tensors_in_all_other_ways(world, name):
    """Changed by hand in every way, and stepped with, they give what ordinary gradients of one process give."""
    whole, model = built(Whole), MODELS[name](world)
    for one in (whole, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(one)
            backward(one)  # added up
            for parameter in (p for p in one.parameters() if p.grad is not None):
                parameter.grad *= 3
                parameter.grad = parameter.grad + 0.5
                parameter.grad.data.mul_(0.5)
                parameter.grad = copy.deepcopy(parameter.grad)
            nn.utils.clip_grad_value_(one.parameters(), 0.7)
            optimizer.step()
        assert tensor_types(optimizer) == {Tensor}
    found = model.full_state_dict() if name == "fsdp" else full_state_dict(model)
    assert_close(found, whole.state_dict(), 1e-4)
    own = gradients(model.parameters())
    everywhere = world.default_group.all_gather_object(own)
    assert {type(gradient) for of_rank in everywhere for gradient in of_rank} == {Tensor}
    assert all(part.as_subclass(Tensor).norm() > 0 for part in own if part.numel() > 1)


# ---- loss scaling -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in MODELS if "ddp" not in name])
def test_torchs_scaler_is_refused_and_ours_skips_on_all_ranks(world, name):
    """One element that is infinite lies on one rank."""
    model = MODELS[name](world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def scaled(scaler: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(model(data()).square().mean()).backward()
        if world.rank == 0:
            shard = next(g for g in gradients(model.parameters()) if g.numel())
            shard.as_subclass(Tensor).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()

    has, torchs = any(p.numel() for p in model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    refused_where(has, world, "axonmpi.ShardedGradScaler", scaled, torchs)
    scaler = ax.ShardedGradScaler(init_scale=4.0)
    scaled(scaler)
    assert scaler.get_scale() == 2.0
    assert_equal(list(model.parameters()), before)


# ---- files ------------------------------------------------------------------------------------------------------


def tensor_types(optimizer: torch.optim.Optimizer) -> set[type]:
    """Return the types of the tensors in an optimizer's state."""
    return {type(value) for s in optimizer.state.values() for value in s.values() if isinstance(value, Tensor)}


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


def to_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    pytest.importorskip("safetensors.torch").save_file(state, folder / "model.safetensors")


FILES = {
    "save": lambda folder, state: saved(state),
    "save copies": lambda folder, state: saved({name: value.half().cpu().clone() for name, value in state.items()}),
    "save deep copy": lambda folder, state: saved(copy.deepcopy(state)),
    "safetensors": to_safetensors,
}


@pytest.mark.ranks(2)
def test_a_gradient_that_a_user_assigns_is_a_shard(world):
    model = sharded()
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape)
    refused(ValueError, (lambda: nn.utils.clip_grad_norm_(parameters, 1.0), CLIP))
    refused(ValueError, (lambda: parameters[0].grad.norm(), CLIP))


@pytest.mark.ranks(2)
@models
def test_files_of_one_ranks_parts_are_refused(world, shared_tmp_path, make):
    model = make(world)
    inner, folder = getattr(model, "module", model), shared_tmp_path / str(world.rank)
    folder.mkdir()
    message = r"a rank's part of a parameter.*fsdp.full_state_dict\(\)"
    for state in (model.state_dict(), inner.state_dict(), {**model.state_dict()}):
        refused(TypeError, *((partial(write, folder, state), message) for write in FILES.values()))


@pytest.mark.ranks(2)
@models
def test_files_of_one_ranks_optimizer_state_and_norms_after_a_step_are_refused(world, make):
    model = make(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved(optimizer.state_dict())  # nothing in it that is divided
    backward(model)
    optimizer.step()
    has = any(p.grad is not None for p in model.parameters())
    refused_where(has, world, r"full_optimizer_state_dict\(optimizer\)", saved, optimizer.state_dict())
    refused_where(has, world, CLIP, nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)


@pytest.mark.ranks(2)
@models
def test_states_of_parts_go_back_to_where_they_are_from(world, make):
    """Copies in memory, a new optimizer, assignment, and a file of each rank's own."""
    model, expected = make(world), make(world)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, expected)]
    for one, optimizer in zip((model, expected), optimizers, strict=True):
        backward(one)
        optimizer.step()
    state, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers[0].state_dict())
    assert state.keys() == model.state_dict().keys()
    backward(model)
    optimizers[0].step()
    model.load_state_dict(state)
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(of_optimizer)
    file = io.BytesIO()
    torch.save({name: value.as_subclass(Tensor) for name, value in state.items()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    ax.barrier()
    for one, optimizer in ((model, again), (expected, optimizers[1])):
        optimizer.zero_grad()
        backward(one)
        optimizer.step()
    assert_close(list(model.parameters()), list(expected.parameters()))
    assert tensor_types(again) <= {Tensor}


@pytest.mark.ranks(2)
def test_assigned_parameters_are_ordinary(world):
    model, other = divided(), divided()
    other.load_state_dict(model.state_dict(), assign=True)
    assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
    backward(other)
    refused(ValueError, (lambda: nn.utils.clip_grad_norm_(other.parameters(), 1.0), CLIP))


@pytest.mark.ranks(1, 2)
def test_what_is_whole_may_be_saved(world):
    """On one rank, without sharding, and while parameters are gathered."""
    for strategy in ax.ShardingStrategy:
        model = sharded(strategy)
        if world.size == 1 or strategy is ax.ShardingStrategy.NO_SHARD:
            saved(model.state_dict())
            built(Whole).load_state_dict(model.state_dict())
        with model.full_parameters():
            saved(model.module.state_dict())
            built(Whole).load_state_dict(model.module.state_dict())
        saved(model.full_state_dict())


@pytest.mark.ranks(4)
def test_the_full_state_of_a_shard_is_a_part_of_the_divided_model(world):
    model = around_divided(world)
    state = model.full_state_dict()
    refused(TypeError, (partial(saved, state), r"axonmpi.tensor.full_state_dict\(model\)"))
    whole = full_state_dict(model, state)
    saved(whole)
    assert_close(whole, built(Whole).state_dict())


@pytest.mark.ranks(2)
def test_optimizers_of_whole_parameters_are_refused(world):
    model = divided()
    backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizers = (kind(matrices) for kind in OF_WHOLE_PARAMETERS + OF_ALL_PARAMETERS)
    message = "needs whole parameters, and layers of this model are divided"
    refused(ValueError, *((partial(own.step, lambda: model(data()).sum()), message) for own in optimizers))
    assert_equal(list(model.parameters()), before)
