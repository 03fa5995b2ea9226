"""The dict that programs save with torch, read and made.

    {"weight": …}                                    a model's state dict alone
    {"model": {…}, "optimizer": {…}, "epoch": 3}     with other states, under the names that people give them

Values under other names are left out, and listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...utils.text import quoted
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
"""The names of each value in torch's examples and in programs for training."""
_EXTRA_STATE = "_extra_state"
_MOST_NAMES = 8


def read_torch_dict(data: CheckpointData, source: str, saved: Any, *, only_model: bool) -> None:
    """Add the values of a saved dict to the content of a checkpoint; local.

    Args:
        data: Changed in place.
        source: Path of the file, for messages.
        saved: The dict.
        only_model: Leave an optimizer's state alone.

    Raises:
        CheckpointError: It is no dict with a model's state dict, or two names stand for one value.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{source}: expected a dict, got {type(saved).__name__}")
    if _is_state_dict(saved):
        _add_model(data, source, saved)
        return
    if len(saved) == 1 and not _name_of("model", saved, source):
        (inner,) = saved.values()
        if isinstance(inner, Mapping):  # as in torch's examples of DCP, under "app"
            read_torch_dict(data, source, inner, only_model=only_model)
            return
    found = {key: _name_of(key, saved, source) for key in NAMES if key != "optimizer" or not only_model}
    model = saved.get(found.pop("model"))
    if not isinstance(model, Mapping) or not _is_state_dict(model):
        listed = quoted(list(saved), _MOST_NAMES) or "nothing in it"
        raise CheckpointError(
            f"{source}: expected a state dict, or a dict with one under {' or '.join(map(repr, NAMES['model']))}, "
            f"got a dict with {listed}"
        )
    _add_model(data, source, model)
    known = {*found.values(), *NAMES["model"]}
    data.left_out += [f"{name!r} ({type(saved[name]).__name__})" for name in saved if name not in known]
    if optimizer := found.pop("optimizer", ""):
        read_optimizer_dict(data, f"{source}: {optimizer!r}", _single(saved[optimizer]))
    data.values = {key: _single(saved[name]) for key, name in found.items() if name}


def _is_state_dict(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values.values()) and all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith(_EXTRA_STATE))
        for name, value in values.items()
    )


def _name_of(key: str, saved: Mapping[str, Any], source: str) -> str:
    """Return the name of a value in a dict; empty if it is not there."""
    names = [name for name in NAMES[key] if name in saved]
    if len(names) > 1:
        raise CheckpointError(f"{source}: has {' and '.join(map(repr, names))}: which of them is the {key}'s?")
    return names[0] if names else ""


def _single(value: Any) -> Any:
    """Return the dict in a list of one, which programs for several optimizers save; otherwise the value."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) else value


def _add_model(data: CheckpointData, source: str, values: Mapping[str, Any]) -> None:
    names: dict[Any, str] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            data.extra_state[name] = value
            continue
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{source}: {name!r} is {value.layout}, expected a plain tensor")
        if value.is_meta and data.format != "dcp":
            raise CheckpointError(f"{source}: {name!r} is on the meta device: it has no values")
        first = names.setdefault(_memory_of(value), name)
        if first == name:
            data.model[name] = (value.detach() if value.requires_grad else value).contiguous()
        else:
            data.aliases[name] = first


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors: views of the same memory with the same strides."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def torch_dict_of(data: CheckpointData) -> dict[str, Any]:
    """Return a checkpoint as a dict of state dicts, with the values of its tensors; local.

    A model without other values is its state dict alone.
    """
    model: dict[str, Any] = dict(zip(data.model, data.fetch(data.model.values()), strict=True))
    model |= {name: model[of] for name, of in data.aliases.items() if of in model} | data.extra_state
    values = {name: value for name, value in data.values.items() if value is not None}
    if data.optimizer_state is None and not values:
        return model
    saved: dict[str, Any] = {"model": model}
    if data.optimizer_state is not None:
        tensors = dict(zip(data.optimizer, data.fetch(data.optimizer.values()), strict=True))
        saved["optimizer"] = optimizer_dict(data.optimizer_state, tensors)
    return saved | values
