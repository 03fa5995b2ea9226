"""The hooks that a sharded model runs by."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..wrapping.autograd import hook_gradient
from ..wrapping.backward import weakly
from .runtime import FSDPRuntime
from .unit import Unit

__all__ = ["attach"]


def attach(runtime: FSDPRuntime, cast: torch.dtype | None) -> None:
    """Let modules and parameters tell when they compute; local.

    Args:
        runtime: What they tell it.
        cast: Dtype to convert floating-point inputs of units to, if any.
    """
    for unit in runtime.units:
        unit.module.register_forward_pre_hook(partial(_before, runtime, unit, cast), with_kwargs=True)
        unit.module.register_forward_hook(partial(_after, runtime, unit), always_call=True)
    for gradient in runtime.queue.gradients:
        for parameter in gradient.flat.parameters:
            node, _ = hook_gradient(parameter.full, weakly(runtime.on_gradient, gradient, parameter))
            gradient.nodes.append(node)
            parameter.sharded.register_hook(weakly(runtime.on_sharded_gradient, parameter))


def _before(
    runtime: FSDPRuntime, unit: Unit, cast: torch.dtype | None, _module: Any, args: Any, kwargs: Any
) -> Any:
    if runtime.shows_copies:
        return None
    runtime.before_forward(unit)
    if cast is None:
        return None
    return tuple(_converted(value, cast) for value in args), {k: _converted(v, cast) for k, v in kwargs.items()}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _after(runtime: FSDPRuntime, unit: Unit, _module: Any, _args: Any, output: Any) -> None:
    runtime.after_forward(unit, output)
