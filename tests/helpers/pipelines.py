"""Models in stages, their data, and training in one process with plain torch, which pipelines are compared with.

torch's random numbers belong to the process and mock ranks are its threads, so whatever draws them holds a lock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import microbatch_seed

SAMPLES, WIDTH, LARGEST_NORM = 11, 8, 0.3
_drawing = threading.RLock()

Batch = tuple[Tensor, Tensor]


def block(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout))


@functools.lru_cache(maxsize=64)
def _built(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return [make() for _ in range(count)]


def built(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """Build modules with the same initial values everywhere."""
    with _drawing:
        return copy.deepcopy(_built(make, count))


def batches(steps: int, samples: int = SAMPLES) -> list[Batch]:
    """Make batches, the same everywhere."""
    drawn = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(samples, WIDTH, generator=drawn) for _ in range(2)) for _ in range(steps)]


class Step(NamedTuple):
    """What one process finds in a step; gradients by the numbers of stages and names in them, also of ties."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    norm: Tensor
    output: Tensor
    held_out_loss: Tensor


def trained(
    stages: Sequence[nn.Module],
    steps: Iterable[Sequence[Batch]],
    *,
    loss_fn,
    parts: int = 1,
    seed: int | None = None,
) -> tuple[nn.Sequential, list[Step]]:
    """Train in this process; each step adds up the gradients of its batches and clips them.

    A batch is cut only if there is a seed, to draw each micro-batch's random numbers from a stream of its own.
    """
    model, found, number = nn.Sequential(*stages), [], itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in steps:
        optimizer.zero_grad()
        losses = [_gradients(model, batch, loss_fn, parts, seed, next(number)) for batch in step]
        gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        with torch.no_grad():
            output = model.eval()(step[0][0])
            held_out_loss = loss_fn(output, step[0][1])
        model.train()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).float()
        optimizer.step()
        found.append(Step(losses, gradients, norm, output, held_out_loss))
    return model, found


def _gradients(model: nn.Module, batch: Batch, loss_fn, parts: int, seed: int | None, number: int) -> float:
    total, count = 0.0, 1 if seed is None else min(parts, len(batch[0]))
    with _drawing, torch.random.fork_rng(devices=[]):
        for part, (some, wanted) in enumerate(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True)):
            if seed is not None:
                torch.manual_seed(microbatch_seed(seed, number, part))
            loss = loss_fn(model(some), wanted) * (len(some) / len(batch[0]))
            loss.backward()
            total += loss.item()
    return total


def assert_trains_like(pipeline: ax.Pipeline, model: nn.Sequential, found: Sequence[Step], steps, what="") -> None:
    """Train in a pipeline, with an evaluation in between; compare with what one process has found."""
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3)
    for step, expected in zip(steps, found, strict=True):
        optimizer.zero_grad()
        for number, ((inputs, targets), wanted) in enumerate(zip(step, expected.losses, strict=True), 1):
            with contextlib.nullcontext() if number == len(step) else pipeline.no_sync():
                loss = pipeline.train_step(inputs, targets)
            assert (loss is not None) == pipeline.has_last_stage
            assert loss is None or loss.item() == pytest.approx(wanted, abs=1e-5), what
        pipeline.eval()
        output, loss = pipeline(step[0][0]), pipeline.eval_step(*step[0])
        pipeline.train()
        assert (output is not None) == (loss is not None) == pipeline.has_last_stage
        if loss is not None:
            torch.testing.assert_close([output, loss], [expected.output, expected.held_out_loss])
        assert_gradients(pipeline, expected.gradients, what)
        torch.testing.assert_close(pipeline.clip_grad_norm(LARGEST_NORM), expected.norm, atol=1e-6, rtol=1e-5)
        optimizer.step()
    for number, module in pipeline.stages.items():
        torch.testing.assert_close(module.state_dict(), model[int(number)].state_dict(), atol=1e-5, rtol=0)
    ax.barrier()  # what is drawn next may be drawn for another pipeline


def assert_gradients(pipeline: ax.Pipeline, expected: dict[str, Tensor | None], what: object = "") -> None:
    """Compare the gradients of this rank's stages with those of one process, which has the model in a row."""
    own = {name: parameter.grad for name, parameter in pipeline.stages.named_parameters()}
    wanted = {name: expected[name] for name in own}
    assert {n for n, g in own.items() if g is None} == {n for n, g in wanted.items() if g is None}, what
    for name, gradient in own.items():
        if gradient is not None:
            torch.testing.assert_close(
                gradient, wanted[name], msg=lambda text, name=name: f"{what}: {name}: {text}"
            )


def assert_step_like_one_process(
    pipeline: ax.Pipeline, stages: Sequence[nn.Module], batch: Batch, loss_fn=F.mse_loss
):
    """Make a step from gradients of zero; compare loss and gradients with those of the stages in one process."""
    model = nn.Sequential(*stages)
    expected = loss_fn(model(batch[0]), batch[1])
    expected.backward()
    pipeline.zero_grad()
    loss = pipeline.train_step(*batch)
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach())
    assert_gradients(pipeline, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)})
