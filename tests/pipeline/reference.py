"""Models in stages, their data, and training in one process with plain torch, which pipelines are compared with.

torch's random numbers belong to the process and mock ranks are its threads, so whatever draws them holds a lock.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axonmpi.pipeline import microbatch_seed

STEPS = 10
SAMPLES, WIDTH = 11, 8
_drawing = threading.RLock()


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


def batches(steps: int = STEPS, samples: int = SAMPLES, width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Make the batches of a training, the same everywhere."""
    drawn = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, width, generator=drawn), torch.randn(samples, width, generator=drawn))
        for _ in range(steps)
    ]


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(
    stages: Sequence[nn.Module],
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    loss_fn=F.mse_loss,
    parts: int = 1,
    seed: int | None = None,
    max_norm: float | None = None,
) -> tuple[nn.Sequential, list[float], list[Tensor]]:
    """Train in this process; return the model, its losses and the norms of its gradients.

    The batch is cut only if there is a seed, to draw each micro-batch's random numbers from a stream of its own.
    """
    model = nn.Sequential(*stages)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        total = 0.0
        count = 1 if seed is None else min(parts, len(inputs))
        with _drawing, torch.random.fork_rng(devices=[]):
            for part, (some, wanted) in enumerate(
                zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
            ):
                if seed is not None:
                    torch.manual_seed(microbatch_seed(seed, step, part))
                loss = loss_fn(model(some), wanted) * (len(some) / len(inputs))
                loss.backward()
                total += loss.item()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        losses.append(total)
    return model, losses, norms


def train(pipeline, data: Sequence[tuple[Tensor, Tensor]], losses: Sequence[float]) -> None:
    """Train in a pipeline; compare its losses."""
    optimizer = adamw(pipeline.parameters())
    for (inputs, targets), expected in zip(data, losses, strict=True):
        optimizer.zero_grad()
        loss = pipeline.train_step(inputs, targets)
        optimizer.step()
        assert (loss is not None) == pipeline.has_last_stage
        assert loss is None or loss.item() == pytest.approx(expected, abs=1e-5)


def assert_stages_equal(pipeline, model: nn.Sequential, what: object = "") -> None:
    """Compare the parameters of this rank's stages with those of the model in one process."""
    for number, module in pipeline.stages.items():
        expected = dict(model[int(number)].named_parameters())
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=0, msg=f"{what}: {number}.{name}")
