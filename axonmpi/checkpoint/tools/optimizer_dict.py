"""An optimizer's `state_dict()`, made from a checkpoint's values, and the reverse.

    {"state": {"0.weight": {"step": …, "exp_avg": …}}, "param_groups": [{"lr": 0.1, …, "params": ["0.weight", …]}]}

Optimizers themselves number parameters. Here they have names, in the optimizer's order, so that both
`optimizer.load_state_dict()`, which goes by order, and `set_optimizer_state_dict()` of
`torch.distributed.checkpoint.state_dict`, which goes by names, load the dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..files.values import decoded, encoded
from ..shards.optimizer_shards import MANNER, encoded_options, label_of, split_name
from .checkpoint_data import CheckpointData


def optimizer_dict(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the dict that optimizers load; local.

    Args:
        state: The optimizer's values in `state.json`.
        tensors: Of its state, by the names of parameter and state.
    """
    of_parameters: dict[str, dict[str, Any]] = {}
    values = {name: decoded(value) for name, value in state["values"].items()}
    for full_name, value in {**tensors, **values}.items():
        name, key = split_name(full_name, state["parameters"])
        of_parameters.setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, (label, *_) in state["parameters"].items():
        options = {key: decoded(value) for key, value in state["groups"][label].items()}
        group = groups.setdefault(label, {**_manner_of(state["class"]), **options, "params": []})
        group["params"].append(name)
    return {"state": of_parameters, "param_groups": list(groups.values())}


def _manner_of(kind: str) -> dict[str, Any]:
    """Return the defaults of options that checkpoints do not have and optimizers expect."""
    optimizer_class = getattr(torch.optim, kind, None)
    parameters = inspect.signature(optimizer_class).parameters if optimizer_class is not None else {}
    return {name: parameters[name].default for name in MANNER if name in parameters}


def read_optimizer_dict(data: CheckpointData, where: str, given: Any) -> None:
    """Add an optimizer's dict to the content of a checkpoint; local.

    Args:
        data: Has the model already; changed in place.
        where: Name of the dict, for messages.
        given: The dict.

    Raises:
        CheckpointError: It is no optimizer's, or the parameters of its values are unknown.
    """
    if not isinstance(given, Mapping) or "param_groups" not in given:
        raise CheckpointError(f"{where}: expected an optimizer's state_dict(), with 'state' and 'param_groups'")
    groups: Sequence[Mapping[str, Any]] = given["param_groups"]
    _check_groups(where, groups, given.get("state", {}))
    of_parameters = {str(key): values for key, values in given.get("state", {}).items()}
    names = _names(data, where, groups, of_parameters)
    state: dict[str, Any] = {"class": None, "groups": {}, "parameters": {}, "values": {}}
    for group in groups:
        options = encoded_options(group, f"{where}: option")
        label = label_of(options)
        state["groups"][label] = options
        for key in group["params"]:
            tensor = data.model[names[str(key)]]
            state["parameters"][names[str(key)]] = [label, str(tensor.dtype), list(tensor.shape)]
    for parameter, values in of_parameters.items():
        for key, value in values.items():
            full_name = f"{names[parameter]}.{key}"
            if isinstance(value, Tensor):
                data.optimizer[full_name] = value
            else:
                state["values"][full_name] = encoded(value, f"{where}: state {full_name!r}")
    data.optimizer_state = state


def _check_groups(where: str, groups: Any, states: Any) -> None:
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise CheckpointError(
            f"{where}: expected 'param_groups' to be a list of dicts, each with a list of 'params'"
        )
    if not isinstance(states, Mapping) or not all(isinstance(values, Mapping) for values in states.values()):
        raise CheckpointError(f"{where}: expected 'state' to be a dict of dicts, one for each parameter")


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


def _names(
    data: CheckpointData, where: str, groups: Sequence[Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the parameters' names by the optimizer's keys for them, which are names or numbers."""
    keys = [str(key) for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    elif all(key in data.model or key in data.aliases for key in keys):
        names = keys
    elif len(groups) == 1 and _fit(list(data.model.values()), [states.get(key, {}) for key in keys]):
        names = list(data.model)
    else:
        raise CheckpointError(
            f"{where}: numbers {len(keys)} parameters, and which of the model's {len(data.model)} tensors they are "
            "is not clear: save the state of an optimizer that was built on model.named_parameters(), or take the "
            "model alone by --only-model"
        )
    names = [data.aliases.get(name, name) for name in names]
    if unknown := [name for name in names if name not in data.model]:
        raise CheckpointError(f"{where}: has {unknown[0]!r}, which the model has not")
    if foreign := [key for key in states if key not in keys]:
        raise CheckpointError(f"{where}: keeps state for {foreign[0]!r}, which is in none of its groups")
    return dict(zip(keys, names, strict=True))


def _fit(tensors: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if each tensor has the shape of a tensor in the state at the same position, if there is any."""
    if len(tensors) != len(states):
        return False
    for tensor, values in zip(tensors, states, strict=True):
        shapes = [value.shape for value in values.values() if isinstance(value, Tensor) and value.dim()]
        if shapes and tensor.shape not in shapes:
            return False
    return True
