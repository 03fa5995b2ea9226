"""Full state of a model and its optimizer, as without sharding.

Parameters are gathered or broadcast one by one, so a rank that does not keep the full state never holds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import same_on_all_ranks
from ..across_ranks.sharded_parameters import axes_of
from ..utils.arguments import check_flags
from ..wrapping.optimizer_hooks import parameters_of
from ..wrapping.shard_tensors import as_part_of_state
from .flat_parameter import ShardedParameter
from .groups import ShardingGroups
from .runtime import FSDPRuntime


def _by_sharded(runtime: FSDPRuntime) -> dict[int, ShardedParameter]:
    return {id(parameter.sharded): parameter for parameter in runtime.parameters}


@torch.no_grad()
def full_state_dict(
    module: nn.Module, runtime: FSDPRuntime, *, rank0_only: bool, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Return the state dict of the module without sharding; collective."""
    check_flags(rank0_only=rank0_only)
    wants = not rank0_only or runtime.groups.is_first
    full_tensors: dict[int, Tensor] = {}
    for parameter in runtime.parameters:
        full = parameter.flat.full_tensor(parameter, on_first=rank0_only)
        if full is not None and wants:
            full = full.to(device)  # None: it stays
            full_tensors[id(parameter.sharded)] = as_part_of_state(full) if axes_of(parameter.full) else full
    runtime.group.barrier()  # shards may change again
    result: dict[str, Tensor] = OrderedDict()
    for key, value in module.state_dict(keep_vars=True).items() if wants else ():
        if id(value) in full_tensors:
            result[key] = full_tensors[id(value)]
        else:  # a buffer, or what a module adds by get_extra_state()
            result[key] = value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
    return result


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, runtime: FSDPRuntime, state_dict: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Load rank 0's state dict of the module without sharding; collective."""
    check_flags(strict=strict)
    groups, given = runtime.groups, state_dict if runtime.groups.is_first else {}
    shown = module.state_dict(keep_vars=True)
    sharded = _by_sharded(runtime)
    tensors = {key: value for key, value in shown.items() if isinstance(value, Tensor)}
    shapes = {
        key: tuple(sharded[id(value)].shape if id(value) in sharded else value.shape)
        for key, value in tensors.items()
    }
    extra = [key for key in shown if key not in tensors]
    problem = groups.from_first(_misfit(shapes, extra, given, strict=strict) if groups.is_first else None)
    if problem:
        raise ValueError(problem)
    values: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if id(value) in sharded and key in given:
            values.setdefault(sharded[id(value)].name, given[key])
    for flat in runtime.flats:
        if groups.in_first_replica:
            flat.load(lambda parameter: values.get(parameter.name))
        if groups.replicas is not None:
            groups.replicas.broadcast(flat.shard.detach())
    runtime.forget_gathered()
    runtime.group.barrier()
    for key, value in tensors.items():
        if id(value) not in sharded:
            if key in given:
                value.copy_(given[key])
            for group in groups.both:
                group.broadcast(value)
    for key, value in groups.from_first({key: given[key] for key in extra if key in given}).items():
        module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)


def _misfit(
    shapes: Mapping[str, tuple[int, ...]], extra: Sequence[str], given: Mapping[str, Tensor], *, strict: bool
) -> str | None:
    missing = [key for key in (*shapes, *extra) if key not in given]
    unexpected = [key for key in given if key not in shapes and key not in extra]
    wrong = [
        f"{key}: expected {list(shapes[key])}, got {list(given[key].shape)}"
        for key in shapes
        if key in given and tuple(given[key].shape) != shapes[key]
    ]
    problems = [f"wrong shapes: {'; '.join(wrong)}"] if wrong else []
    if strict:
        problems += [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    return f"state_dict does not fit the model, {'; '.join(problems)}" if problems else None


# ---- optimizers --------------------------------------------------------------------------------------------


@torch.no_grad()
def full_optimizer_state_dict(
    runtime: FSDPRuntime,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """Return an optimizer's state without sharding, by parameter name; collective."""
    check_flags(rank0_only=rank0_only)
    wants = not rank0_only or runtime.groups.is_first
    options, states = [], {}
    for group, parameters in zip(optimizer.param_groups, _groups_of(optimizer, runtime), strict=True):
        for parameter in parameters:
            state = optimizer.state.get(parameter.sharded, {})
            full = _full_state(parameter, state, rank0_only=rank0_only)
            if full and wants:
                states[parameter.name] = {
                    key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in full.items()
                }
        options.append({**group, "params": [parameter.name for parameter in parameters]})
    return {"state": states, "param_groups": options} if wants else {}


def _groups_of(optimizer: torch.optim.Optimizer, runtime: FSDPRuntime) -> list[list[ShardedParameter]]:
    """Return the parameters in each group of an optimizer; collective.

    Raises:
        ValueError: A parameter is not of this model, or ranks have different parameters in the groups.
    """
    known = _by_sharded(runtime)
    if any(id(parameter) not in known for parameter in parameters_of(optimizer)):
        raise ValueError("optimizer: it has parameters that are not of this model; build it on fsdp.parameters()")
    found = [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    lines = [f"group {number}: {', '.join(of_group)}" for number, of_group in enumerate(_names(found))]
    for group in runtime.groups.both:
        same_on_all_ranks(
            group.backend,
            lines,
            "optimizer: the ranks have other parameters in its groups",
            "Choose parameters by name, and not by what a rank's part looks like.",
        )
    return found


def _names(groups: Sequence[Sequence[ShardedParameter]]) -> list[list[str]]:
    return [[parameter.name for parameter in parameters] for parameters in groups]


def _full_state(parameter: ShardedParameter, state: Mapping[str, Any], *, rank0_only: bool) -> dict[str, Any]:
    """Join the ranks' state of one parameter; collective. Ranks without elements of it may have no state."""
    flat, part = parameter.flat, parameter.sharded
    own = {key: _kind(value, part) for key, value in state.items()} if part.numel() else {}
    kinds: dict[str, Any] = {}
    for other in flat.group.all_gather_object(own):
        kinds = other | kinds
    full: dict[str, Any] = {}
    for key, (is_sharded, dtype, value) in kinds.items():
        if is_sharded:
            mine = state[key] if own else torch.empty(0, dtype=dtype, device=part.device)
            value = flat.full_tensor(parameter, mine, on_first=rank0_only)
        if not is_sharded or value is not None:
            full[key] = value
    return full


def _kind(value: Any, part: Tensor) -> tuple[bool, torch.dtype | None, Any]:
    """Return True and the dtype of state that is sharded as the parameter is; or False, None and the value."""
    if isinstance(value, Tensor) and value.shape == part.shape and value.dim():
        return True, value.dtype, None
    return False, None, value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@torch.no_grad()
def load_full_optimizer_state_dict(
    runtime: FSDPRuntime, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load rank 0's dict of `full_optimizer_state_dict` into an optimizer; collective."""
    found = _groups_of(optimizer, runtime)
    is_first = runtime.groups.is_first
    given = runtime.groups.from_first(_without_tensors(state_dict) if is_first else None)
    names = [group["params"] for group in given["param_groups"]]
    if names != _names(found):
        raise ValueError(f"state_dict does not fit the optimizer: expected groups of {_names(found)}, got {names}")
    for group, options, parameters in zip(optimizer.param_groups, given["param_groups"], found, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
        for parameter in parameters:
            source = state_dict["state"].get(parameter.name, {}) if is_first else {}
            kinds = given["state"].get(parameter.name, {})
            loaded = _state_of_shard(parameter, kinds, source, runtime.groups)
            if group.get("fused") or group.get("capturable"):  # they count on the device
                place = parameter.sharded.device
                loaded = {key: kind.to(place) if isinstance(kind, Tensor) else kind for key, kind in loaded.items()}
            if parameter.sharded.numel():
                optimizer.state.pop(parameter.sharded, None)
                if loaded:
                    optimizer.state[parameter.sharded] = loaded


def _without_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with shapes and dtypes in place of tensors with dims."""
    return {
        "param_groups": state_dict["param_groups"],
        "state": {
            name: {
                key: _TensorSpec(tuple(value.shape), value.dtype)
                if isinstance(value, Tensor) and value.dim()
                else value
                for key, value in state.items()
            }
            for name, state in state_dict["state"].items()
        },
    }


class _TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that is broadcast by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _state_of_shard(
    parameter: ShardedParameter, kinds: Mapping[str, Any], source: Mapping[str, Any], groups: ShardingGroups
) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    part = parameter.sharded
    for key, kind in kinds.items():
        if isinstance(kind, _TensorSpec):
            full = torch.empty(kind.shape, dtype=kind.dtype, device=part.device)
            if source:
                full.copy_(source[key])
            for group in reversed(groups.both):
                group.broadcast(full)
            if kind.shape == parameter.shape:
                full = full.reshape(-1)[slice(*parameter.bounds)].view(part.shape)
            loaded[key] = full.clone()
        elif isinstance(kind, Tensor) and not parameter.shape and key != "step" and part.numel():
            loaded[key] = kind.to(part.device, copy=True).view(part.shape)  # laid out as a parameter without dims
        else:
            loaded[key] = kind.clone() if isinstance(kind, Tensor) else kind
    return loaded
