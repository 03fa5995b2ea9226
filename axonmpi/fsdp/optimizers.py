"""Checks before a step of an optimizer on a sharded model, and the scaler of losses.

A step is refused if its parameters are not the shards, if gradients were not averaged yet, or if it needs more of
the parameters than a rank has. The ranks meet before a step if one of them may be reading the shards.
"""

from __future__ import annotations

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
from ..utils.arguments import hint
from ..wrapping.optimizer_hooks import (
    OF_ALL_PARAMETERS,
    OF_WHOLE_PARAMETERS,
    after_steps,
    before_steps,
    ordinary_gradients,
    parameters_of,
)
from .flat_parameter import STALE
from .runtime import FSDPRuntime

_RUNTIME = "_axonmpi_runtime"
"""Attribute of a sharded parameter: a weak reference to the model's runtime."""


def state_tensors(runtime: FSDPRuntime) -> Iterator[Tensor]:
    """Yield the tensors of optimizer state for this rank's shards of a model, after the first step; local."""
    shards = {id(parameter.sharded) for parameter in runtime.parameters}
    for optimizer in runtime.optimizers:
        for shard, state in optimizer.state.items():
            if id(shard) in shards:
                yield from (value for value in state.values() if isinstance(value, Tensor))


def watch_optimizers(runtime: FSDPRuntime) -> None:
    """Check the steps of optimizers on a model's parameters; local."""
    before_steps(_before_step)
    after_steps(_after_step)
    for parameter in runtime.parameters:
        setattr(parameter.sharded, _RUNTIME, weakref.ref(runtime))


def _before_step(optimizer: Optimizer) -> None:
    runtimes = _runtimes_of(optimizer)
    for runtime in runtimes:
        _check_sees_enough(optimizer, runtime)
        _check_averaged(optimizer, runtime)
    for runtime in runtimes:
        runtime.begin_step()


def _after_step(optimizer: Optimizer) -> None:
    for runtime in _runtimes_of(optimizer):
        runtime.optimizers.add(optimizer)
        runtime.end_step()


def _runtimes_of(optimizer: Optimizer) -> list[FSDPRuntime]:
    runtimes: dict[FSDPRuntime, None] = {}
    for parameter in parameters_of(optimizer):
        _check_current(parameter)
        reference = getattr(parameter, _RUNTIME, None)
        runtime = None if reference is None else reference()
        if runtime is not None:
            runtimes[runtime] = None
    return list(runtimes)


def _check_current(parameter: Tensor) -> None:
    stale = getattr(parameter, STALE, None)
    if stale is not None:
        name, origin = stale
        raise ValueError(
            f"this optimizer has parameter {name!r} as it {origin}, and would change nothing: build "
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
    """A `torch.amp.GradScaler` that skips a step on all ranks if gradients are not finite on any rank.

    torch's own compares one rank's shards: some ranks would step and others not, and their scales would differ.
    `unscale_()` and `step()` are collective.

    Args:
        device: Device of the gradients.
        process_group: The ranks that train the model; None means all.
        **options: As for `torch.amp.GradScaler`: `init_scale`, `growth_factor`, `backoff_factor`,
            `growth_interval`, `enabled`.

    Raises:
        TypeError: `device` is no name of a device, or `process_group` no group.
    """

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
        device = next((parameter.device for parameter in parameters_of(optimizer)), found_inf.device)
        own = found or {device: found_inf.to(device)}  # a rank may have no element of any parameter
        for flag in own.values():
            self._group.all_reduce(flag, ReduceOp.MAX)
        return own
