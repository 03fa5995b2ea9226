"""The hooks that a sharded model runs by.

None of them keeps the model alive: what autograd holds, Python's garbage collector cannot see.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..wrapping.autograd import accumulates_into, hook_gradient
from .gradients import FlatGradient
from .runtime import Run
from .unit import Unit

__all__ = ["attach", "watch"]


def attach(run: Run, cast: torch.dtype | None) -> None:
    """Let modules and parameters tell when they compute; local.

    Args:
        run: What they tell it.
        cast: Dtype to convert floating-point inputs of units to, if any.
    """
    owner = weakref.ref(run)
    for unit in run.units:
        unit.module.register_forward_pre_hook(partial(_before, owner, unit, cast), with_kwargs=True)
        unit.module.register_forward_hook(partial(_after, owner, unit), always_call=True)
    for gradient in run.gradients:
        of_flat = weakref.ref(gradient)
        for index, (full, part) in enumerate(zip(gradient.flat.fulls, gradient.flat.parts, strict=True)):
            node, _ = hook_gradient(full, partial(_on_gradient, owner, of_flat, index))
            gradient.nodes.append(node)
            part.register_hook(partial(_on_part, owner, of_flat, index))


def watch(run: Run, output: Tensor, unit: Unit, event: int | None, is_outermost: bool, leaf: Any) -> None:
    """Let a unit's output tell when its backward begins; local."""
    owner, of_unit = weakref.ref(run), weakref.ref(unit)
    output.register_hook(partial(_on_backward, owner, of_unit, unit.version, event, is_outermost, leaf))


def _before(
    owner: weakref.ref[Run], unit: Unit, cast: torch.dtype | None, _module: Any, args: Any, kwargs: Any
) -> Any:
    run = owner()
    if run is None or run.shows_wholes:
        return None
    run.before_forward(unit)
    if cast is None:
        return None
    return tuple(_converted(value, cast) for value in args), {k: _converted(v, cast) for k, v in kwargs.items()}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _after(owner: weakref.ref[Run], unit: Unit, _module: Any, _args: Any, output: Any) -> None:
    run = owner()
    if run is not None:
        run.after_forward(unit, output)


def _on_backward(
    owner: weakref.ref[Run],
    of_unit: weakref.ref[Unit],
    version: int,
    event: int | None,
    is_outermost: bool,
    leaf: Any,
    _: Tensor,
) -> None:
    run, unit = owner(), of_unit()
    if run is None or unit is None:
        return
    if torch.is_grad_enabled():
        _check_graph_of_gradients(run.units, accumulates=is_outermost and accumulates_into(leaf))
    run.before_backward(unit, version, event, is_outermost, leaf)


def _check_graph_of_gradients(units: Sequence[Unit], *, accumulates: bool) -> None:
    if accumulates:
        raise ValueError(
            "backward(create_graph=True): p.grad would have no graph, as it is an average over ranks; use "
            "torch.autograd.grad(..., inputs, create_graph=True), and backward() for the loss that is made of it"
        )
    if any(unit.slot is not None for unit in units):
        raise ValueError(
            "create_graph=True: units take turns in the memory that they are gathered in, so a backward through "
            "gradients would not find their parameters; ShardingStrategy.SHARD_GRAD_OP keeps them"
        )


def _on_gradient(owner: weakref.ref[Run], of_flat: weakref.ref[FlatGradient], index: int, *_: Any) -> None:
    run, gradient = owner(), of_flat()
    if run is not None and gradient is not None:
        run.on_gradient(gradient, index)


def _on_part(owner: weakref.ref[Run], of_flat: weakref.ref[FlatGradient], index: int, computed: Tensor) -> None:
    """Refuse gradients of the whole parameters that users see: nobody would average them."""
    run, gradient = owner(), of_flat()
    if run is None or gradient is None:
        return
    if run.by_hand is not None or computed.shape != gradient.flat.parts[index].shape:
        raise ValueError(
            f"the gradient of {gradient.flat.members[index].name!r} was computed from the whole parameter that was "
            "gathered by hand, and would not be averaged: compute the loss from what the wrapped model returns, or "
            "under torch.no_grad()"
        )
