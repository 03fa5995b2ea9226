"""Construction of flat parameters from a model.

Each unit in turn gets memory and rank 0's values, shards replace its parameters, and the memory of these is
freed. So a rank that begins with the full model never holds more than that and one unit, and a model on the meta
device never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..collectives.divided_parameters import mark_divided
from .flat_parameter import STALE, BufferKind, FlatParameter, ShardedParameter
from .groups import ShardingGroups
from .layout import by_elements, by_parameters
from .offload import Files, PinnedMemory
from .options import MixedPrecision
from .unit import LentBuffer
from .unit_selection import Member, UnitPlan

Initialiser = Callable[[nn.Module], object]
"""Initialises a module of a model on the meta device."""


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
    mark_divided(plans[0].module)
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
