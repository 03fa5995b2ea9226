"""One small model in every layout of ranks, which train it on the same batches from the same values.

The model has of everything that a checkpoint has to tell apart: an embedding whose rows do not divide by the ranks,
a packed weight, a parameter without dims, a frozen one, a buffer, and if asked for a tied one. In one process with
plain torch it is `whole_model()`, `optimizer_for()` and `train_alone()`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import split_module
from axonmpi.tensor import tensor_parallelize
from helpers.models import built, part_of

LAYOUTS = (
    *("ddp", "fsdp", "fsdp_grad", "hybrid", "offload", "tp", "pp"),
    *("dp_tp", "fsdp_tp", "pp_dp", "pp_fsdp", "pp_tp"),
)
WORDS, WIDTH, HIDDEN, BLOCKS, SAMPLES, LENGTH = 13, 6, 8, 4, 8, 3
PLAN = {"embedding": "vocab", "block*.gate_up": "column:2", "block*.down": "row", "head": "vocab"}

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A gated perceptron beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(WIDTH) / 4)
        self.register_buffer("not_saved", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x) + self.shift).chunk(2, -1)
        return x + self.scale * self.down(F.silu(gate) * up)


class Words(nn.Sequential):
    """Words in, words out, in pieces that a pipeline can have one by one."""

    config: dict[str, Any]


def whole_model(*, tied: bool = False, seed: int = 0) -> Words:
    """Build the whole model with plain torch; the same values for the same seed."""

    def make() -> Words:
        pieces: dict[str, nn.Module] = {"embedding": nn.Embedding(WORDS, WIDTH)}
        pieces |= {f"block{number}": Block() for number in range(BLOCKS)}
        pieces |= {"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, WORDS, bias=False)}
        model = Words(collections.OrderedDict(pieces))
        model.block1.norm.bias.requires_grad_(False)
        if tied:
            model.head.weight = model.embedding.weight
        return model

    model = built(make, seed)
    model.config = {"model_type": "words", "words": WORDS, "tied": tied}
    return model


def optimizer_for(parameters: Iterable[nn.Parameter], kind: str = "adamw") -> torch.optim.Optimizer:
    """Make an optimizer with two groups, one of which decays."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "adamw_fused": lambda: torch.optim.AdamW(groups, lr=1e-2, fused=True, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=1e-2),
    }
    return makers[kind]()


def batch_of(number: int) -> Batch:
    """Make a global batch: words [SAMPLES, LENGTH], and the words that are to be predicted."""
    drawn = torch.randint(0, WORDS, (2, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + number))
    return drawn[0], drawn[1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> list[float]:
    """Train in one process with plain torch, and return the losses."""
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        inputs, targets = batch_of(number)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- layouts ----------------------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """The model in a layout.

    Attributes:
        model: What a checkpoint is saved from and loaded into.
        optimizer: On this rank's parameters.
        step: Trains on the global batch of a number and returns its loss, on all ranks; collective.
        mesh: The ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]
    mesh: ax.DeviceMesh


def laid_out(
    layout: str, world: ax.World, *, optimizer: str = "adamw", tied: bool = False, seed: int = 0, **options: Any
) -> Laid:
    """Build the model in a layout over all ranks of a world; collective.

    Args:
        layout: One of `LAYOUTS`; those of two axes have one rank along the first of them where there are two.
        world: Of 1, 2 or 4 ranks.
        optimizer: Which, see `optimizer_for`.
        tied: The embedding is the last layer's weight, too.
        seed: Of the values.
        options: More arguments for FSDP.
    """
    mesh = ax.DeviceMesh(_shape(layout, world.size), world)
    model = whole_model(tied=tied, seed=seed)
    if "tp" in mesh.axes:
        tensor_parallelize(model, PLAN, mesh.group("tp"))
    in_stages = "pp" in mesh.axes
    made = _pipeline(layout, mesh, model, tied, options) if in_stages else _wrapped(layout, mesh, model, options)
    chosen = optimizer_for(made.parameters(), optimizer)

    def step(number: int) -> float:
        chosen.zero_grad()
        inputs, targets = _own_part(batch_of(number), mesh)
        if isinstance(made, ax.Pipeline):
            loss = made.train_step(inputs, targets)
            group = made.process_group
            value: float = group.broadcast_object(None if loss is None else loss.item(), group.size - 1)
        else:
            computed = loss_of(made(inputs), targets)
            computed.backward()
            value = computed.item()
        chosen.step()
        return sum(world.default_group.all_gather_object(value)) / world.size

    return Laid(made, chosen, step, mesh)


def _shape(layout: str, size: int) -> dict[str, int]:
    if layout == "hybrid":
        outer = min(2, size)
        return {"replica": outer, "shard": size // outer}
    axes = {"ddp": ["dp"], "fsdp": ["dp"], "fsdp_grad": ["dp"], "offload": ["dp"]}.get(layout, layout.split("_"))
    axes = ["dp" if axis == "fsdp" else axis for axis in axes]
    if len(axes) == 1:
        return {axes[0]: size}
    most = min(2, size)
    many, few = (axes[0], axes[1]) if axes[0] == "pp" else (axes[1], axes[0])
    sizes = {many: most, few: size // most}
    return {axis: sizes[axis] for axis in axes}


def _own_part(batch: Batch, mesh: ax.DeviceMesh) -> Batch:
    """Return this rank's part of a global batch, which axes of other names do not divide."""
    axes = [axis for axis in ("replica", "shard", "dp") if axis in mesh.axes]
    return part_of(batch, mesh.rank(*axes), mesh.size(*axes)) if axes else batch


def _wrapped(layout: str, mesh: ax.DeviceMesh, model: nn.Module, options: dict[str, Any]) -> nn.Module:
    if layout == "hybrid":
        groups = mesh.group("shard"), mesh.group("replica")
        return ax.FSDP(model, groups, sharding_strategy="hybrid", **options)
    if "dp" not in mesh.axes:
        return model
    group = mesh.group("dp")
    if layout in ("ddp", "dp_tp", "pp_dp"):
        return ax.DDP(model, group)
    strategy = "grad" if layout == "fsdp_grad" else "full"
    offload = "full" if layout == "offload" else "none"
    return ax.FSDP(model, group, **{"sharding_strategy": strategy, "cpu_offload": offload, **options})


def _pipeline(layout: str, mesh: ax.DeviceMesh, model: Words, tied: bool, options: dict[str, Any]) -> ax.Pipeline:
    group = mesh.group("pp")
    ties = [[(0, "embedding.weight"), (group.size - 1, "head.weight")]] if tied and group.size > 1 else []
    if ties and layout == "pp_fsdp":  # sharding a stage frees the memory of its parameters
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    stages: list[nn.Module | None] = [None] * group.size
    stage = split_module(model, group.size)[group.rank]
    if ties and layout == "pp_fsdp":
        options = {"units": [name for name in ("embedding", "head") if hasattr(stage, name)] or None, **options}
    stages[group.rank] = _wrapped(layout, mesh, stage, options)
    return ax.Pipeline.from_modules(stages, group, ties=ties, num_microbatches=2, loss_fn=loss_of)
