"""State of a model and its optimizer as they would be without sharding.

One parameter after the other, so that a rank that does not want the whole never holds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.agreement import check_same
from ..collectives.divided_parameters import axes_of
from ..utils.arguments import check_flags
from ..wrapping.partial import as_part_of_state
from .flat_parameter import FlatParameter
from .groups import ShardingGroups
from .runtime import Run
from .unit_selection import Member

__all__ = [
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]


def _named(run: Run) -> Iterator[tuple[str, FlatParameter, int]]:
    for unit in run.units:
        for flat in unit.flats:
            for index, member in enumerate(flat.members):
                yield member.name, flat, index


@torch.no_grad()
def full_state_dict(module: nn.Module, run: Run, groups: ShardingGroups, *, rank0_only: bool) -> dict[str, Tensor]:
    """Return the state dict of the module without sharding; collective."""
    check_flags(rank0_only=rank0_only)
    run.barrier()
    wants = not rank0_only or _is_first(groups)
    wholes: dict[str, Tensor] = {}
    for name, flat, index in _named(run):
        whole = flat.whole_on_first(index) if rank0_only else flat.whole(index)
        if whole is not None and wants:
            wholes[name] = as_part_of_state(whole) if axes_of(flat.fulls[index]) else whole
    run.barrier()  # shards may change again
    if not wants:
        return {}
    result: dict[str, Tensor] = OrderedDict()
    parts = {id(flat.parts[index]): name for name, flat, index in _named(run)}
    for key, value in module.state_dict(keep_vars=True).items():
        of_part = parts.get(id(value))
        if of_part is not None:
            result[key] = wholes[of_part]
        else:  # a buffer, or what a module adds by get_extra_state()
            result[key] = value.detach().clone() if isinstance(value, Tensor) else value
    return result


def _is_first(groups: ShardingGroups) -> bool:
    return groups.shard.rank == 0 and (groups.replicas is None or groups.replicas.rank == 0)


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, run: Run, groups: ShardingGroups, state_dict: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Take the values of a state dict of the module without sharding, from rank 0; collective."""
    check_flags(strict=strict)
    shown = module.state_dict(keep_vars=True)
    parts = {id(flat.parts[index]): (name, flat, index) for name, flat, index in _named(run)}
    shapes = {
        key: tuple(parts[id(value)][1].shapes[parts[id(value)][2]]) if id(value) in parts else tuple(value.shape)
        for key, value in shown.items()
        if isinstance(value, Tensor)
    }
    extra = [key for key in shown if key not in shapes]
    problem = _agreed(groups, _misfit(shapes, extra, state_dict, strict=strict) if _is_first(groups) else None)
    if problem:
        raise ValueError(problem)
    values: dict[str, Tensor] = {}
    if _is_first(groups):
        for key, value in shown.items():
            if key in state_dict and id(value) in parts:
                values.setdefault(parts[id(value)][0], state_dict[key])
    _load_parameters(run, groups, values)
    for key, value in shown.items():
        if key in shapes and id(value) not in parts:
            if _is_first(groups) and key in state_dict:
                value.copy_(state_dict[key])
            for group in groups.both:
                group.broadcast(value)
    given = _agreed(
        groups, {key: state_dict[key] for key in extra if key in state_dict} if _is_first(groups) else {}
    )
    for key, value in given.items():
        module.get_submodule(key.rpartition(".")[0]).set_extra_state(value)


def _load_parameters(run: Run, groups: ShardingGroups, values: Mapping[str, Tensor]) -> None:
    first_replica = groups.replicas is None or groups.replicas.rank == 0

    def value_of(member: Member) -> Tensor | None:
        return values.get(member.name)

    run.barrier()  # nobody reads the old values any more
    for unit in run.units:
        for flat in unit.flats:
            if first_replica:
                flat.load(value_of)
            if groups.replicas is not None:
                groups.replicas.broadcast(flat.shard.detach())
            flat.is_valid = False if not first_replica and not flat.is_resident else flat.is_valid
    run.barrier()


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


def _agreed(groups: ShardingGroups, value: Any) -> Any:
    """Return the value that the first of all ranks has; collective."""
    for group in reversed(groups.both):
        value = group.broadcast_object(value)
    return value


# ---- optimizers --------------------------------------------------------------------------------------------


@torch.no_grad()
def full_optimizer_state_dict(
    run: Run, groups: ShardingGroups, optimizer: torch.optim.Optimizer, *, rank0_only: bool
) -> dict[str, Any]:
    """Return an optimizer's state without sharding, by parameter name; collective."""
    check_flags(rank0_only=rank0_only)
    places = {id(flat.parts[index]): (name, flat, index) for name, flat, index in _named(run)}
    options, states = [], {}
    wants = not rank0_only or _is_first(groups)
    _check_same_groups(groups, _names(optimizer, places))
    for group in optimizer.param_groups:
        names = []
        for part in group["params"]:
            name, flat, index = places[id(part)]
            names.append(name)
            whole = _whole_state(flat, index, optimizer.state.get(part, {}), rank0_only=rank0_only)
            if whole and wants:
                states[name] = whole
        options.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": states, "param_groups": options} if wants else {}


def _names(optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[str, Any, int]]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer; local."""
    for group in optimizer.param_groups:
        if any(id(part) not in places for part in group["params"]):
            raise ValueError(
                "optimizer: it has parameters that are not of this model; build it on fsdp.parameters()"
            )
    return [[places[id(part)][0] for part in group["params"]] for group in optimizer.param_groups]


def _check_same_groups(groups: ShardingGroups, names: list[list[str]]) -> None:
    """Raise on all ranks unless their optimizers have the same parameters; collective."""
    lines = [f"group {number}: {', '.join(of_group)}" for number, of_group in enumerate(names)]
    for group in groups.both:
        check_same(
            group.backend,
            lines,
            "optimizer: the ranks have other parameters in its groups",
            "Choose parameters by name, and not by what a rank's part looks like.",
        )


def _whole_state(flat: FlatParameter, index: int, state: Mapping[str, Any], *, rank0_only: bool) -> dict[str, Any]:
    """Join the ranks' state of one parameter; collective. Ranks without a part of it may have no state."""
    part = flat.parts[index]
    own = {key: _kind(value, part) for key, value in state.items()} if part.numel() else {}
    kinds: dict[str, Any] = {}
    for other in flat.group.all_gather_object(own):
        kinds |= {key: kind for key, kind in other.items() if key not in kinds}
    whole: dict[str, Any] = {}
    for key, (is_divided, dtype, value) in kinds.items():
        if not is_divided:
            whole[key] = value
            continue
        # What is laid out as the parameter is put where the parameter's part would be in a shard.
        mine = state[key].detach().reshape(-1) if own else torch.empty(0, dtype=dtype)
        joined = flat.whole_on_first(index, mine) if rank0_only else flat.whole(index, mine)
        if joined is not None:
            whole[key] = joined
    return whole


def _kind(value: Any, part: Tensor) -> tuple[bool, torch.dtype | None, Any]:
    """Say whether a piece of state is divided as the parameter is, or the same wherever it is."""
    if isinstance(value, Tensor) and value.shape == part.shape and value.dim():
        return True, value.dtype, None
    return False, None, value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def load_full_optimizer_state_dict(
    run: Run, groups: ShardingGroups, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Give an optimizer the state in a dict of `full_optimizer_state_dict`, from rank 0; collective."""
    places = {id(flat.parts[index]): (name, flat, index) for name, flat, index in _named(run)}
    names = _names(optimizer, places)
    _check_same_groups(groups, names)
    given = _agreed(groups, _without_tensors(state_dict) if _is_first(groups) else None)
    if [group["params"] for group in given["param_groups"]] != names:
        raise ValueError(
            f"state_dict does not fit the optimizer: expected groups of {names}, got "
            f"{[group['params'] for group in given['param_groups']]}"
        )
    for group, options in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
        for part in group["params"]:
            name, flat, index = places[id(part)]
            source = state_dict["state"].get(name, {}) if _is_first(groups) else {}
            loaded = _part_of_state(flat, index, given["state"].get(name, {}), source, groups)
            if loaded and part.numel():
                optimizer.state[part] = loaded
            elif part.numel():
                optimizer.state.pop(part, None)


def _without_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors of one and more dimensions by their shape and dtype; the rest is sent as it is."""
    return {
        "param_groups": state_dict["param_groups"],
        "state": {
            name: {
                key: _Shape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }
            for name, state in state_dict["state"].items()
        },
    }


class _Shape(tuple[tuple[int, ...], torch.dtype]):
    """Stands for a tensor that is sent by itself."""

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> _Shape:
        return super().__new__(cls, (shape, dtype))

    def __getnewargs__(self) -> Any:
        return tuple(self)


def _part_of_state(
    flat: FlatParameter, index: int, kinds: Mapping[str, Any], source: Mapping[str, Any], groups: ShardingGroups
) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    first, last = flat.layout.part(index, flat.group.rank)
    for key, kind in kinds.items():
        if not isinstance(kind, _Shape):
            loaded[key] = kind.clone() if isinstance(kind, Tensor) else kind
            if isinstance(kind, Tensor) and not flat.shapes[index] and key != "step" and flat.parts[index].numel():
                loaded[key] = loaded[key].view(flat.parts[index].shape)  # laid out as a parameter without dims
            continue
        shape, dtype = kind
        whole = source[key].contiguous() if source else torch.empty(shape, dtype=dtype)
        for group in reversed(groups.both):
            group.broadcast(whole)
        is_divided = tuple(shape) == tuple(flat.shapes[index])
        part = flat.parts[index]
        loaded[key] = whole.reshape(-1)[first:last].view(part.shape).clone() if is_divided else whole.clone()
    return loaded
