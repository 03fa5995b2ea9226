"""Hooks on all optimizers of the process: steps see ordinary gradients, norms of shards are refused.

    gradients arrive ─▶ marked ─▶ norms are refused ─▶ a step sees ordinary tensors ─▶ marked again

Steps of torch's optimizers are elementwise, and as quick as without marks, since they see ordinary tensors. Every
function that another optimizer calls on a shard is checked. No other file puts hooks on all optimizers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..across_ranks.sharded_parameters import axes_of, slice_of
from ..utils.torch_internals import plain_tensors
from .shard_tensors import PartOfGradient, PartOfState, Shard, ShardOfParameter, as_part_of_state

_Undo = list[Callable[[], None]]

OF_ALL_PARAMETERS = (torch.optim.LBFGS,)
"""Optimizers whose step takes products over all parameters."""
OF_WHOLE_PARAMETERS = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)
"""Optimizers whose step on an element depends on the rest of its parameter."""


# ---- gradients --------------------------------------------------------------------------------------------------


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Mark gradients as shards of full ones, which steps of optimizers unmark; local."""
    if not _marks:
        watch_optimizers()
    with plain_tensors():
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor:
                gradient.__class__ = PartOfGradient if slice_of(parameter) is None else Shard


def mark_gradient(parameter: Tensor) -> None:
    """Mark a parameter's complete gradient; a post-accumulate hook; local."""
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
    """Make ordinary tensors of parameters and gradients, without gradients of empty shards; return the way back."""
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

StepHook = Callable[[Optimizer], None]

_lock = threading.Lock()  # mock ranks are threads that make wrappers at the same time
_installed: list[RemovableHandle] = []
_marks = False  # True once a wrapper marks shards or gradients
_before: list[StepHook] = []
_after: list[StepHook] = []


def watch_optimizers() -> None:
    """Hook all optimizers: their steps see ordinary gradients, their state dicts are marked; local."""
    global _marks
    _install()
    _marks = True


def _install() -> None:
    with _lock:
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_before_step))
            _installed.append(register_optimizer_step_post_hook(_after_step))


def before_steps(hook: StepHook, *, first: bool = False) -> None:
    """Call a function before each step of any optimizer, while shards and gradients are marked; local.

    Args:
        hook: The function; added once.
        first: Call it before the functions that were added earlier.
    """
    _install()
    with _lock:
        if hook not in _before:
            _before.insert(0 if first else len(_before), hook)


def after_steps(hook: StepHook) -> Callable[[], None]:
    """Call a function, added once, after each step of any optimizer; return a function that removes it; local."""
    _install()
    with _lock:
        if hook not in _after:
            _after.append(hook)
    return partial(_after.remove, hook)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _end_step(optimizer)  # of a step that has raised
    for hook in [*_before]:
        hook(optimizer)
    if not _marks:
        return None
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


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _end_step(optimizer)
    for hook in [*_after]:  # other threads may remove theirs
        hook(optimizer)


def _begin_step(optimizer: Optimizer) -> None:
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")  # each function of others is checked
    undo = _unmark(p for p in parameters_of(optimizer) if is_torchs or not getattr(p, "is_split", False))
    if undo:
        _stepping[optimizer] = undo


def _end_step(optimizer: Optimizer) -> None:
    for change_back in reversed(_stepping.pop(optimizer, [])):
        change_back()


def _with_marks(optimizer: Optimizer, value: Any) -> Any:
    """Return a closure that sees marked shards and gradients, and other arguments unchanged."""
    if not callable(value):
        return value

    def closure() -> Any:
        _end_step(optimizer)
        result = value()
        _begin_step(optimizer)
        return result

    return closure


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


def _marked_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which state of sharded parameters refuses to be saved."""
    state = dict(state_dict["state"])
    for key, parameter in enumerate(parameters_of(optimizer)):
        if key in state and axes_of(parameter):
            state[key] = {
                name: as_part_of_state(value) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state[key].items()
            }
    return {**state_dict, "state": state}


def _take_ordinary(optimizer: Optimizer) -> None:
    """Make ordinary tensors of marked ones in state that an optimizer made early or loaded."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Shard | PartOfState):
                state[name] = value.as_subclass(Tensor)
