"""What has to be so when an optimizer steps (layer 5).

One hook on all of torch's optimizers: an optimizer that still has the parameters of before wrapping is refused, and
ranks meet first if any of them may still be reading the parameters that are about to change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .construction import REPLACED
from .run import Run

__all__ = ["StateOf", "watch_optimizers"]

_RUN = "_axonmpi_run"
_runs: weakref.WeakKeyDictionary[Run, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()


class StateOf:
    """The state that optimizers hold for the parameters of one model.

    Args:
        run: Runs the model.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the state of this rank's parts; optimizers that have stepped only."""
        parts = {id(part) for unit in self._run.units for flat in unit.flats for part in flat.parts}
        for optimizer in _runs.get(self._run, ()):
            for parameter, state in optimizer.state.items():
                if id(parameter) in parts:
                    yield from (value for value in state.values() if isinstance(value, Tensor))


def watch_optimizers(run: Run) -> None:
    """Look after the parts of a model when optimizers step; local."""
    _install()
    _runs.setdefault(run, weakref.WeakSet())
    reference = weakref.ref(run)
    for unit in run.units:
        for flat in unit.flats:
            for part in flat.parts:
                setattr(part, _RUN, reference)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for run in _runs_of(optimizer):
        run.fence()


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for run in _runs_of(optimizer):
        _runs[run].add(optimizer)


def _runs_of(optimizer: Optimizer) -> list[Run]:
    found: dict[int, Run] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check_current(parameter)
            reference = getattr(parameter, _RUN, None)
            run = None if reference is None else reference()
            if run is not None:
                found[id(run)] = run
    return list(found.values())


def _check_current(parameter: nn.Parameter | torch.Tensor) -> None:
    name = getattr(parameter, REPLACED, None)
    if name is not None:
        raise ValueError(
            f"this optimizer has parameter {name!r} as it was before the model was wrapped, and would change "
            "nothing: build the optimizer after wrapping, on fsdp.parameters()"
        )
