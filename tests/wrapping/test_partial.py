"""What a rank has a part of, where it would be taken for the whole: norms, loss scaling and files."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.whole_models import built, randn
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.tensor import full_state_dict


class Whole(nn.Module):
    """A pair of layers, and a norm that is never divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(F.pad(x, (0, 2)))[..., :6])))


def divided(group: ax.ProcessGroup | None = None, seed: int = 0) -> nn.Module:
    return ax.tensor_parallelize(built(Whole, seed), {"up": "column", "down": "row"}, group)


def sharded(strategy: ax.ShardingStrategy = ax.ShardingStrategy.FULL_SHARD, **options: Any) -> ax.FSDP:
    return ax.FSDP(built(Whole), sharding_strategy=strategy, **options)


def data() -> Tensor:
    """The same on all ranks, so that averages over ranks change nothing."""
    return randn(4, 6)


def backward(model: nn.Module) -> None:
    (100 * model(data()).square().mean()).backward()


def sharded_and_divided(world: ax.World, strategy: ax.ShardingStrategy = ax.ShardingStrategy.FULL_SHARD) -> ax.FSDP:
    """FSDP along one axis around layers that are divided along the other."""
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2})
    return ax.FSDP(divided(mesh.group("tp")), mesh.group("dp"), sharding_strategy=strategy)


def replicated_and_divided(world: ax.World) -> ax.DDP:
    mesh = ax.DeviceMesh({"dp": world.size // 2, "tp": 2})
    return ax.DDP(divided(mesh.group("tp")), mesh.group("dp"))


MODELS = {
    "tensor": lambda world: divided(),
    "fsdp": lambda world: sharded(),
    "fsdp parameters": lambda world: sharded(shard_by="parameters"),
    "fsdp around tensor": sharded_and_divided,
    "none around tensor": lambda world: sharded_and_divided(world, ax.ShardingStrategy.NO_SHARD),
    "ddp around tensor": replicated_and_divided,
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def raised_by(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def everywhere_but_empty(world: ax.World, message: str, has: bool, expected: str) -> None:
    """Each rank that has a gradient raises; at least one has."""
    assert (expected in message) is has, message
    assert any(world.default_group.all_gather_object(has))


# ---- norms ------------------------------------------------------------------------------------------------------

NORMS = {
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, math.inf, foreach=True),
    "get_total_norm": lambda parameters: nn.utils.get_total_norm(
        [p.grad for p in parameters if p.grad is not None]
    ),
    "one by one": lambda parameters: [p.grad.detach().norm() for p in parameters if p.grad is not None],
    "of copies": lambda parameters: [torch.norm(p.grad.data.float()) for p in parameters if p.grad is not None],
}


@pytest.mark.ranks(2)
@models
def test_torchs_norms_of_parts_are_refused(world, make):
    model = make(world)
    backward(model)
    has = any(p.grad is not None for p in model.parameters())
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for norm in NORMS.values():
        message = raised_by(norm, list(model.parameters()))
        everywhere_but_empty(world, message, has, "axonmpi.clip_grad_norm(model, max_norm)")
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)


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
        torch.testing.assert_close(clip(model, 0.1, norm_type), expected)
        after = ax.clip_grad_norm(model, math.inf, norm_type)
        torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=0)


@pytest.mark.ranks(2, 4)
def test_the_norm_of_a_pipeline(world):
    """Of stages that on 4 ranks are divided."""
    mesh = ax.DeviceMesh({"pp": 2, "tp": world.size // 2})
    whole = nn.Sequential(built(Whole), built(Whole, 1))
    F.mse_loss(whole(data()), torch.zeros(4, 6)).backward()
    stages = [built(Whole, seed) if world.size == 2 else divided(mesh.group("tp"), seed) for seed in range(2)]
    pipe = ax.Pipeline.from_modules(stages, mesh.group("pp"), num_microbatches=2, loss_fn=F.mse_loss)
    pipe.train_step(data(), torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"pipeline.clip_grad_norm\(max_norm\)"):
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(pipe.clip_grad_norm(0.1), expected)


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
            for parameter in one.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 3
                    parameter.grad = parameter.grad + 0.5
                    parameter.grad.data.mul_(0.5)
                    parameter.grad = copy.deepcopy(parameter.grad)
            nn.utils.clip_grad_value_(one.parameters(), 0.7)
            optimizer.step()
        state = [value for s in optimizer.state.values() for value in s.values() if isinstance(value, Tensor)]
        assert {type(value) for value in state} == {Tensor}
    found = model.full_state_dict() if name == "fsdp" else full_state_dict(model)
    torch.testing.assert_close(dict(found), dict(whole.state_dict()), rtol=1e-4, atol=1e-5)
    gradients = world.default_group.all_gather_object([p.grad for p in model.parameters() if p.grad is not None])
    assert {type(gradient) for own in gradients for gradient in own} == {Tensor}
    part = next((p.grad for p in model.parameters() if p.grad is not None and p.grad.numel() > 1), None)
    if part is not None:
        assert part.as_subclass(Tensor).norm() > 0


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
        for parameter in model.parameters() if world.rank == 0 else ():
            if parameter.grad is not None and parameter.grad.numel():
                parameter.grad.view(-1)[0] = math.inf
                break
        scaler.step(optimizer)
        scaler.update()

    has = any(p.numel() for p in model.parameters())
    message = raised_by(scaled, torch.amp.GradScaler("cpu", init_scale=4.0))
    everywhere_but_empty(world, message, has, "axonmpi.ShardedGradScaler")
    scaler = ax.ShardedGradScaler(init_scale=4.0)
    scaled(scaler)
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# ---- files ------------------------------------------------------------------------------------------------------


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


def to_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, folder / "model.safetensors")


FILES = {
    "save": lambda folder, state: saved(state),
    "save copies": lambda folder, state: saved({name: value.half().cpu().clone() for name, value in state.items()}),
    "save deep copy": lambda folder, state: saved(copy.deepcopy(state)),
    "safetensors": to_safetensors,
}


@pytest.mark.ranks(2)
@models
def test_files_of_one_ranks_parts_are_refused(world, shared_tmp_path, make):
    model = make(world)
    inner = model.module if hasattr(model, "module") else model
    folder = shared_tmp_path / str(world.rank)
    folder.mkdir()
    for state in (model.state_dict(), inner.state_dict(), {**model.state_dict()}):
        for write in FILES.values():
            with pytest.raises(TypeError, match=r"a rank's part of a parameter.*fsdp.full_state_dict\(\)"):
                write(folder, state)


@pytest.mark.ranks(2)
@models
def test_files_of_one_ranks_optimizer_state_and_norms_after_a_step_are_refused(world, make):
    model = make(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved(optimizer.state_dict())  # nothing in it that is divided
    backward(model)
    optimizer.step()
    has = any(p.grad is not None for p in model.parameters())
    everywhere_but_empty(
        world, raised_by(saved, optimizer.state_dict()), has, "full_optimizer_state_dict(optimizer)"
    )
    after_step = raised_by(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    everywhere_but_empty(world, after_step, has, "axonmpi.clip_grad_norm(model, max_norm)")


@pytest.mark.ranks(2)
@models
def test_states_of_parts_go_back_to_where_they_are_from(world, make):
    """Copies in memory, a new optimizer, assignment, and a file of each rank's own."""
    model, expected = make(world), make(world)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, expected)]
    for one, optimizer in zip((model, expected), optimizers, strict=True):
        backward(one)
        optimizer.step()
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers[0].state_dict())
    assert kept[0].keys() == model.state_dict().keys()
    backward(model)
    optimizers[0].step()
    model.load_state_dict(kept[0])
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(kept[1])
    ordinary = {name: value.as_subclass(Tensor) for name, value in kept[0].items()}
    file = io.BytesIO()
    torch.save(ordinary, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    ax.barrier()
    for one, optimizer in ((model, again), (expected, optimizers[1])):
        optimizer.zero_grad()
        backward(one)
        optimizer.step()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach())
    state = [value for s in again.state.values() for value in s.values() if isinstance(value, Tensor)]
    assert {type(value) for value in state} <= {Tensor}


@pytest.mark.ranks(2)
def test_assigned_parameters_are_ordinary(world):
    model, other = divided(), divided()
    other.load_state_dict(model.state_dict(), assign=True)
    assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
    backward(other)
    assert raised_by(nn.utils.clip_grad_norm_, other.parameters(), 1.0)


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
    model = sharded_and_divided(world)
    state = model.full_state_dict()
    with pytest.raises(TypeError, match=r"axonmpi.tensor.full_state_dict\(model\)"):
        saved(state)
    whole = full_state_dict(model, state)
    saved(whole)
    torch.testing.assert_close(dict(whole), dict(built(Whole).state_dict()))


NEED_WHOLE_PARAMETERS = (
    torch.optim.Adafactor,
    lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
    torch.optim.LBFGS,
)


@pytest.mark.ranks(2)
def test_optimizers_of_whole_parameters_are_refused(world):
    model = divided()
    backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for make in NEED_WHOLE_PARAMETERS:
        with pytest.raises(ValueError, match="needs whole parameters, and layers of this model are divided"):
            make(model.parameters()).step(lambda: model(data()).sum())
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
