"""The time that a save takes from the training beside it, compared with a copy of a rank's state.

    gradients  step | save  gradients  step | gradients  step  ...  complete
                      call             wait   later

`call` is the time of the call. `wait` is the additional time of the step after it, and `later` that of all steps
until the save is complete, which share the cores with it. `at once` is the time of a call with a step right after
it, less the step's.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch import nn

from ....checkpoint import save_checkpoint
from ....types import Work
from ..harness.timing import OVER_AXONMPI, seconds_of
from .models import batch_for


class _Training:
    """A model in training, and its latest save.

    Args:
        own: The model and its optimizer.
        mebibytes: Of the model and the optimizer's state.
        path: Of the checkpoint.
    """

    work: Work

    def __init__(self, own: tuple[nn.Module, torch.optim.Optimizer], mebibytes: int, path: Path) -> None:
        self._model, self.optimizer = own
        self._batch = batch_for(mebibytes)
        self._path = path

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()

    def copy(self) -> None:
        """Copy this rank's parameters and optimizer state to fresh memory."""
        copies = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                copies += [tensor.clone() for tensor in (parameter.detach(), *state.values())]

    def save(self) -> None:
        work = save_checkpoint(self._path, self._model, self.optimizer, blocking=False)
        assert work is not None
        self.work = work

    def save_and_step(self) -> None:
        self.save()
        self.optimizer.step()


def measure(
    own: tuple[nn.Module, torch.optim.Optimizer], folder: Path, mebibytes: int, blocks: int
) -> dict[str, float]:
    """Measure `blocks` saves of each kind after one that warms up; collective.

    Returns:
        The medians of the slowest rank's seconds: `copy`, of a copy of a rank's state; `call`, `wait`, `stall`,
        which is call and wait, `later` and `at once`.
    """
    training = _Training(own, mebibytes, folder / "beside")
    rounds = [_round(training) for _ in range(blocks + 1)][1:]
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _round(training: _Training) -> dict[str, float]:
    # A step, an optimizer's step and a copy, without a save.
    training.step()
    full_step = seconds_of(training.step)
    training.gradients()
    step = seconds_of(training.optimizer.step)
    copy = seconds_of(training.copy)

    # A save, and the steps until it is complete on all ranks.
    call = seconds_of(training.save)
    training.gradients()
    wait = seconds_of(training.optimizer.step) - step
    begin, steps = time.perf_counter(), 0
    while OVER_AXONMPI.maximum(not training.work.done()):
        training.step()
        steps += 1
    later = time.perf_counter() - begin - steps * full_step

    at_once = seconds_of(training.save_and_step) - step
    training.work.wait()
    own = {"copy": copy, "call": call, "wait": wait, "stall": call + wait, "later": later, "at once": at_once}
    return {name: OVER_AXONMPI.maximum(value) for name, value in own.items()}
