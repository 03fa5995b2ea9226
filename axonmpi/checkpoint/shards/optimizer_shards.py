"""This rank's shards of an optimizer's state, by the names of parameters.

    exp_avg of a parameter     "blocks.0.weight.exp_avg", with the placement of the rank's shard of the parameter
    step                       "blocks.0.weight.step", without dims, the same on all ranks
    options, other values      JSON: each distinct set of options, and for each parameter the label of its set

None of this depends on the layout: parameters are grouped by equal options, whatever the groups of a rank's
optimizer are. Loading allocates memory beside the optimizer's state, which replaces it when all of it was read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...utils.text import quoted
from ...wrapping.optimizer_hooks import OF_ALL_PARAMETERS
from ..files.tensor_file import TensorSpec
from ..files.values import decoded, encoded
from .model_shards import ModelShards
from .parameter_placement import Placement
from .tensor_shard import TensorShard

_MOST_NAMES = 3
MANNER = ("foreach", "fused", "capturable", "differentiable")
"""Options of how a step is computed, with the same result: the optimizer in hand keeps its own."""
NO_OPTIONS = ("params", "param_names", *MANNER)
"""Keys of a parameter group that checkpoints do not save as options."""


class OptimizerShards(NamedTuple):
    """This rank's shards of an optimizer's state.

    Attributes:
        shards: Of the tensors in the state.
        state: The other values as JSON. `"class"`: the optimizer's. `"groups"`: options by a label that depends on
            them alone. `"parameters"`: by name the label of its options, its dtype and its shape. `"values"`: state
            that is no tensor, by the names of parameter and state. Such dicts of several ranks can be merged.
    """

    shards: list[TensorShard]
    state: dict[str, Any]


def optimizer_shards(optimizer: Optimizer, model: ModelShards) -> OptimizerShards:
    """Find this rank's shards of an optimizer's state; local, within `model.stable()`.

    Args:
        optimizer: On parameters of the model.
        model: This rank's shards of the model.

    Raises:
        ValueError: It has parameters of another model, or state that a file by parameter cannot hold.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, OF_ALL_PARAMETERS):
        raise ValueError(
            f"optimizer: {kind} keeps vectors over all parameters, which a file by parameter cannot hold: choose "
            "another one, or save its state_dict() yourself"
        )
    shards: list[TensorShard] = []
    state: dict[str, Any] = {"class": kind, "groups": {}, "parameters": {}, "values": {}}
    for group, placements in _groups_of(optimizer, model):
        options = encoded_options(group, f"optimizer: {kind}'s option")
        label = label_of(options)
        for parameter, placement in placements:
            if placement.is_first:
                state["groups"][label] = options
                state["parameters"][placement.name] = [label, str(parameter.dtype), list(placement.shape)]
                _add_state(optimizer, parameter, placement, shards, state["values"])
    _check_keys(optimizer)
    return OptimizerShards(shards, state)


def encoded_options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a parameter group as JSON; local.

    Args:
        group: One of the optimizer's `param_groups`.
        where: Name of an option, for messages.

    Raises:
        ValueError: A checkpoint cannot hold an option.
    """
    options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
    return {key: encoded(value, f"{where} {key!r}") for key, value in options.items()}


def label_of(options: Mapping[str, Any]) -> str:
    """Return the label of a group's options, the same for the same options; local."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def _add_state(
    optimizer: Optimizer, parameter: Tensor, placement: Placement, shards: list[TensorShard], values: dict[str, Any]
) -> None:
    """Add the state of a parameter: its tensors to the shards, its other values to the values."""
    kind = type(optimizer).__name__
    state = {} if placement.is_empty else optimizer.state.get(parameter, {})
    for key, value in state.items():
        where = f"optimizer: state {key!r} that {kind} keeps for {placement.name!r}"
        if not isinstance(key, str):
            raise ValueError(f"optimizer: {kind} keeps state under {key!r} for {placement.name!r}, expected a text")
        if not isinstance(value, Tensor):
            values[f"{placement.name}.{key}"] = encoded(value, where)
            continue
        memory = value.detach().as_subclass(Tensor)
        if value.dim() and tuple(value.shape) == placement.memory_shape:
            shards.append(placement.shard(memory, key))
        elif not value.dim() or placement.is_full:
            shards.append(placement.unsharded_state(memory, key))
        else:
            raise ValueError(
                f"{where} has shape {list(value.shape)}, and this rank's shard of the parameter "
                f"{list(placement.memory_shape)}: state of another shape can be saved only where a rank has full "
                "parameters, as with DDP or shard_by='parameters'"
            )


def _groups_of(
    optimizer: Optimizer, model: ModelShards
) -> Iterator[tuple[dict[str, Any], list[tuple[Tensor, Placement]]]]:
    """Yield each parameter group, with its parameters and their placements."""
    for number, group in enumerate(optimizer.param_groups):
        placements = []
        for parameter in group["params"]:
            placement = model.placement_of(parameter)
            if placement is None:
                raise ValueError(
                    f"optimizer: its group {number} has a parameter of shape {list(parameter.shape)} that is not "
                    "of this model: build the optimizer on the model's parameters, after wrapping it"
                )
            placements.append((parameter, placement))
        yield group, placements


def _check_keys(optimizer: Optimizer) -> None:
    """Raise if there is state of anything but a parameter."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            shown = f"a tensor of shape {list(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} keeps state for {shown}, which is none of its parameters: "
                "a file by parameter cannot hold it"
            )


# ---- loading ----------------------------------------------------------------------------------------------------


@dataclass
class _SavedState:
    """The saved state of one parameter."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def prepare_optimizer(
    optimizer: Optimizer, model: ModelShards, specs: Mapping[str, TensorSpec], state: Mapping[str, Any]
) -> tuple[list[TensorShard], Callable[[], None]]:
    """Allocate memory for this rank's shards of a saved state; local, within `model.stable()`.

    The optimizer has the class of the saved one, and may have other groups on other ranks, if all parameters of a
    group had the same options. State of empty shards is left as it is, since no step uses it.

    Args:
        optimizer: To be loaded.
        model: This rank's shards of the model.
        specs: The saved tensors by name.
        state: `OptimizerShards.state`, merged over all ranks.

    Returns:
        Shards to read into, under their names in the file; and a function that puts them and the options into the
        optimizer, which is unchanged until then.

    Raises:
        ValueError: The saved state does not fit the optimizer.
    """
    kind = type(optimizer).__name__
    if state["class"] != kind:
        raise ValueError(f"optimizer: expected a {state['class']}, whose state was saved, got a {kind}")
    saved = _by_parameter(specs, state)
    shards: list[TensorShard] = []
    options: list[dict[str, Any]] = []
    states: list[tuple[Tensor, dict[str, Any]]] = []
    for index, (group, placements) in enumerate(_groups_of(optimizer, model)):
        named = [(parameter, _named(placement, model, saved)) for parameter, placement in placements]
        options.append(_options_for(index, group, [placement for _, placement in named], saved, state["groups"]))
        for parameter, placement in named:
            if not placement.is_empty:
                new = _allocated(optimizer, group, parameter, placement, saved[placement.name], shards)
                states.append((parameter, new))

    def put() -> None:
        for group, chosen in zip(optimizer.param_groups, options, strict=True):
            group.update(chosen)
        for parameter, new in states:
            optimizer.state.pop(parameter, None)
            if new:
                optimizer.state[parameter] = new

    return shards, put


def _by_parameter(specs: Mapping[str, TensorSpec], state: Mapping[str, Any]) -> dict[str, _SavedState]:
    saved = {
        name: _SavedState(label, dtype, tuple(shape)) for name, (label, dtype, shape) in state["parameters"].items()
    }
    for full_name, spec in specs.items():
        name, key = split_name(full_name, saved)
        saved[name].tensors[key] = spec
    for full_name, value in state["values"].items():
        name, key = split_name(full_name, saved)
        saved[name].values[key] = decoded(value)
    return saved


def split_name(full_name: str, parameters: Collection[str]) -> tuple[str, str]:
    """Split the name of a tensor in the file into the names of the parameter and of its state; local.

    Args:
        full_name: The tensor's name.
        parameters: Names of the parameters.

    Raises:
        ValueError: The tensor is the state of none of them.
    """
    name, key = full_name, ""
    while name:
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
        if name in parameters:
            return name, key
    raise ValueError(f"optimizer: the checkpoint has {full_name!r}, which is of no parameter that it names")


def _named(placement: Placement, model: ModelShards, saved: Mapping[str, _SavedState]) -> Placement:
    """Return a placement under the name that its parameter has in the file, perhaps an alias."""
    if placement.name in saved:
        return placement
    others = [name for name, of in model.aliases.items() if of == placement.name and name in saved]
    return dataclasses.replace(placement, name=others[0]) if others else placement


def _options_for(
    index: int,
    group: Mapping[str, Any],
    placements: Sequence[Placement],
    saved: Mapping[str, _SavedState],
    groups: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the saved options of a group's parameters, in the types that the group has."""
    if missing := [placement.name for placement in placements if placement.name not in saved]:
        raise ValueError(
            f"optimizer: the checkpoint's optimizer did not have {quoted(missing, _MOST_NAMES)}, which group "
            f"{index} has: build the optimizer on the same parameters"
        )
    members: dict[str, list[str]] = {}
    for placement in placements:
        found = saved[placement.name]
        if found.shape != placement.shape:
            raise ValueError(
                f"optimizer: expected the state of {placement.name!r} for shape {list(placement.shape)}, got one "
                f"for {list(found.shape)}"
            )
        members.setdefault(found.label, []).append(placement.name)
    if len(members) > 1:
        first, second, *_ = (quoted(names, _MOST_NAMES) for names in members.values())
        raise ValueError(
            f"optimizer: its group {index} has {first} and {second}, which had different options "
            "when they were saved: build the optimizer with the same groups"
        )
    options = groups[next(iter(members))] if members else {}
    return {key: _typed(decoded(value), group.get(key)) for key, value in options.items() if key not in NO_OPTIONS}


def _typed(value: Any, own: Any) -> Any:
    """Return a saved option as a tensor if the optimizer's own option is one, and else as a number."""
    if isinstance(own, Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device).reshape(own.shape)
    if isinstance(value, Tensor) and isinstance(own, int | float):
        return value.item()
    if isinstance(value, tuple) and isinstance(own, tuple) and len(value) == len(own):
        return tuple(map(_typed, value, own))
    return value


def _allocated(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    placement: Placement,
    saved: _SavedState,
    shards: list[TensorShard],
) -> dict[str, Any]:
    """Return new state for a parameter, with the saved values and unread tensors; add the tensors to the shards."""
    state = dict(saved.values)
    now: Mapping[str, Any] = optimizer.state.get(parameter, {})
    counts_on_device = bool(group.get("fused") or group.get("capturable"))
    for key, spec in saved.tensors.items():
        like = now.get(key)
        is_counter = key == "step" or (isinstance(optimizer, torch.optim.NAdam) and key == "mu_product")
        if isinstance(like, Tensor):
            dtype, device = like.dtype, like.device
        else:
            dtype = _dtype_for(key, spec, parameter, saved, counts_on_device=counts_on_device)
            on_cpu = is_counter and not spec.shape and not counts_on_device
            device = torch.device("cpu") if on_cpu else parameter.device
        if spec.shape and spec.shape == placement.shape:
            # As optimizers allocate it: in a file, if the parameter is offloaded to one.
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            shards.append(placement.shard(state[key], key))
        elif spec.shape and not placement.is_full:
            raise ValueError(
                f"optimizer: the saved state {key!r} of {placement.name!r} has shape {list(spec.shape)}, not the "
                "parameter's: it can be loaded only where a rank has full parameters, as with DDP or "
                "shard_by='parameters'"
            )
        else:
            state[key] = torch.zeros(spec.shape, dtype=dtype, device=device)
            shards.append(placement.unsharded_state(state[key], key))
    return state


def _dtype_for(
    key: str, spec: TensorSpec, parameter: Tensor, saved: _SavedState, *, counts_on_device: bool
) -> torch.dtype:
    """Return the dtype of state that the optimizer has not made yet."""
    if key == "step":
        return torch.float32 if counts_on_device else spec.dtype
    had_dtype_of_parameter = spec.shape == saved.shape and str(spec.dtype) == saved.dtype
    return parameter.dtype if had_dtype_of_parameter else spec.dtype
