"""Each kind of parallelism against the same model, trained by plain torch on the same device with all samples.

Tensor parallelism is checked by the trainer.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import split_module

from . import Check, Figures

WIDTH, BATCH, STEPS = 32, 16, 3
ROUNDING = {"rtol": 2e-4, "atol": 2e-5}
IN_BFLOAT16 = 0.1
"""How far training in bfloat16 may end from that in float32, as a part of the way that it has come."""


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


def small(module: nn.Module) -> nn.Module:
    """Give a module small values that are the same on all ranks, be they threads."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            numbers = torch.arange(parameter.numel()) + 100.0 * number
            parameter.copy_(numbers.mul(1.7).sin().mul(0.12).view_as(parameter))
    return module


def batches(place: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 8, generator=generator)
        yield inputs.to(place), inputs.sum(1, keepdim=True).sin().to(place)


def train(
    parameters: Iterator[nn.Parameter], place: torch.device, step: Callable[[Tensor, Tensor], object]
) -> None:
    """Train with gradients that `step` computes of each batch."""
    optimizer = torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)
    for inputs, targets in batches(place):
        optimizer.zero_grad()
        step(inputs, targets)
        optimizer.step()


def trained_alone(place: torch.device) -> dict[str, Tensor]:
    """Return the parameters that plain torch comes to, on the CPU."""
    model = network(place)

    def step(inputs: Tensor, targets: Tensor) -> None:
        F.mse_loss(model(inputs), targets).backward()

    train(model.parameters(), place, step)
    return on_cpu(model.state_dict())


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().cpu() for name, tensor in state.items()}


def backward_of_part(model: nn.Module, world: ax.World, inputs: Tensor, targets: Tensor) -> None:
    """Compute the gradients of this rank's part of a batch."""
    own, wanted = (whole.chunk(world.size)[world.rank] for whole in (inputs, targets))
    F.mse_loss(model(own).float(), wanted).backward()


# ---- data parallelism -------------------------------------------------------------------------------------------


def check_ddp(strategy: ax.GradSyncStrategy, world: ax.World, figures: Figures) -> None:
    model = ax.DDP(network(world.device), sync_strategy=strategy)

    def step(inputs: Tensor, targets: Tensor) -> None:
        backward_of_part(model, world, inputs, targets)
        if strategy is ax.GradSyncStrategy.NO_SYNC:
            model.sync_gradients()

    train(model.parameters(), world.device, step)
    assert {tensor.device for tensor in model.parameters()} == {world.device}
    torch.testing.assert_close(on_cpu(model.module.state_dict()), trained_alone(world.device), **ROUNDING)


def check_fsdp(strategy: ax.ShardingStrategy, offload: ax.CPUOffload, world: ax.World, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = ax.broadcast_object(folder)
        model = ax.FSDP(network(world.device), sharding_strategy=strategy, cpu_offload=offload, offload_folder=own)
        train(model.parameters(), world.device, partial(backward_of_part, model, world))
        output = model(next(batches(world.device))[0])
        assert output.device == world.device
        torch.testing.assert_close(on_cpu(model.full_state_dict()), trained_alone(world.device), **ROUNDING)
        ax.barrier()


def check_mixed_precision(world: ax.World, figures: Figures) -> None:
    model = ax.FSDP(network(world.device), mixed_precision=True)
    train(model.parameters(), world.device, partial(backward_of_part, model, world))
    states = model.full_state_dict(), trained_alone(world.device), network(world.device).state_dict()
    got, wanted, start = (nn.utils.parameters_to_vector(on_cpu(state).values()) for state in states)
    away = (got - wanted).norm() / (wanted - start).norm()
    assert 0 < away < IN_BFLOAT16
    figures["bfloat16 is away from float32 by this part of the way"] = away.item()


def check_clipping(world: ax.World, figures: Figures) -> None:
    """The norm of the whole gradient, of a model that is divided and of one that is not."""
    inputs, targets = next(batches(world.device))
    alone = network(world.device)
    F.mse_loss(alone(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    for wrapper in (ax.DDP, ax.FSDP):
        model = wrapper(network(world.device))
        backward_of_part(model, world, inputs, targets)
        torch.testing.assert_close(float(ax.clip_grad_norm(model, 0.1)), float(norm), rtol=1e-4, atol=1e-6)


# ---- pipelines --------------------------------------------------------------------------------------------------


def check_pipeline(schedule: ax.PipelineSchedule, world: ax.World, figures: Figures) -> None:
    chunks = 2 if schedule in (ax.PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, ax.PipelineSchedule.ZERO_BUBBLE) else 1
    model = network(world.device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pipeline = ax.Pipeline.from_modules(
        split_module(model, chunks * world.size), schedule=schedule, num_microbatches=8, loss_fn=F.mse_loss
    )
    train(pipeline.parameters(), world.device, pipeline.train_step)
    wanted = trained_alone(world.device)
    own = {names[id(parameter)]: parameter for parameter in pipeline.parameters()}
    assert own
    torch.testing.assert_close(on_cpu(own), {name: wanted[name] for name in own}, **ROUNDING)


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
    *(Check(f"pipeline/{each.value}", partial(check_pipeline, each)) for each in ax.PipelineSchedule),
]
