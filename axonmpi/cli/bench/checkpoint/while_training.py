"""What training waits for a save beside it, compared with a copy of what a rank has.

    gradients  step | save  gradients  step | gradients  step  ...  complete
                      call             wait   later

`call` is what the call takes. `wait` is what the step after it takes longer than others, and `later` what all steps
until the save is complete take longer: the cores are shared. At once, the optimizer steps right after the call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....checkpoint import save_checkpoint
from ....comm import all_reduce_max, barrier
from ....types import Work
from ..harness.timing import AXONMPI
from .models import batch_for


class _Training(NamedTuple):
    """What trains, and is saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    path: Path

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()

    def copy(self) -> None:
        """Copy all that this rank has, to fresh memory."""
        copies = [tensor.clone() for tensor in self._tensors()]
        copies.clear()

    def _tensors(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter.detach()
                yield from self.optimizer.state.get(parameter, {}).values()

    def save(self) -> Work:
        work = save_checkpoint(self.path, self.model, self.optimizer, blocking=False)
        assert work is not None
        return work


def measure(
    own: tuple[nn.Module, torch.optim.Optimizer], folder: Path, mebibytes: int, blocks: int
) -> dict[str, float]:
    """Measure so many saves of each kind, the first one apart; collective. Medians of the slowest rank's seconds.

    Returns:
        `call`, `wait`, `later`, `stall`, which is call and wait, `at once`, and `copy`, what a copy takes.
    """
    training = _Training(*own, batch_for(mebibytes), folder / "beside")
    rounds = [_round(training) for _ in range(blocks + 1)][1:]
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _round(training: _Training) -> dict[str, float]:
    training.step()
    whole = _seconds(training.step)
    training.gradients()
    step = _seconds(training.optimizer.step)
    found = {"copy": _seconds(training.copy)}
    barrier()
    begin = time.perf_counter()
    work = training.save()
    found["call"] = time.perf_counter() - begin
    training.gradients()
    found["wait"] = _seconds(training.optimizer.step) - step
    found["stall"] = found["call"] + found["wait"]
    begin, steps = time.perf_counter(), 0
    while not _done_by_all(work):
        training.step()
        steps += 1
    found["later"] = time.perf_counter() - begin - steps * whole
    barrier()
    begin = time.perf_counter()
    work = training.save()
    training.optimizer.step()
    found["at once"] = time.perf_counter() - begin - step
    work.wait()
    return {name: AXONMPI.largest(value) for name, value in found.items()}


def _seconds(call: Callable[[], object]) -> float:
    barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _done_by_all(work: Work) -> bool:
    left = torch.tensor(not work.done(), dtype=torch.int32)
    all_reduce_max(left)
    return not int(left)
