"""Steps of training, the same for a plain model and a wrapped one."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import GradSyncStrategy

Batch = tuple[Tensor, Tensor]
Optimizing = Callable[[nn.Module], torch.optim.Optimizer]
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], object]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output, target)


def again(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> Tensor:
    """Compute once more in backward; mock ranks are threads, which would change each other's random numbers."""
    return checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)


def optimizer_of(kind: str, **options: Any) -> Optimizing:
    """Return what makes one of torch's optimizers for what is trained of a model."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **options)

    make.__name__ = kind
    return make


adamw = optimizer_of("AdamW", lr=1e-2, weight_decay=0.1)
sgd = optimizer_of("SGD", lr=0.05, momentum=0.9, weight_decay=0.01)
"""Unlike AdamW, it takes notice of how large gradients are."""


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    sync_gradients(model)
    optimizer.step()


def within(model: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    """Enter a context of a wrapped model; of a plain one, nothing."""
    return getattr(model, name)() if isinstance(model, ax.DDP | ax.FSDP) else contextlib.nullcontext()


def sync_gradients(model: nn.Module) -> None:
    """Average gradients by hand, where nothing else does."""
    if getattr(model, "sync_strategy", None) is GradSyncStrategy.NO_SYNC:
        model.sync_gradients()


def clip(model: nn.Module, max_norm: float) -> None:
    """Clip the gradient of a wrapped or a plain model."""
    if isinstance(model, ax.FSDP):
        model.clip_grad_norm(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Three backwards, two of which average nothing, and a norm that is clipped."""
    optimizer.zero_grad(set_to_none=False)
    for factor in (0.5, -1.0):
        with within(model, "no_sync"):
            (factor * loss_of(model(batch[0]), batch[1])).backward()
    (2 * loss_of(model(batch[0].flip(-1)), batch[1])).backward()
    sync_gradients(model)
    clip(model, 0.05)
    optimizer.step()


def checkpoints_the_model(model, optimizer, batch, *, reentrant=True):
    optimizer.zero_grad()
    loss_of(again(model, batch[0].clone().requires_grad_(), reentrant), batch[1]).backward()
    optimizer.step()


def forwards_before_one_backward(model, optimizer, batch):
    optimizer.zero_grad()
    losses = [loss_of(model(batch[0] * factor), batch[1]) for factor in (1.0, 0.5, -1.0)]
    (losses[0] + 2 * losses[1] + losses[2]).backward()
    optimizer.step()


def forwards_and_backwards_later(model, optimizer, batch):
    optimizer.zero_grad()
    losses = [loss_of(model(batch[0]), batch[1]) * factor for factor in (1.0, 0.5)]
    for loss in losses:
        loss.backward()
    optimizer.step()


def accumulates_averages(model, optimizer, batch, *, set_to_none=True):
    optimizer.zero_grad(set_to_none)
    for factor in (1.0, 0.5, 0.25):
        (loss_of(model(batch[0]), batch[1]) * factor).backward()
    optimizer.step()


def goes_backward_twice(model, optimizer, batch):
    model.zero_grad(set_to_none=False)
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    optimizer.step()


def evaluates_between_steps(model, optimizer, batch):
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model(batch[0])  # with a graph that no backward follows
    model.train()
    usual_step(model, optimizer, batch)
    model(batch[0])


def asks_for_gradients_of_inputs(model, optimizer, batch):
    optimizer.zero_grad()
    inputs = batch[0].clone().requires_grad_()
    (direction,) = torch.autograd.grad(loss_of(model(inputs), batch[1]) * len(inputs), inputs)
    loss_of(model(inputs.detach() + 0.1 * direction.sign()), batch[1]).backward()
    optimizer.step()


def penalised(model, optimizer, batch):
    """Train on a loss and the squares of its gradient with respect to the inputs."""
    optimizer.zero_grad()
    inputs = batch[0].clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    (output.square().mean() + gradient.square().sum() / len(inputs)).backward()
    optimizer.step()
