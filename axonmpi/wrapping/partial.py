"""Tensors that are a rank's part of something, as users meet them.

    part.grad                         its norm is that of a part: refused, as each rank would get another one
    model.state_dict()["weight"]      a file of it could not be loaded as the model: refused
    optimizer.state_dict()["state"]   likewise

They say what to call instead. In everything else they are tensors; what is made of one and has its shape, such as
a copy, is one, too, and `tensor.as_subclass(torch.Tensor)` is none. Optimizers see gradients as ordinary tensors
while they step, so that their own code stays as quick as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..collectives.divided_parameters import axes_of, is_shown_in_part
from ..utils.torch_internals import plain_tensors

__all__ = [
    "OF_ALL_PARAMETERS",
    "OF_WHOLE_PARAMETERS",
    "PartOfGradient",
    "PartOfState",
    "as_part_of_state",
    "mark_gradient",
    "mark_gradients",
    "mark_state",
    "ordinary_gradients",
    "parameters_of",
    "watch_optimizers",
]

OF_ALL_PARAMETERS = (torch.optim.LBFGS,)
"""Optimizers whose step takes products over all parameters."""
OF_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose step on an element depends on the rest of its parameter."""


class _Part(Tensor):
    """A tensor with which some functions are refused."""

    refused: frozenset[str]
    error: type[Exception]
    message: str

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse some functions; what others return in the shape of a part is a part."""
        name = getattr(function, "__name__", "")
        if name in cls.refused:
            raise cls.error(cls.message)
        with plain_tensors():
            result = function(*args, **(kwargs or {}))
            is_new = type(result) is Tensor and not any(result is given for given in args)
            if is_new and name != "as_subclass":
                same = any(isinstance(given, cls) and given.shape == result.shape for given in args)
                return result.as_subclass(cls) if same else result
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy; local."""
        copied: Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied


class PartOfGradient(_Part):
    """The gradient of a part of a parameter, of which other ranks have other parts."""

    refused = frozenset(
        {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm"}
        | {"_amp_foreach_non_finite_check_and_unscale_"}
    )

    error = ValueError
    message = (
        "this rank has a part of the gradient, whose norm and infinities are not those of the other ranks' "
        "parts. Clip with fsdp.clip_grad_norm(max_norm), pipeline.clip_grad_norm(max_norm) or "
        "axonmpi.clip_grad_norm(model, max_norm), which return the norm of the whole, and with "
        "max_norm=math.inf only measure; scale losses with axonmpi.ShardedGradScaler. "
        "gradient.as_subclass(torch.Tensor) is the part as an ordinary tensor"
    )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travel as an ordinary tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class PartOfState(_Part):
    """A part of a parameter, or of what an optimizer keeps for it, in a state dict."""

    refused = frozenset({"untyped_storage", "storage", "_typed_storage"})  # what writes files asks for these

    error = TypeError
    message = (
        "this is a rank's part of a parameter, or of an optimizer's state for it, and a file of it could not "
        "be loaded as the model. Save what fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer) "
        "or, with tensor parallelism, axonmpi.tensor.full_state_dict(model) return; all ranks call them. For "
        "a file of each rank's own, value.as_subclass(torch.Tensor) is an ordinary tensor"
    )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse."""
        raise self.error(self.message)


def as_part_of_state(value: Tensor) -> Tensor:
    """Return a view of a tensor that refuses to be saved; local."""
    return value.as_subclass(PartOfState)


def mark_state(module: nn.Module) -> None:
    """Mark parts of a module's own parameters in its state dict as not to be saved; local."""
    module.register_state_dict_post_hook(_mark_parts)
    module.register_load_state_dict_pre_hook(_unmark_parts)


def _mark_parts(module: nn.Module, state: dict[str, Any], prefix: str, _local: object) -> None:
    shards: Mapping[str, object] = getattr(module, "shards", {})
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        is_part = parameter is not None and (is_shown_in_part(parameter) or (name in shards and axes_of(parameter)))
        if is_part and type(value) is Tensor:  # and not, as was asked for, the parameter itself
            state[prefix + name] = as_part_of_state(value)


def _unmark_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name in module._parameters:
        value = state.get(prefix + name)
        if type(value) is PartOfState:
            state[prefix + name] = value.as_subclass(Tensor)


# ---- gradients --------------------------------------------------------------------------------------------------


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Mark gradients as parts of larger ones; local."""
    watch_optimizers()
    for parameter in parameters:
        if type(parameter.grad) is Tensor:
            parameter.grad.__class__ = PartOfGradient


def mark_gradient(parameter: Tensor) -> None:
    """Mark one parameter's gradient; a hook for when it is complete; local."""
    mark_gradients([parameter])


@contextmanager
def ordinary_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let gradients of parameters be ordinary tensors in the block; local."""
    marked = _unmark(parameters)
    try:
        yield
    finally:
        _mark(marked)


def _unmark(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    marked: list[Tensor] = [gradient for gradient in gradients if type(gradient) is PartOfGradient]
    for gradient in marked:
        gradient.__class__ = Tensor
    return marked


def _mark(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        gradient.__class__ = PartOfGradient


# ---- optimizers -------------------------------------------------------------------------------------------------

_stepping: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def watch_optimizers() -> None:
    """Hook all optimizers: their steps see ordinary gradients, their state dicts are marked; local."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _check_sees_enough(optimizer)
    marked = _unmark(parameters_of(optimizer))
    if marked:
        _stepping[optimizer] = marked
    if optimizer not in _known:
        _known.add(optimizer)
        _take_ordinary(optimizer)
        optimizer.register_state_dict_post_hook(_marked_state)
        optimizer.register_load_state_dict_post_hook(_take_ordinary)


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
    _mark(_stepping.pop(optimizer, ()))


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
    """Make ordinary tensors of the marked ones in a state that an optimizer has loaded."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if type(value) is PartOfState:
                state[name] = value.as_subclass(Tensor)
