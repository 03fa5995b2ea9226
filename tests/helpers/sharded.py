"""Doing the same with a sharded model and, in one process of plain torch, with the model itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axonmpi as ax
from helpers.models import BATCH, assert_close, assert_same_on_all_ranks, batch_of, built, loss_of, part_of

STRATEGIES = list(ax.ShardingStrategy)

# ---- settings ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_group(world: ax.World, overlaps: bool | None = None) -> Iterator[ax.ProcessGroup]:
    """Make a group of all ranks, which are where the test has put them; collective."""
    group = world.new_group(range(world.size))
    if overlaps is not None:
        group.backend.overlaps = overlaps
    yield group
    group.close()


def placed(*names: str) -> pytest.MarkDecorator:
    """Run a test in some of the settings alone."""
    return pytest.mark.parametrize("setting", names, indirect=True)


def in_turn(argument: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Run each case where units take turns in memory, and in one of the other settings."""
    others = itertools.cycle(("one_node", "kept", "replicas"))
    rows = [
        pytest.param(case, name, id=f"{each_id(case)}-{name}") for case in cases for name in ("apart", next(others))
    ]
    return pytest.mark.parametrize((argument, "setting"), rows, indirect=["setting"])


def each_id(case: Any) -> str:
    """Say which case it is."""
    return "-".join(map(each_id, case)) if isinstance(case, tuple) else getattr(case, "__name__", str(case))


# ---- models -----------------------------------------------------------------------------------------------------


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
    for part in (model.blocks[1], model.first.weight, model.blocks[2].norm):
        part.requires_grad_(False)
    return model


def data_for(model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
    """Make batch number `index` for a model."""
    if isinstance(model, TiedBlocks):
        generator = torch.Generator().manual_seed(7 + index)
        tokens = torch.randint(0, 11, (BATCH, 4), generator=generator)
        return tokens, torch.randint(0, 11, (BATCH,), generator=generator)
    return batch_of(model, index)


def own_data(model: ax.FSDP, world: ax.World, index: int = 0) -> tuple[Tensor, Tensor]:
    """Make this rank's part of a batch."""
    return part_of(data_for(model.module, index), world.rank, world.size)


# ---- optimizers and steps ---------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], object]


def optimizer_of(kind: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return what makes one of torch's optimizers for what is trained of a model."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **options)

    make.__name__ = kind
    return make


adamw_of = optimizer_of("AdamW", lr=1e-2, weight_decay=0.1)
momentum_of = optimizer_of("SGD", lr=0.05, momentum=0.9, weight_decay=0.01)
"""Unlike AdamW, it takes notice of how large gradients are."""


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def within(model: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    """Enter a context of a sharded model; of a plain one, nothing."""
    return getattr(model, name)() if isinstance(model, ax.FSDP) else contextlib.nullcontext()


def clip(model: nn.Module, max_norm: float) -> None:
    """Clip the gradient of a sharded or a plain model."""
    if isinstance(model, ax.FSDP):
        model.clip_grad_norm(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Three backwards, two of which average nothing, and a norm that is clipped."""
    optimizer.zero_grad()
    for factor in (0.5, -1.0):
        with within(model, "no_sync"):
            (factor * loss_of(model(batch[0]), batch[1])).backward()
    (2 * loss_of(model(batch[0].flip(-1)), batch[1])).backward()
    clip(model, 0.05)
    optimizer.step()


# ---- comparing --------------------------------------------------------------------------------------------------


def equals_alone(
    world: ax.World,
    make: Callable[[], nn.Module],
    step: Step = usual_step,
    optimizer_of: Callable[[nn.Module], Any] = momentum_of,
    *,
    batches: Iterable[int] = range(2),
    tolerance: float = 1e-5,
    overlaps: bool | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a sharded model on parts of batches and a plain one on the whole; compare, and return the state."""
    plain = built(make)
    optimizer = optimizer_of(plain)
    for number in batches:
        step(plain, optimizer, data_for(plain, number))
    with new_group(world, overlaps) as group:
        model = ax.FSDP(built(make), **{"process_group": group, **options})
        optimizer = optimizer_of(model)
        for number in batches:
            step(model, optimizer, part_of(data_for(plain, number), world.rank, world.size))
        state = model.full_state_dict()
    assert_close(state, plain.state_dict(), tolerance)
    assert_same_on_all_ranks(world, state)
    return state


def trained_alone(make: Callable[[], nn.Module], steps: int, optimizer_of: Any = momentum_of) -> nn.Module:
    """Train a plain model on whole batches."""
    model = built(make)
    optimizer = optimizer_of(model)
    for number in range(steps):
        usual_step(model, optimizer, data_for(model, number))
    return model


def train(model: ax.FSDP, world: ax.World, steps: int, optimizer_of: Any = momentum_of) -> torch.optim.Optimizer:
    """Train a sharded model on this rank's parts of the same batches."""
    optimizer = optimizer_of(model)
    for number in range(steps):
        usual_step(model, optimizer, own_data(model, world, number))
    return optimizer


def assert_gradients(model: ax.FSDP, plain: nn.Module, tolerance: float = 1e-5) -> None:
    """Compare what all ranks have of the average with the gradients of one process, by name; collective."""
    own = {name: None if p.grad is None else p.grad.flatten() for name, p in model.named_parameters()}
    everywhere = model.process_group.all_gather_object(own)
    pieces = {name: [of_rank[name] for of_rank in everywhere if of_rank[name] is not None] for name in own}
    wholes = {name: torch.cat(found) if found else None for name, found in pieces.items()}
    expected = {name: None if p.grad is None else p.grad.flatten() for name, p in plain.named_parameters()}
    assert_close(wholes, expected, tolerance)
