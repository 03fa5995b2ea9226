"""An optimizer's state as torch has it, made from what a checkpoint has, and the reverse.

    {"state": {"0.weight": {"step": …, "exp_avg": …}}, "param_groups": [{"lr": 0.1, …, "params": ["0.weight", …]}]}

Parameters are named, in the order in which the optimizer has them. So `optimizer.load_state_dict()`, which goes by
order, loads it, and `set_optimizer_state_dict()` of `torch.distributed.checkpoint.state_dict`, which goes by names.
Optimizers themselves number parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..files.values import decoded, encoded
from ..shards.optimizer_shards import MANNER, label_of, split_name
from .checkpoint_data import CheckpointData


def optimizer_dict(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the dict that optimizers load; local.

    Args:
        state: What `state.json` has of the optimizer.
        tensors: Of its state, by the names of parameter and state.
    """
    made: dict[str, dict[str, Any]] = {}
    values = {name: decoded(value) for name, value in state["values"].items()}
    for full, value in {**tensors, **values}.items():
        name, key = split_name(full, state["parameters"])
        made.setdefault(name, {})[key] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, (label, *_) in state["parameters"].items():
        options = {key: decoded(value) for key, value in state["groups"][label].items()}
        group = groups.setdefault(label, {**_manner_of(state["class"]), **options, "params": []})
        group["params"].append(name)
    return {"state": made, "param_groups": list(groups.values())}


def _manner_of(kind: str) -> dict[str, Any]:
    """Return the defaults of options that checkpoints leave to the optimizer, and that optimizers expect."""
    made = getattr(torch.optim, kind, None)
    parameters = inspect.signature(made).parameters if made is not None else {}
    return {name: parameters[name].default for name in MANNER if name in parameters}


def read_optimizer_dict(made: CheckpointData, where: str, given: Any) -> None:
    """Put an optimizer's dict where it belongs; local.

    Args:
        made: Has the model, and gets the optimizer's state.
        where: What the dict is, for messages.
        given: The dict.

    Raises:
        CheckpointError: It does not say what belongs to which parameter.
    """
    if not isinstance(given, Mapping) or "param_groups" not in given:
        raise CheckpointError(f"{where}: expected an optimizer's state_dict(), with 'state' and 'param_groups'")
    groups: Sequence[Mapping[str, Any]] = given["param_groups"]
    _check_groups(where, groups, given.get("state", {}))
    kept = {str(key): value for key, value in given.get("state", {}).items()}
    names = _names(made, where, groups, kept)
    state: dict[str, Any] = {"class": None, "groups": {}, "parameters": {}, "values": {}}
    for group in groups:
        options = {
            key: encoded(value, f"{where}: option {key!r}")
            for key, value in group.items()
            if key not in ("params", "param_names", *MANNER)
        }
        label = label_of(options)
        state["groups"][label] = options
        for key in group["params"]:
            tensor = made.model[names[str(key)]]
            state["parameters"][names[str(key)]] = [label, str(tensor.dtype), list(tensor.shape)]
    for key, values in kept.items():
        for item, value in values.items():
            full = f"{names[key]}.{item}"
            if isinstance(value, Tensor):
                made.optimizer[full] = value
            else:
                state["values"][full] = encoded(value, f"{where}: state {full!r}")
    made.optimizer_state = state


def _check_groups(where: str, groups: Any, kept: Any) -> None:
    if not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        raise CheckpointError(
            f"{where}: expected 'param_groups' to be a list of dicts, each with a list of 'params'"
        )
    if not isinstance(kept, Mapping) or not all(isinstance(value, Mapping) for value in kept.values()):
        raise CheckpointError(f"{where}: expected 'state' to be a dict of dicts, one for each parameter")


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


def _names(
    made: CheckpointData, where: str, groups: Sequence[Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the parameters' names by what the optimizer calls them."""
    keys = [str(key) for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    elif all(key in made.model or key in made.aliases for key in keys):
        names = keys
    elif len(groups) == 1 and _fit(list(made.model.values()), [kept.get(key, {}) for key in keys]):
        names = list(made.model)
    else:
        raise CheckpointError(
            f"{where}: numbers {len(keys)} parameters, and which of the model's {len(made.model)} tensors they are "
            "is not clear: save the state of an optimizer that was built on model.named_parameters(), or take the "
            "model alone by --only-model"
        )
    names = [made.aliases.get(name, name) for name in names]
    if unknown := [name for name in names if name not in made.model]:
        raise CheckpointError(f"{where}: has {unknown[0]!r}, which the model has not")
    if foreign := [key for key in kept if key not in keys]:
        raise CheckpointError(f"{where}: keeps state for {foreign[0]!r}, which is in none of its groups")
    return dict(zip(keys, names, strict=True))


def _fit(tensors: Sequence[Tensor], kept: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the state of each parameter fits the tensor at its place."""
    if len(tensors) != len(kept):
        return False
    shaped = [
        [value.shape for value in of_one.values() if isinstance(value, Tensor) and value.dim()] for of_one in kept
    ]
    return all(tensor.shape in shapes or not shapes for tensor, shapes in zip(tensors, shaped, strict=True))
