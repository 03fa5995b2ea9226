"""Domains beside data parallelism and checkpoints: ten steps of training are those of one process."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.compare import assert_close
from helpers.cut_tensors import randn
from helpers.once import once
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.domain import Domain

STEPS = 10
ALL = ("dp", "y")
Wrapper = Callable[..., nn.Module]
WRAPPERS: dict[str, Wrapper] = {
    "ddp": ax.DDP,
    "zero 2": partial(ax.FSDP, sharding_strategy="grad", units="*"),
    "zero 3": partial(ax.FSDP, sharding_strategy="full", units="*"),
}


def network(of_batch: bool) -> tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return a model, the same on all ranks, and its optimizer's constructor.

    Args:
        of_batch: One of the norms is over the batch.
    """
    model = nn.Sequential(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4) if of_batch else nn.GroupNorm(1, 4), nn.GELU()
        ),
        nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 2, 4, padding=1, padding_mode="circular"),
    ).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = randn(number, *parameter.shape) / 3
    return model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, fields: Tensor) -> Tensor:
    result = model(fields)
    return F.mse_loss(result, fields[:, :, : result.shape[2], : result.shape[3]])


def fields_of(step: int) -> Tensor:
    return randn(100 + step, 4, 2, 11, 6)


@once
def alone(of_batch: bool, parts: int, sends_buffers: bool) -> tuple[list[Any], list[float]]:
    """Train in one process of plain torch, on parts of each batch in turn, which have buffers of their own.

    Returns:
        The state that each part ends with, and the losses.
    """
    model, optimizer_of = network(of_batch)
    optimizer = optimizer_of(model)
    losses, buffers = [], [deepcopy(dict(model.named_buffers()))] * parts
    for step in range(STEPS):
        optimizer.zero_grad()
        before, buffers, of_parts = buffers, [], []
        for number, part in enumerate(fields_of(step).chunk(parts)):
            model.load_state_dict(before[0 if sends_buffers else number], strict=False)
            loss = loss_of(model, part)
            (loss / parts).backward()
            of_parts.append(loss.item())
            buffers.append(deepcopy(dict(model.named_buffers())))
        losses.append(fmean(of_parts))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return [{**deepcopy(model.state_dict()), **own} for own in buffers], losses


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, domain: Domain, group: ax.ProcessGroup | None, steps: range
) -> list[float]:
    """Train on cut fields, a part of each batch on each index of "dp" that the domain has not; return losses."""
    mesh, losses = domain.mesh, []
    for step in steps:
        fields = fields_of(step)
        own = fields if "dp" in domain.dims else fields.chunk(mesh.size("dp"))[mesh.rank("dp")]
        optimizer.zero_grad()
        loss = loss_of(model, domain.from_local(own[domain.slices(own.shape)], own.shape))
        loss.backward()
        losses.append(fmean(mesh.group("dp").all_gather_object(loss.item())))
        if group is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        else:
            ax.clip_grad_norm(model, 0.3)
        optimizer.step()
    return losses


# ---- dp 2 x domain 2 --------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("axes", [("dp",), ALL], ids=" ".join)
def test_ten_steps_in_a_wrapper_are_those_of_one_process(world: ax.World, kind: str, axes: tuple[str, ...]) -> None:
    """Batch norm is over the domain; running statistics go over "dp" as the wrapper sends buffers."""
    mesh = ax.DeviceMesh({"dp": 2, "y": 2}, world)
    model, optimizer_of = network(of_batch=True)
    wrapped = WRAPPERS[kind](model, mesh.group(*axes))
    losses = train(wrapped, optimizer_of(wrapped), Domain(mesh, {"y": 2}), mesh.group(*axes), range(STEPS))
    states, expected = alone(True, 2, kind == "ddp")
    found = wrapped.module.state_dict() if kind == "ddp" else wrapped.full_state_dict()
    own = dict(wrapped.module.named_buffers())  # of FSDP, the full state has rank 0's
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_close({**found, **own}, states[mesh.rank("dp")], 1e-9)


@pytest.mark.ranks(4)
def test_ten_steps_without_a_wrapper_are_those_of_one_process(world: ax.World) -> None:
    """The domain cuts the batch, too, so batch norm is over all of it."""
    mesh = ax.DeviceMesh({"dp": 2, "y": 2}, world)
    model, optimizer_of = network(of_batch=True)
    losses = train(model, optimizer_of(model), Domain(mesh, {"dp": 0, "y": -2}), None, range(STEPS))
    (state,), expected = alone(True, 1, True)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_close(model.state_dict(), state, 1e-9)


# ---- checkpoints ------------------------------------------------------------------------------------------------


def resumed(
    world: ax.World, path: Path, kind: str, shape: dict[str, int], dims: dict[str, int], steps: range
) -> list[float]:
    """Load, train on, and save, as one of some ranks."""
    mesh = ax.DeviceMesh(shape, world)
    model, optimizer_of = network(of_batch=False)
    wrapped = WRAPPERS[kind](model, world.default_group)
    optimizer = optimizer_of(wrapped)
    if steps.start:
        assert ax.load_checkpoint(path, wrapped, optimizer).step == steps.start
    losses = train(wrapped, optimizer, Domain(mesh, dims), world.default_group, steps)
    if not steps.start:
        ax.save_checkpoint(path, wrapped, optimizer, step=steps.stop)
    return losses


@pytest.mark.parametrize(
    ("kind", "shape", "dims"),
    [
        ("ddp", {"dp": 1, "y": 2, "x": 2}, {"y": 2, "x": 3}),
        ("zero 2", {"dp": 2, "y": 2}, {"y": 2}),
        ("zero 3", {"dp": 1, "y": 2, "x": 2}, {"y": 2, "x": 3}),
    ],
)
def test_a_checkpoint_of_two_by_two_ranks_goes_on_at_one_and_three(
    tmp_path: Path, kind: str, shape: dict[str, int], dims: dict[str, int]
) -> None:
    _states, expected = alone(False, 1, True)
    losses = ax.testing.run_ranks(4, resumed, tmp_path / "it", kind, shape, dims, range(4))
    assert losses == [pytest.approx(expected[:4], rel=1e-9)] * 4
    for ranks in (1, 3):
        rows = {"dp": 1, "y": ranks}
        losses = ax.testing.run_ranks(ranks, resumed, tmp_path / "it", kind, rows, {"y": 2}, range(4, 8))
        assert losses == [pytest.approx(expected[4:8], rel=1e-9)] * ranks
