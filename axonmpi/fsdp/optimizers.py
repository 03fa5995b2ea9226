"""Checks and barriers around the step of an optimizer.

Hooks on all of torch's optimizers refuse a step with other parameters than this rank's parts, one that would leave
out gradients which were not averaged yet, and one that needs more of the parameters than a rank has. Ranks meet
before a step if one of them may still be reading the parameters that are about to change. The scaler of losses is
here too, since a step is skipped on all ranks or on none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..types import ReduceOp
from ..utils.arguments import either_group_name, hint
from ..wrapping.optimizer_hooks import (
    OF_ALL_PARAMETERS,
    OF_WHOLE_PARAMETERS,
    around_steps,
    ordinary_gradients,
    parameters_of,
)
from .construction import REPLACED
from .flat_parameter import COMPUTED_WITH
from .runtime import FSDPRuntime

_RUNTIME = "_axonmpi_runtime"
_runtimes: weakref.WeakKeyDictionary[FSDPRuntime, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()


def state_tensors(runtime: FSDPRuntime) -> Iterator[Tensor]:
    """Yield the tensors that optimizers which have stepped keep for this rank's parts of a model; local."""
    parts = {id(parameter.sharded) for parameter in runtime.parameters}
    for optimizer in _runtimes[runtime]:
        for part, state in optimizer.state.items():
            if id(part) in parts:
                yield from (value for value in state.values() if isinstance(value, Tensor))


def watch_optimizers(runtime: FSDPRuntime) -> None:
    """Check the steps of optimizers on a model's parameters; local."""
    _install()
    _runtimes[runtime] = weakref.WeakSet()
    for parameter in runtime.parameters:
        setattr(parameter.sharded, _RUNTIME, weakref.ref(runtime))


@functools.cache
def _install() -> None:
    around_steps(_before_step, _after_step)


def _before_step(optimizer: Optimizer) -> None:
    runtimes = _runtimes_of(optimizer)
    for runtime in runtimes:
        _check_sees_enough(optimizer, runtime)
        _check_averaged(optimizer, runtime)
    for runtime in runtimes:
        runtime.begin_step()


def _after_step(optimizer: Optimizer) -> None:
    for runtime in _runtimes_of(optimizer):
        _runtimes[runtime].add(optimizer)
        runtime.end_step()


def _runtimes_of(optimizer: Optimizer) -> list[FSDPRuntime]:
    found: dict[FSDPRuntime, None] = {}
    for parameter in parameters_of(optimizer):
        _check_current(parameter)
        reference = getattr(parameter, _RUNTIME, None)
        runtime = None if reference is None else reference()
        if runtime is not None:
            found[runtime] = None
    return list(found)


def _check_current(parameter: Tensor) -> None:
    replaced, computed = getattr(parameter, REPLACED, None), getattr(parameter, COMPUTED_WITH, None)
    if replaced is not None or computed is not None:
        when = "was before the model was wrapped" if computed is None else "is within a forward"
        raise ValueError(
            f"this optimizer has parameter {replaced or computed!r} as it {when}, and would change nothing: build "
            "the optimizer after wrapping, on fsdp.parameters()"
        )


def _check_sees_enough(optimizer: Optimizer, runtime: FSDPRuntime) -> None:
    if runtime.group.size == 1:
        return
    if isinstance(optimizer, OF_ALL_PARAMETERS):
        raise ValueError(
            f"{type(optimizer).__name__} takes products over all parameters, of which a rank has a part: wrap the "
            "model with sharding_strategy=ax.ShardingStrategy.NO_SHARD, or choose another optimizer"
        )
    if isinstance(optimizer, OF_WHOLE_PARAMETERS) and not all(flat.layout.keeps_full for flat in runtime.flats):
        raise ValueError(
            f"the step of {type(optimizer).__name__} needs whole parameters, and a rank has parts of them: wrap "
            "the model with shard_by='parameters'"
        )


def _check_averaged(optimizer: Optimizer, runtime: FSDPRuntime) -> None:
    if not runtime.queue.accumulates:
        return
    own = {id(parameter) for parameter in parameters_of(optimizer)}
    for gradient in runtime.queue.gradients:
        for parameter in gradient.held():
            if id(parameter.sharded) in own:
                raise ValueError(
                    f"the gradient of {parameter.name!r} has accumulated in no_sync() and was not averaged, so a "
                    "step would leave it out: call backward outside no_sync(), or sync_gradients(), before the "
                    "step; the model's zero_grad() drops it"
                )


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` that skips a step on all ranks if any rank's part of the gradients is not finite.

    With torch's own, ranks whose part is finite would step while others do not, and the scales would part ways.
    `unscale_()` and `step()` are collective.

    Args:
        device: Device of the gradients.
        process_group: The ranks that train the model; None means all.
        **options: As for `torch.amp.GradScaler`: `init_scale`, `growth_factor`, `backoff_factor`,
            `growth_interval`, `enabled`.

    Raises:
        TypeError: `device` is no name, or `process_group` no group.
    """

    @either_group_name
    def __init__(self, device: str = "cpu", process_group: ProcessGroup | None = None, **options: Any) -> None:
        if not isinstance(device, str):
            raise TypeError(f"device: expected the name of one, such as 'cpu', got {device!r}{hint(device)}")
        super().__init__(device, **options)
        self._group = group_of_this_rank(process_group)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with ordinary_gradients(parameters_of(optimizer)):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        place = next((parameter.device for parameter in parameters_of(optimizer)), found_inf.device)
        own = found or {place: found_inf.to(place)}  # a rank may have a part of no parameter
        for flag in own.values():
            self._group.all_reduce(flag, ReduceOp.MAX)
        return own
