"""What a rank has of an optimizer's state, by the names of parameters.

    exp_avg of a parameter     "blocks.0.weight.exp_avg", laid out as the rank's shard of the parameter is
    step                       "blocks.0.weight.step", without dims, the same on all ranks
    options, other values      JSON: the different options, and for each parameter which of them it has

None of this depends on the layout: parameters have equal options or they have not, in whichever groups of whichever
rank's optimizer they are. Loading allocates memory beside the state that an optimizer has, and the
optimizer gets it when all of it was read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...wrapping.optimizer_hooks import OF_ALL_PARAMETERS
from ..files.tensor_file import TensorSpec
from ..files.values import decoded, encoded
from .model_shards import ModelShards
from .parameter_placement import Placement
from .tensor_shard import TensorShard

_NAMES = ("params", "param_names")
MANNER = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed and not which: those of the optimizer in hand stay."""


@dataclass(frozen=True)
class OptimizerShards:
    """What a rank has of an optimizer.

    Attributes:
        shards: Of the tensors in its state.
        state: The rest as JSON has it. `"class"`: the optimizer's. `"groups"`: options by a label that depends on
            them alone. `"parameters"`: by name the label of its options, its dtype and its shape. `"values"`: state
            that is no tensor, by the names of parameter and state. The dicts of several ranks can be joined.
    """

    shards: list[TensorShard]
    state: dict[str, Any]


def optimizer_shards(optimizer: Optimizer, model: ModelShards) -> OptimizerShards:
    """Find what this rank has of an optimizer's state; local, within `model.stable()`.

    Args:
        optimizer: On parameters of the model.
        model: What this rank has of the model.

    Raises:
        ValueError: It has parameters of something else, or keeps something that a file by parameter cannot hold.
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
        options = _options_of(group, kind)
        label = label_of(options)
        for parameter, placement in placements:
            if placement.is_first:
                state["groups"][label] = options
                state["parameters"][placement.name] = [label, str(parameter.dtype), list(placement.shape)]
                _add_state(optimizer, parameter, placement, shards, state["values"])
    _check_keys(optimizer)
    return OptimizerShards(shards, state)


def _options_of(group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        key: encoded(value, f"optimizer: option {key!r} of {kind}")
        for key, value in group.items()
        if key not in _NAMES + MANNER
    }


def label_of(options: Mapping[str, Any]) -> str:
    """Return the label of a group's options, the same for the same options; local."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def _add_state(
    optimizer: Optimizer,
    parameter: Tensor,
    placement: Placement,
    shards: list[TensorShard],
    values: dict[str, Any],
) -> None:
    """Add what an optimizer keeps for a parameter to the shards, and to the values that are no tensors."""
    kind = type(optimizer).__name__
    kept = {} if placement.is_empty else optimizer.state.get(parameter, {})
    for key, value in kept.items():
        if not isinstance(key, str):
            raise ValueError(f"optimizer: {kind} keeps state under {key!r} for {placement.name!r}, expected a text")
        if isinstance(value, Tensor):
            shards.append(_part(kind, placement, key, value.detach().as_subclass(Tensor)))
        else:
            where = f"optimizer: state {key!r} that {kind} keeps for {placement.name!r}"
            values[f"{placement.name}.{key}"] = encoded(value, where)


def _groups_of(
    optimizer: Optimizer, model: ModelShards
) -> Iterator[tuple[dict[str, Any], list[tuple[Tensor, Placement]]]]:
    """Yield each group with its parameters, and where they lie."""
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


def _part(kind: str, placement: Placement, key: str, value: Tensor) -> TensorShard:
    if value.dim() and tuple(value.shape) == placement.memory:
        return placement.shard(value, key)
    if not value.dim() or placement.is_whole:
        return placement.replicated(value, key)
    raise ValueError(
        f"optimizer: state {key!r} that {kind} keeps for {placement.name!r} has shape {list(value.shape)}, and "
        f"this rank's shard of the parameter {list(placement.memory)}: state of another shape can be saved "
        "only where a rank has whole parameters, as with DDP or shard_by='parameters'"
    )


def _check_keys(optimizer: Optimizer) -> None:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} keeps state for {_shown(key)}, which is none of its "
                "parameters: a file by parameter cannot hold it"
            )


def _shown(key: object) -> str:
    return f"a tensor of shape {list(key.shape)}" if isinstance(key, Tensor) else repr(key)


# ---- loading ----------------------------------------------------------------------------------------------------


@dataclass
class _Saved:
    """What a checkpoint has of one parameter's state."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def prepare_optimizer(
    optimizer: Optimizer, model: ModelShards, specs: Mapping[str, TensorSpec], state: Mapping[str, Any]
) -> tuple[list[TensorShard], Callable[[], None]]:
    """Allocate memory for this rank's shard of a saved state; local, within `model.stable()`.

    The optimizer has the class of the saved one, and may have other groups on other ranks: all parameters of one of
    its groups had the same options. State of shards without elements is left as it is, since no step uses it.

    Args:
        optimizer: What is to be loaded.
        model: What this rank has of the model.
        specs: The saved tensors by name.
        state: The rest, `OptimizerShards.state` of all ranks.

    Returns:
        Shards to be filled, under the names that the file has; and a function that gives them and the options to
        the optimizer, which is as it was until then.

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
                made = _Memory(optimizer, group, parameter, placement, saved[placement.name])
                shards += made.shards
                states.append((parameter, made.state))

    def give() -> None:
        for group, chosen in zip(optimizer.param_groups, options, strict=True):
            group.update(chosen)
        for parameter, new in states:
            optimizer.state.pop(parameter, None)
            if new:
                optimizer.state[parameter] = new

    return shards, give


def _by_parameter(specs: Mapping[str, TensorSpec], state: Mapping[str, Any]) -> dict[str, _Saved]:
    saved = {
        name: _Saved(label, dtype, tuple(shape)) for name, (label, dtype, shape) in state["parameters"].items()
    }
    for full, spec in specs.items():
        name, key = split_name(full, saved)
        saved[name].tensors[key] = spec
    for full, value in state["values"].items():
        name, key = split_name(full, saved)
        saved[name].values[key] = decoded(value)
    return saved


def split_name(full: str, saved: Collection[str]) -> tuple[str, str]:
    """Return the names of a parameter and of a state of it, of which a tensor's name in the file is made; local.

    Args:
        full: The tensor's name.
        saved: Names of the parameters.

    Raises:
        ValueError: It is of none of them.
    """
    name, key = full, ""
    while name:
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
        if name in saved:
            return name, key
    raise ValueError(f"optimizer: the checkpoint has {full!r}, which is of no parameter that it names")


def _named(placement: Placement, model: ModelShards, saved: Mapping[str, _Saved]) -> Placement:
    """Return a placement under the name that its parameter has in the file, perhaps an alias."""
    if placement.name in saved:
        return placement
    others = [name for name, of in model.aliases.items() if of == placement.name and name in saved]
    return dataclasses.replace(placement, name=others[0]) if others else placement


def _options_for(
    index: int,
    group: Mapping[str, Any],
    placements: Sequence[Placement],
    saved: Mapping[str, _Saved],
    groups: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the saved options of a group's parameters, in the types that the group has."""
    if missing := [placement.name for placement in placements if placement.name not in saved]:
        raise ValueError(
            f"optimizer: the checkpoint's optimizer did not have {_listed(missing)}, which group {index} has: "
            "build the optimizer on the same parameters"
        )
    for placement in placements:
        if saved[placement.name].shape != placement.shape:
            raise ValueError(
                f"optimizer: expected the state of {placement.name!r} for shape {list(placement.shape)}, got "
                f"{list(saved[placement.name].shape)}"
            )
    members: dict[str, list[str]] = {}
    for placement in placements:
        members.setdefault(saved[placement.name].label, []).append(placement.name)
    if len(members) > 1:
        first, second, *_ = members.values()
        raise ValueError(
            f"optimizer: its group {index} has {_listed(first)} and {_listed(second)}, which had different options "
            "when they were saved: build the optimizer with the same groups"
        )
    chosen = groups[next(iter(members))] if members else {}
    return {
        key: _typed(decoded(value), group.get(key)) for key, value in chosen.items() if key not in _NAMES + MANNER
    }


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _typed(value: Any, own: Any) -> Any:
    """Return a saved option as a tensor where the optimizer's own one is a tensor, and as a number where not."""
    if isinstance(own, Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device).reshape(own.shape)
    if isinstance(value, Tensor) and isinstance(own, int | float):
        return value.item()
    if isinstance(value, tuple) and isinstance(own, tuple) and len(value) == len(own):
        return tuple(map(_typed, value, own))
    return value


class _Memory:
    """Memory for the saved state of one parameter.

    Attributes:
        state: What the optimizer will keep for the parameter.
        shards: Its tensors.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: Tensor,
        placement: Placement,
        saved: _Saved,
    ) -> None:
        self._parameter = parameter
        self._saved = saved
        self._now: Mapping[str, Any] = optimizer.state.get(parameter, {})
        self._counts_on_device = bool(group.get("fused") or group.get("capturable"))
        self._is_nadam = isinstance(optimizer, torch.optim.NAdam)
        self.state: dict[str, Any] = dict(saved.values)
        self.shards: list[TensorShard] = []
        for key, spec in saved.tensors.items():
            self.state[key] = self._add(key, spec, placement)

    def _add(self, key: str, spec: TensorSpec, placement: Placement) -> Tensor:
        dtype = self._dtype(key, spec)
        if spec.shape and spec.shape == placement.shape:
            # As optimizers make it: in files, where the parameter's state is to lie there.
            made = torch.zeros_like(self._parameter, dtype=dtype, requires_grad=False)
            self.shards.append(placement.shard(made, key))
            return made
        if spec.shape and not placement.is_whole:
            raise ValueError(
                f"optimizer: the saved state {key!r} of {placement.name!r} has shape {list(spec.shape)}, not the "
                "parameter's: it can be loaded only where a rank has whole parameters, as with DDP or "
                "shard_by='parameters'"
            )
        made = torch.zeros(spec.shape, dtype=dtype, device=self._place(key, spec))
        self.shards.append(placement.replicated(made, key))
        return made

    def _dtype(self, key: str, spec: TensorSpec) -> torch.dtype:
        now = self._now.get(key)
        if isinstance(now, Tensor):
            return now.dtype
        if key == "step":
            return torch.float32 if self._counts_on_device else spec.dtype
        follows = spec.shape == self._saved.shape and str(spec.dtype) == self._saved.dtype
        return self._parameter.dtype if follows else spec.dtype

    def _place(self, key: str, spec: TensorSpec) -> torch.device:
        """Return where an optimizer keeps a tensor that is not laid out as the parameter."""
        now = self._now.get(key)
        if isinstance(now, Tensor):
            return now.device
        is_counter = key == "step" or (self._is_nadam and key == "mu_product")
        on_cpu = is_counter and not spec.shape and not self._counts_on_device
        return torch.device("cpu") if on_cpu else self._parameter.device
