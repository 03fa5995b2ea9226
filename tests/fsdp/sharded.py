"""Training sharded models, and the same models in one process: plain torch, nothing of the package under test."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from models import BATCH, STEPS, batch_of, built, loss_of, part_of
from torch import Tensor, nn

import axonmpi as ax

STRATEGIES = list(ax.ShardingStrategy)


@contextlib.contextmanager
def new_group(world: ax.World) -> Iterator[ax.ProcessGroup]:
    """Make a group of all ranks, which are where the test has put them; collective."""
    group = world.new_group(range(world.size))
    yield group
    group.close()


class Residual(nn.Module):
    """A block that returns a tuple, and takes a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + scale * self.down(hidden), {"hidden": hidden}


class Blocks(nn.Module):
    """Blocks between an embedding-like layer and a head, with a parameter of the model's own."""

    def __init__(self, depth: int = 4, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden, _ = block(hidden, scale=0.5)
        return self.head(hidden * self.scale)


class TiedBlocks(nn.Module):
    """Words in, words out, through one matrix; two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.blocks[2].up = self.blocks[0].up
        self.logits = nn.Linear(8, 11, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        for block in self.blocks:
            hidden, _ = block(hidden)
        return self.logits(hidden)


def frozen_blocks() -> nn.Module:
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    model.first.weight.requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {"blocks": Blocks, "tied": TiedBlocks, "frozen": frozen_blocks}


def data_for(model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
    """Make batch number `index` for a model."""
    if isinstance(model, TiedBlocks):
        generator = torch.Generator().manual_seed(7 + index)
        tokens = torch.randint(0, 11, (BATCH, 4), generator=generator)
        return tokens, torch.randint(0, 11, (BATCH,), generator=generator)
    return batch_of(model, index)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@functools.cache
def alone(
    make: Callable[[], nn.Module], accumulation: int = 1, clip: float | None = None, steps: int = STEPS
) -> dict[str, Tensor]:
    """Train in one process on the joined batches, and return the state dict."""
    model = built(make)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    numbers = itertools.count()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulation):
            inputs, targets = data_for(model, next(numbers))
            (loss_of(model(inputs), targets) / accumulation).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def train(
    model: ax.FSDP,
    group: ax.ProcessGroup,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    steps: int = STEPS,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> torch.optim.Optimizer:
    """Train a sharded model on this rank's parts of the same batches."""
    optimizer = optimizer or adamw(p for p in model.parameters() if p.requires_grad)
    numbers = itertools.count(first)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            inputs, targets = part_of(data_for(model.module, next(numbers)), group.rank, group.size)
            with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                (loss_of(model(inputs), targets) / accumulation).backward()
        if clip is not None:
            model.clip_grad_norm(clip)
        optimizer.step()
    return optimizer
