"""Each kind of parallelism against the same model, trained by plain torch on the same device with all samples."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from helpers.networks import filled
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import split_module

from .check import Check, Figures

WIDTH, VOCABULARY, BATCH, STEPS = 32, 52, 16, 3
ROUNDING = {"rtol": 2e-4, "atol": 2e-5}
IN_BFLOAT16 = 0.1
"""How far training in bfloat16 may end from that in float32, as a part of the way that it has come."""


Made = TypeVar("Made", bound=nn.Module)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network(place: torch.device) -> nn.Sequential:
    """Make the model, the same on all ranks; eight parts, so that it can be cut into as many stages."""
    return small(nn.Sequential(nn.Linear(8, WIDTH), *[Block() for _ in range(6)], nn.Linear(WIDTH, 1))).to(place)


def small(module: Made) -> Made:
    """Give a module small values that are the same on all ranks, be they threads."""
    with torch.no_grad():
        for parameter in filled(module).parameters():
            parameter.mul_(0.3)
    return module


def batches(place: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 8, generator=generator)
        yield inputs.to(place), inputs.sum(1, keepdim=True).sin().to(place)


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def trained_alone(place: torch.device) -> dict[str, Tensor]:
    """Return the parameters that plain torch comes to, on the CPU."""
    model = network(place)
    optimizer = optimizer_of(model.parameters())
    for inputs, targets in batches(place):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return on_cpu(model.state_dict())


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().cpu() for name, tensor in state.items()}


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name], msg=lambda text, name=name: f"{name}: {text}", **ROUNDING)


def train_part(model: nn.Module, world: ax.World, after_backward: Callable[[], object] = lambda: None) -> None:
    """Train with this rank's part of each batch."""
    optimizer = optimizer_of(model.parameters())
    for inputs, targets in batches(world.device):
        own, wanted = (whole.chunk(world.size)[world.rank] for whole in (inputs, targets))
        optimizer.zero_grad()
        F.mse_loss(model(own).float(), wanted).backward()
        after_backward()
        optimizer.step()


# ---- data parallelism -------------------------------------------------------------------------------------------


def check_ddp(strategy: ax.GradSyncStrategy, world: ax.World, figures: Figures) -> None:
    model = ax.DDP(network(world.device), sync_strategy=strategy)
    by_hand = strategy is ax.GradSyncStrategy.NO_SYNC
    train_part(model, world, model.sync_gradients if by_hand else lambda: None)
    assert {tensor.device for tensor in model.parameters()} == {world.device}
    assert_near(on_cpu(model.module.state_dict()), trained_alone(world.device))


def check_fsdp(strategy: ax.ShardingStrategy, offload: ax.CPUOffload, world: ax.World, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = ax.broadcast_object(folder)
        model = ax.FSDP(network(world.device), sharding_strategy=strategy, cpu_offload=offload, offload_folder=own)
        train_part(model, world)
        output = model(next(batches(world.device))[0])
        assert output.device == world.device
        assert_near(on_cpu(model.full_state_dict()), trained_alone(world.device))
        ax.barrier()


def check_mixed_precision(world: ax.World, figures: Figures) -> None:
    model = ax.FSDP(network(world.device), mixed_precision=True)
    train_part(model, world)
    got, wanted = flat(on_cpu(model.full_state_dict())), flat(trained_alone(world.device))
    way = wanted - flat(on_cpu(network(world.device).state_dict()))
    away = (got - wanted).norm() / way.norm()
    assert 0 < away < IN_BFLOAT16
    figures["bfloat16 is away from float32 by this part of the way"] = away.item()


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


def check_clipping(world: ax.World, figures: Figures) -> None:
    """The norm of the whole gradient, of a model that is divided and of one that is not."""
    inputs, targets = next(batches(world.device))
    own, wanted = (whole.chunk(world.size)[world.rank] for whole in (inputs, targets))
    alone = network(world.device)
    F.mse_loss(alone(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    for wrapper in (ax.DDP, ax.FSDP):
        model = wrapper(network(world.device))
        F.mse_loss(model(own), wanted).backward()
        torch.testing.assert_close(float(ax.clip_grad_norm(model, 0.1)), float(norm), rtol=1e-4, atol=1e-6)


# ---- tensor parallelism -----------------------------------------------------------------------------------------


class WordModel(nn.Module):
    """An embedding, a perceptron and a head, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


def divided(whole: WordModel) -> WordModel:
    """Return a model of this rank's parts of the layers."""
    model = copy.deepcopy(whole)
    model.embedding = ax.VocabParallelEmbedding.from_embedding(whole.embedding)
    model.up = ax.ColumnParallelLinear.from_linear(whole.up)
    model.down = ax.RowParallelLinear.from_linear(whole.down)
    model.head = ax.ColumnParallelLinear.from_linear(whole.head)
    return model


def check_tensor(world: ax.World, figures: Figures) -> None:
    whole = small(WordModel()).to(world.device)
    parts = divided(whole)
    tokens = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(2)).to(world.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    optimizers = [optimizer_of(model.parameters()) for model in (whole, parts)]
    for _ in range(STEPS):
        expected = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
        loss = ax.parallel_cross_entropy(parts(inputs), targets)
        torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-4, atol=1e-5)
        for optimizer, each in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    for name in ("up", "down", "head"):
        gathered, wanted = getattr(parts, name).full_weight(), getattr(whole, name).weight
        torch.testing.assert_close(gathered.cpu(), wanted.detach().cpu(), **ROUNDING)


def check_attention(world: ax.World, figures: Figures) -> None:
    """A divided attention on this device and on the CPU: the device must not matter."""
    layer = ax.tensor_parallel_attention(WIDTH, num_heads=4, rotary=True)
    if world.size == 1:
        small(layer)
    inputs = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(3))
    here = copy.deepcopy(layer).to(world.device)
    if world.size == 1:
        torch.testing.assert_close(here(inputs.to(world.device)).cpu(), layer(inputs), rtol=1e-3, atol=1e-4)
    output = here(inputs.to(world.device))
    first = output.detach().clone()
    world.default_group.broadcast(first)
    torch.testing.assert_close(output, first, **ROUNDING)
    output.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in here.parameters())


# ---- pipelines --------------------------------------------------------------------------------------------------


def check_pipeline(schedule: ax.PipelineSchedule, world: ax.World, figures: Figures) -> None:
    chunks = 2 if schedule in (ax.PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, ax.PipelineSchedule.ZERO_BUBBLE) else 1
    model = network(world.device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pipeline = ax.Pipeline.from_modules(
        split_module(model, chunks * world.size), schedule=schedule, num_microbatches=8, loss_fn=F.mse_loss
    )
    optimizer = optimizer_of(pipeline.parameters())
    for inputs, targets in batches(world.device):
        optimizer.zero_grad()
        pipeline.train_step(inputs, targets)
        optimizer.step()
    wanted = trained_alone(world.device)
    own = {names[id(parameter)]: parameter for parameter in pipeline.parameters()}
    assert own
    assert_near(on_cpu(own), {name: wanted[name] for name in own})


CHECKS = [
    *(Check(f"data parallel/{each.value}", partial(check_ddp, each)) for each in ax.GradSyncStrategy),
    *(
        Check(f"fully sharded/{strategy.name.lower()}, offload {offload.name.lower()}", partial(check_fsdp, *pair))
        for strategy in ax.ShardingStrategy
        for offload in ax.CPUOffload
        for pair in [(strategy, offload)]
    ),
    Check("fully sharded/bfloat16", check_mixed_precision),
    Check("gradient norm", check_clipping),
    Check("tensor parallel/layers", check_tensor),
    Check("tensor parallel/attention", check_attention),
    *(Check(f"pipeline/{each.value}", partial(check_pipeline, each)) for each in ax.PipelineSchedule),
]
