"""Construction: selection of units in a model, and their flat parameters.

    model                       unit "" (the rest: embedding, norm, head)
      ├─ embedding
      ├─ blocks
      │    ├─ 0                 unit "blocks.0"
      │    └─ 1                 unit "blocks.1"
      └─ norm, head

A parameter belongs to the innermost unit around all modules that use it. Each unit in turn gets memory and rank 0's
values, shards replace its parameters, and the memory of these is freed. So a rank that begins with the full model
never holds more than that and one unit, and a model on the meta device never exists as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.sharded_parameters import mark_sharded_layers
from .flat_parameter import STALE, BufferKind, FlatParameter, Member, ShardedParameter
from .groups import ShardingGroups
from .layout import by_elements, by_parameters
from .offload import Files, PinnedMemory
from .options import MixedPrecision
from .unit import LentBuffer

LEAF_NUMEL = 1 << 16
"""Repeated modules without children count as blocks from this many parameter elements on."""

Initialiser = Callable[[nn.Module], object]
"""Initialises a module of a model on the meta device."""


# ---- units --------------------------------------------------------------------------------------------------


@dataclass
class UnitPlan:
    """A module whose parameters are gathered together.

    Attributes:
        name: The module's name in the model, empty for the model itself.
        module: The module.
        depth: Number of units around it.
        members: Its parameters.
    """

    name: str
    module: nn.Module
    depth: int
    members: list[Member] = field(default_factory=list)


def find_units(model: nn.Module, units: object = None) -> dict[str, nn.Module]:
    """Find the submodules that are units; local.

    Args:
        model: The model.
        units: One or several rules: classes, names (with wildcards as in file names), or functions of a module,
            or of name and module, that return True for a unit. None: repeated blocks, which are modules of one
            class in a `ModuleList`, `ModuleDict` or `Sequential`.

    Returns:
        The units by name, in the model's order; the model itself is not among them.

    Raises:
        TypeError: A rule is neither a class nor a name nor a function.
        ValueError: A class or name matches nothing.
    """
    candidates = {name: module for name, module in model.named_modules() if name and _has_parameters(module)}
    if units is None:
        blocks = {id(block) for block in _repeated_blocks(model)}
        return {name: module for name, module in candidates.items() if id(module) in blocks}
    rules = list(units) if isinstance(units, Sequence | set | frozenset) and not isinstance(units, str) else [units]
    chosen: set[str] = set()
    for rule in rules:
        accepts = _predicate(rule)
        matching = {name for name, module in candidates.items() if accepts(name, module)}
        if not matching and (isinstance(rule, str | type)):
            raise ValueError(
                f"units: {rule!r} matches no submodule with parameters; there are {_some(list(candidates))}"
            )
        chosen |= matching
    return {
        name: module
        for name, module in candidates.items()
        if name in chosen and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }


def _predicate(rule: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(rule, str):
        return lambda name, module: fnmatchcase(name, rule)
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return lambda name, module: isinstance(module, rule)
    if callable(rule) and not isinstance(rule, type):
        takes_name = len(inspect.signature(rule).parameters) > 1
        return lambda name, module: bool(rule(name, module) if takes_name else rule(module))
    raise TypeError(
        f"units: expected module classes, names of submodules or functions that choose them, got {rule!r}"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of a class that their container has several of; submodules of these are not searched."""
    children = list(dict.fromkeys(module.children()))
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    kinds = [type(child) for child in children if _is_block(child)]
    for child in children:
        if is_container and _is_block(child) and kinds.count(type(child)) > 1:
            yield child
        else:
            yield from _repeated_blocks(child)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    if next(module.children(), None) is None:
        return sum(parameter.numel() for parameter in module.parameters()) >= LEAF_NUMEL
    return _has_parameters(module)


def plan_units(model: nn.Module, chosen: dict[str, nn.Module]) -> list[UnitPlan]:
    """Assign every parameter to a unit; local.

    Args:
        model: The model.
        chosen: The units by name.

    Returns:
        The units that have parameters, in the model's order, the model itself first.
    """
    plans = {"": UnitPlan("", model, 0)}
    for name, module in chosen.items():
        plans[name] = UnitPlan(name, module, sum(f"{name}.".startswith(f"{unit}.") or not unit for unit in plans))
    of_module = {id(plan.module): plan for plan in plans.values()}
    members: dict[int, Member] = {}
    homes: dict[int, list[UnitPlan]] = {}
    for prefix, module, around in _walk(model, "", [], of_module):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            member = members.setdefault(id(parameter), Member(f"{prefix}{attribute}", parameter))
            if all(owner is not module or other != attribute for owner, other in member.owners):
                member.owners.append((module, attribute))
            known = homes.setdefault(id(parameter), around)
            homes[id(parameter)] = [plan for plan in known if any(plan is other for other in around)]
    for key, member in members.items():
        homes[key][-1].members.append(member)
    return [plan for plan in plans.values() if plan.members or not plan.name]


def _walk(
    module: nn.Module, prefix: str, around: list[UnitPlan], of_module: dict[int, UnitPlan]
) -> Iterator[tuple[str, nn.Module, list[UnitPlan]]]:
    """Yield every module under every one of its names, with the units around it, the outermost first."""
    if id(module) in of_module:
        around = [*around, of_module[id(module)]]
    yield prefix, module, around
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", around, of_module)


# ---- flat parameters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """Options of the construction.

    Attributes:
        groups: The ranks that shard the parameters, the ranks with replicas, and the device.
        keeps: True if parameters that forward gathers are kept for backward.
        precision: Dtypes.
        kept: Modules that mixed precision leaves out, each with the outermost of them around it.
        by_parameters: True if every parameter is full on one rank.
        offload: Memory of the shards; None: that of the device.
        param_init_fn: Initialises modules on the meta device; None: their `reset_parameters()`.
    """

    groups: ShardingGroups
    keeps: bool
    precision: MixedPrecision
    kept: Mapping[nn.Module, nn.Module]
    by_parameters: bool
    offload: Files | PinnedMemory | None
    param_init_fn: Initialiser | None


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's parameters, without the meta device; local."""
    return {parameter.device for parameter in model.parameters() if not parameter.is_meta}


def build_flats(plans: Sequence[UnitPlan], choices: Choices) -> list[list[FlatParameter]]:
    """Return flat parameters of each unit: one for each dtype, of trained and of frozen parameters; local."""
    mark_sharded_layers(plans[0].module)
    loads = [0] * choices.groups.shard.size
    return [_flats_of(plan, choices, loads) for plan in plans]


def _flats_of(plan: UnitPlan, choices: Choices, loads: list[int]) -> list[FlatParameter]:
    kinds: dict[tuple[torch.dtype, bool, torch.dtype], list[Member]] = {}
    for member in plan.members:
        dtype = member.parameter.dtype
        is_kept = all(owner in choices.kept for owner, _ in member.owners)
        compute = dtype if is_kept else choices.precision.compute_dtype(dtype)
        kinds.setdefault((dtype, member.parameter.requires_grad, compute), []).append(member)
    groups = choices.groups
    stays = groups.on_one_node and not isinstance(choices.offload, PinnedMemory)
    flats = []
    for (dtype, _, compute), members in kinds.items():
        numels = [member.parameter.numel() for member in members]
        if choices.by_parameters:
            layout = by_parameters(numels, groups.shard.size, loads)
        else:
            layout = by_elements(numels, groups.shard.size)
        kind = BufferKind.KEPT if choices.keeps or plan.depth == 0 else BufferKind.LENT
        if stays and compute == dtype:
            kind = BufferKind.RESIDENT
        label = f"unit {plan.name!r}" if plan.name else "the outermost unit"
        flats.append(FlatParameter(members, layout, groups, compute, kind, choices.offload, label))
    return flats


def lend_buffers(
    plans: Sequence[UnitPlan], flats: Sequence[Sequence[FlatParameter]], groups: ShardingGroups
) -> list[LentBuffer | None]:
    """Make the memory that is lent to units, two buffers for each depth; collective.

    Returns:
        The buffer of each unit; None for a unit that needs none.
    """
    lent = [[flat for flat in own if flat.kind is BufferKind.LENT] for own in flats]
    sizes = [sum(_rounded(flat.buffer_bytes) for flat in own) for own in lent]
    buffers: list[LentBuffer | None] = [None] * len(plans)
    for depth in sorted({plan.depth for plan in plans}):
        users = [i for i, plan in enumerate(plans) if plan.depth == depth and sizes[i]]
        largest = max((sizes[i] for i in users), default=0)
        made = [LentBuffer(groups.memory.node_empty([largest], torch.uint8)) for _ in users[:2]]
        for number, i in enumerate(users):
            buffers[i] = made[number % 2]
            begin = 0
            for flat in lent[i]:
                flat.set_buffer(made[number % 2].memory[begin : begin + flat.buffer_bytes].view(flat.compute_dtype))
                begin += _rounded(flat.buffer_bytes)
    return buffers


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _allocate(flat: FlatParameter, choices: Choices) -> None:
    """Allocate a flat parameter's shard, and its buffer unless that is lent; collective."""
    groups, offload = choices.groups, choices.offload
    if flat.is_resident and isinstance(offload, Files):
        flat.set_buffer(offload.zeros([flat.layout.total], flat.dtype, groups.shard))
    elif flat.kind is not BufferKind.LENT:
        flat.set_buffer(groups.memory.node_empty([flat.layout.total], flat.compute_dtype))
    if flat.in_place:
        flat.shard.detach().zero_()
        return
    size = flat.sizes[groups.shard.rank]
    if offload is None:
        flat.set_shard(torch.zeros(size, dtype=flat.dtype, device=flat.device))
    else:
        flat.set_shard(offload.zeros([size], flat.dtype))


def initialise(plan: UnitPlan, flats: Sequence[FlatParameter], choices: Choices) -> None:
    """Allocate a unit's flat parameters with rank 0's values, and free the parameters' memory; collective."""
    group, replicas = choices.groups.shard, choices.groups.replicas
    for flat in flats:
        _allocate(flat, choices)
    group.barrier()  # all have cleared their shards
    if group.rank == 0:
        _materialise(plan, flats, choices)
    for flat in flats:
        flat.load(_original_value)
        if replicas is not None:
            replicas.broadcast(flat.shard.detach())
            group.barrier()
    for member in plan.members:
        setattr(member.parameter, STALE, (member.name, "was before the model was wrapped"))
        if not member.parameter.is_meta:
            member.parameter.data = member.parameter.data.new_empty(0)


def _original_value(parameter: ShardedParameter) -> Tensor:
    owner, attribute = parameter.owners[0]
    value: Tensor | None = dict.get(owner._parameters, attribute)
    assert value is not None
    return value.detach()


def _materialise(plan: UnitPlan, flats: Sequence[FlatParameter], choices: Choices) -> None:
    """Initialise modules on the meta device, in the memory of resident flat parameters."""
    device = choices.groups.device
    full = {
        parameter.name: parameter.full.data for flat in flats if flat.is_resident for parameter in flat.parameters
    }
    on_meta = [member for member in plan.members if member.parameter.is_meta]
    real = {id(member.parameter): _real(member.parameter, full.get(member.name), device) for member in on_meta}
    for module in dict.fromkeys(owner for member in on_meta for owner, _ in member.owners):
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in real:  # of another unit, whose initialisation sets the values again
                    real[id(parameter)] = _real(parameter, None, device)
                module._parameters[attribute] = real[id(parameter)]
        _make_buffers_real(module, device)
        _initialise_module(module, plan.name, choices.param_init_fn)


def _real(parameter: nn.Parameter, memory: Tensor | None, device: torch.device) -> nn.Parameter:
    values = torch.empty_like(parameter, device=device) if memory is None else memory
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def initialise_buffers(model: nn.Module, choices: Choices) -> None:
    """Initialise modules that have buffers on the meta device and no parameters there; local.

    Raises:
        ValueError: A module cannot be initialised.
    """
    for name, module in model.named_modules():
        if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            continue
        _make_buffers_real(module, choices.groups.device)
        if next(module.parameters(recurse=False), None) is None:
            _initialise_module(module, name, choices.param_init_fn)


def _make_buffers_real(module: nn.Module, device: torch.device) -> None:
    for attribute, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = torch.zeros_like(buffer, device=device)


def _initialise_module(module: nn.Module, parent: str, param_init_fn: Initialiser | None) -> None:
    with torch.no_grad():
        if param_init_fn is not None:
            param_init_fn(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"a {type(module).__name__} in {parent!r} is on the meta device and has no reset_parameters(): "
                "give param_init_fn=, a function that initialises a module's own parameters and buffers"
            )
        reset()
