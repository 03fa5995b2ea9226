"""The dict that programs save with torch, understood and made.

    {"weight": …}                                    a model's state dict alone
    {"model": {…}, "optimizer": {…}, "epoch": 3}     with more beside it, under the names that people give it

What stands under other names is left out, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from .checkpoint_data import CheckpointData
from .optimizer_dict import optimizer_dict, read_optimizer_dict

NAMES = {
    "model": ("model", "state_dict", "model_state_dict", "module"),
    "optimizer": ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optimizer_states"),
    "scheduler": ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler"),
    "sampler": ("sampler", "sampler_state_dict"),
    "step": ("step", "global_step", "iteration"),
    "epoch": ("epoch",),
    "extra": ("extra",),
}
"""What is in such a dict, and the names that it has in dicts of torch's examples and of programs for training."""
_EXTRA_STATE = "_extra_state"


def read_torch_dict(made: CheckpointData, source: str, nested: Any, *, only_model: bool) -> None:
    """Put what a dict has where it belongs; local.

    Args:
        made: Gets it.
        source: Where the dict is from, for messages.
        nested: The dict.
        only_model: Whether an optimizer's state is left alone.

    Raises:
        CheckpointError: It is not clear what is what.
    """
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{source}: expected a dict, got {type(nested).__name__}")
    if _is_state_dict(nested):
        _read_model(made, source, nested)
        return
    if len(nested) == 1 and not _found(nested, "model", source):
        (inner,) = nested.values()
        if isinstance(inner, Mapping):  # as torch's own examples of DCP have it, under "app"
            read_torch_dict(made, source, inner, only_model=only_model)
            return
    found = {what: _found(nested, what, source) for what in NAMES if what != "optimizer" or not only_model}
    model = nested.get(found["model"])
    if not isinstance(model, Mapping) or not _is_state_dict(model):
        raise CheckpointError(
            f"{source}: expected a state dict, or a dict with one under {' or '.join(map(repr, NAMES['model']))}, "
            f"got a dict with {_listed(nested)}"
        )
    _read_model(made, source, model)
    made.left_out += [f"{name!r} ({type(nested[name]).__name__})" for name in nested if name not in found.values()]
    if optimizer := found.pop("optimizer", ""):
        read_optimizer_dict(made, f"{source}: {optimizer!r}", _single(nested[optimizer]))
    others = {what: name for what, name in found.items() if name and what != "model"}
    made.values = {what: _single(nested[name]) for what, name in others.items()}


def _is_state_dict(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values.values()) and all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith(_EXTRA_STATE))
        for name, value in values.items()
    )


def _found(nested: Mapping[str, Any], what: str, source: str) -> str:
    names = [name for name in NAMES[what] if name in nested]
    if len(names) > 1:
        raise CheckpointError(f"{source}: has {' and '.join(map(repr, names))}: which of them is the {what}'s?")
    return names[0] if names else ""


def _single(value: Any) -> Any:
    """Return what is in a list of one dict, as programs with several optimizers have it, and else the value."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) else value


def _read_model(made: CheckpointData, source: str, values: Mapping[str, Any]) -> None:
    names: dict[Any, str] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_quantized:
                raise CheckpointError(f"{source}: {name!r} is {value.layout}, expected a plain tensor")
            if value.is_meta and made.format != "dcp":
                raise CheckpointError(f"{source}: {name!r} is on the meta device: it has no values")
            first = names.setdefault(_memory_of(value), name)
            if first == name:
                made.model[name] = (value.detach() if value.requires_grad else value).contiguous()
            else:
                made.aliases[name] = first
        else:
            made.extra_state[name] = value


def _memory_of(tensor: Tensor) -> Any:
    """Return what is equal for tensors that are the same memory, seen in the same way."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _listed(names: Iterable[Any], most: int = 8) -> str:
    shown = list(map(repr, names))
    return ", ".join(shown[:most] + ["..."] * (len(shown) > most)) or "nothing in it"


def torch_dict_of(data: CheckpointData, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return a checkpoint as a dict of state dicts; a model without anything else is its state dict alone; local.

    Args:
        data: What there is.
        tensors: Of the model and of the optimizer, with their values.
    """
    model: dict[str, Any] = dict(tensors["model"])
    model |= {name: model[of] for name, of in data.aliases.items() if of in model} | data.extra_state
    values = {name: value for name, value in data.values.items() if value is not None}
    if data.optimizer_state is None and not values:
        return model
    nested: dict[str, Any] = {"model": model}
    if data.optimizer_state is not None:
        nested["optimizer"] = optimizer_dict(data.optimizer_state, tensors["optimizer"])
    return nested | values
