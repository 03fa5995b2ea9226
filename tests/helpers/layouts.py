"""One small model in every layout of ranks, which train it on the same batches from the same values.

The model has of everything that a checkpoint has to tell apart: an embedding whose rows do not divide by the ranks,
a packed weight, a parameter without dims, a frozen one, a buffer, and if asked for a tied one. In one process with
plain torch it is `whole_model()`, `optimizer_for()` and `train_alone()`.
"""

import collections
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import split_module
from axonmpi.tensor import tensor_parallelize
from helpers.models import built, part_of

LAYOUTS = {
    "ddp": "dp",
    "fsdp": "dp",
    "fsdp_grad": "dp",
    "hybrid": "replica shard",
    "offload": "dp",
    "tp": "tp",
    "pp": "pp",
    "dp_tp": "dp tp",
    "fsdp_tp": "dp tp",
    "pp_dp": "pp dp",
    "pp_fsdp": "pp dp",
    "pp_tp": "pp tp",
}
"""The axes of each layout."""
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}
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
    make, options = OPTIMIZERS[kind]
    return make(groups, **options)


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
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]


def laid_out(layout: str, world: ax.World, *, optimizer: str = "adamw", tied: bool = False, seed: int = 0) -> Laid:
    """Build the model in a layout over all ranks of a world; collective.

    Args:
        layout: One of `LAYOUTS`; those of two axes have one rank along the first of them where there are two.
        world: Of 1, 2 or 4 ranks.
        optimizer: Which, see `optimizer_for`.
        tied: The embedding is the last layer's weight, too.
        seed: Of the values.
    """
    mesh = ax.DeviceMesh(_shape(layout, world.size), world)
    model = whole_model(tied=tied, seed=seed)
    if "tp" in mesh.axes:
        tensor_parallelize(model, PLAN, mesh.group("tp"))
    build = _pipeline if "pp" in mesh.axes else _wrapped
    made = build(layout, mesh, model)
    chosen = optimizer_for(made.parameters(), optimizer)
    axes = [axis for axis in ("replica", "shard", "dp") if axis in mesh.axes]  # the others do not divide batches

    def step(number: int) -> float:
        chosen.zero_grad()
        inputs, targets = batch_of(number)
        if axes:
            inputs, targets = part_of((inputs, targets), mesh.rank(*axes), mesh.size(*axes))
        if isinstance(made, ax.Pipeline):
            loss = made.train_step(inputs, targets)
        else:
            loss = loss_of(made(inputs), targets)
            loss.backward()
        chosen.step()
        losses = world.default_group.all_gather_object(None if loss is None else loss.item())
        return float(statistics.mean(filter(None, losses)))

    return Laid(made, chosen, step)


def _shape(layout: str, size: int) -> dict[str, int]:
    first, *second = LAYOUTS[layout].split()
    if not second:
        return {first: size}
    two = min(2, size)
    return {first: size // two, "tp": two} if first == "dp" else {first: two, second[0]: size // two}


def _wrapped(layout: str, mesh: ax.DeviceMesh, model: nn.Module, **options: Any) -> nn.Module:
    if layout == "hybrid":
        return ax.FSDP(model, (mesh.group("shard"), mesh.group("replica")), sharding_strategy="hybrid")
    if "dp" not in mesh.axes:
        return model
    group = mesh.group("dp")
    if layout in ("ddp", "dp_tp", "pp_dp"):
        return ax.DDP(model, group)
    settings = {"fsdp_grad": {"sharding_strategy": "grad"}, "offload": {"cpu_offload": "full"}}
    return ax.FSDP(model, group, **settings.get(layout, options))


def _pipeline(layout: str, mesh: ax.DeviceMesh, model: Words) -> ax.Pipeline:
    group, options, ties = mesh.group("pp"), {}, []
    stage = split_module(model, group.size)[group.rank]
    if model.config["tied"] and group.size > 1:
        ties = [[(0, "embedding.weight"), (group.size - 1, "head.weight")]]
        if layout == "pp_fsdp":  # sharding a stage frees the memory of its parameters
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            options["units"] = [name for name in ("embedding", "head") if hasattr(stage, name)] or None
    stages: list[nn.Module | None] = [None] * group.size
    stages[group.rank] = _wrapped(layout, mesh, stage, **options)
    return ax.Pipeline.from_modules(stages, group, ties=ties, num_microbatches=2, loss_fn=loss_of)
