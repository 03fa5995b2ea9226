"""Optimizers of parts: gradients are marked between steps, and ordinary tensors while torch's optimizers step.

    gradients arrive ─▶ marked ─▶ norms are refused ─▶ a step sees ordinary tensors ─▶ marked again

So the steps of torch's optimizers stay as quick as they are. What others do is looked at, function by function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..collectives.divided_parameters import axes_of, elements_of
from ..utils.torch_internals import plain_tensors
from .shard_tensors import PartOfGradient, PartOfState, Shard, ShardOfParameter, as_part_of_state

_Undo = list[Callable[[], None]]

OF_ALL_PARAMETERS = (torch.optim.LBFGS,)
"""Optimizers whose step takes products over all parameters."""
OF_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose step on an element depends on the rest of its parameter."""


# ---- gradients --------------------------------------------------------------------------------------------------


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Mark gradients as parts of larger ones; local."""
    watch_optimizers()
    with plain_tensors():
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor:
                gradient.__class__ = PartOfGradient if elements_of(parameter) is None else Shard


def mark_gradient(parameter: Tensor) -> None:
    """Mark one parameter's gradient; a hook for when it is complete; local."""
    mark_gradients([parameter])


@contextmanager
def ordinary_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters and their gradients be ordinary tensors in the block; local."""
    undo = _unmark(parameters)
    try:
        yield
    finally:
        for change_back in reversed(undo):
            change_back()


def _unmark(parameters: Iterable[Tensor]) -> _Undo:
    """Let parameters and their gradients be ordinary tensors, an empty shard have no gradient; local."""
    undo: _Undo = []
    shown: Any
    for shown in parameters:
        if issubclass(type(shown), ShardOfParameter):
            undo.append(partial(setattr, shown, "__class__", ShardOfParameter))
            shown.__class__ = shown.ordinary
        gradient, kind = shown.grad, type(shown.grad)
        if issubclass(kind, PartOfGradient | Shard):
            undo.append(partial(setattr, gradient, "__class__", kind))
            gradient.__class__ = Tensor
            if not shown.numel():
                shown.grad = None
                undo.append(partial(setattr, shown, "grad", gradient))
    return undo


# ---- optimizers -------------------------------------------------------------------------------------------------

_stepping: weakref.WeakKeyDictionary[Optimizer, _Undo] = weakref.WeakKeyDictionary()
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


_around: list[tuple[Callable[[Optimizer], None], Callable[[Optimizer], None]]] = []


@functools.cache
def watch_optimizers() -> None:
    """Hook all optimizers: their steps see ordinary gradients, their state dicts are marked; local."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def around_steps(before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
    """Have functions called before and after all steps, while shards and gradients are marked; local."""
    watch_optimizers()
    _around.append((before, after))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _end_step(optimizer)  # of one that has raised
    for before, _ in _around:
        before(optimizer)
    _check_sees_enough(optimizer)
    _begin_step(optimizer)
    if optimizer not in _known:
        _known.add(optimizer)
        _take_ordinary(optimizer)
        optimizer.register_state_dict_post_hook(_marked_state)
        optimizer.register_load_state_dict_post_hook(_take_ordinary)
    if not any(map(callable, (*args, *kwargs.values()))):
        return None
    marked = partial(_with_marks, optimizer)
    return tuple(map(marked, args)), {name: marked(value) for name, value in kwargs.items()}


def _begin_step(optimizer: Optimizer) -> None:
    knows_elements = _treats_elements(optimizer)
    undo = _unmark(p for p in parameters_of(optimizer) if knows_elements or not getattr(p, "is_split", False))
    if undo:
        _stepping[optimizer] = undo


def _end_step(optimizer: Optimizer) -> None:
    for change_back in reversed(_stepping.pop(optimizer, [])):
        change_back()


def _with_marks(optimizer: Optimizer, value: Any) -> Any:
    """Return a closure that sees marked shards and gradients; other arguments of a step unchanged; local."""
    if not callable(value):
        return value

    def closure() -> Any:
        _end_step(optimizer)
        result = value()
        _begin_step(optimizer)
        return result

    return closure


def _treats_elements(optimizer: Optimizer) -> bool:
    """Return True for torch's own optimizers, whose needs are known; each function of others is checked; local."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _check_sees_enough(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, OF_ALL_PARAMETERS + OF_WHOLE_PARAMETERS):
        return
    if any(axis.of_layer for parameter in parameters_of(optimizer) for axis in axes_of(parameter)):
        raise ValueError(
            f"the step of {type(optimizer).__name__} needs whole parameters, and layers of this model are divided "
            "among ranks: choose an optimizer that treats each element by itself, such as AdamW"
        )


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups of an optimizer; local."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _end_step(optimizer)
    for _, after in _around:
        after(optimizer)


def _marked_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict in which the state of parts of parameters refuses to be saved."""
    state = dict(state_dict["state"])
    for key, parameter in enumerate(parameters_of(optimizer)):
        if key in state and axes_of(parameter):
            state[key] = {
                name: as_part_of_state(value) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state[key].items()
            }
    return {**state_dict, "state": state}


def _take_ordinary(optimizer: Optimizer) -> None:
    """Make ordinary tensors of the marked ones in a state that an optimizer has made early or loaded; local."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Shard | PartOfState):
                state[name] = value.as_subclass(Tensor)
