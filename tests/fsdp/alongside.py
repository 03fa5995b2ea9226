"""Doing the same with a sharded model and, in one process of plain torch, with the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import assert_close, built, loss_of, part_of
from sharded import data_for, new_group
from torch import Tensor, nn

import axonmpi as ax

Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], object]


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def equals_alone(
    world: ax.World,
    make: Callable[[], nn.Module],
    step: Step = usual_step,
    optimizer_of: Callable[[nn.Module], Any] = adamw_of,
    *,
    batches: Iterable[int] = range(3),
    tolerance: float = 1e-5,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a sharded model on parts of batches and a plain one on the whole; compare, and return the state."""
    plain = built(make)
    optimizer = optimizer_of(plain)
    for number in batches:
        step(plain, optimizer, data_for(plain, number))
    with new_group(world) as group:
        model = ax.FSDP(built(make), group, **options)
        optimizer = optimizer_of(model)
        for number in batches:
            step(model, optimizer, part_of(data_for(plain, number), group.rank, group.size))
        state = model.full_state_dict()
    assert_close(state, plain.state_dict(), tolerance)
    return state


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copy a plain model's gradients, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_gradients(model: ax.FSDP) -> dict[str, Tensor | None]:
    """Join a sharded model's gradients, by name, from what each rank shows; collective."""
    group = model.process_group
    own = {name: None if p.grad is None else p.grad.flatten() for name, p in model.named_parameters()}
    everywhere = group.all_gather_object(own)
    wholes: dict[str, Tensor | None] = {}
    for name in own:
        pieces = [of_rank[name] for of_rank in everywhere if of_rank[name] is not None]
        wholes[name] = torch.cat(pieces) if pieces else None
    return wholes


def assert_gradients(model: ax.FSDP, plain: nn.Module, tolerance: float = 1e-5) -> None:
    """Compare the average of all ranks with one process; collective."""
    expected = {name: None if g is None else g.flatten() for name, g in gradients_of(plain).items()}
    assert_close(whole_gradients(model), expected, tolerance)
