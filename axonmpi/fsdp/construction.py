"""Taking a model apart into flat parameters.

Unit by unit: memory, values from rank 0, parts in place of the parameters, and the parameters' own memory is
given back. So a rank that begins with the whole model never holds more than that and one unit, and a model on
the meta device never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.divided_parameters import mark_divided
from ..groups.world import ProcessGroup
from .flat_parameter import FlatParameter, State, by_elements, by_parameters
from .offload import Files
from .options import MixedPrecision
from .unit import Slot
from .unit_selection import Member, UnitPlan

__all__ = ["Choices", "build_flats", "initialise", "initialise_buffers", "make_slots"]

REPLACED = "_axonmpi_replaced"
"""Attribute of a parameter that was taken apart: its name. An optimizer that still has it was built too early."""


@dataclass(frozen=True)
class Choices:
    """How a model is taken apart.

    Attributes:
        group: The ranks that share the parameters out.
        replicas: The ranks that hold the same shard; None if there are no others.
        keeps: Whether what is gathered in forward is kept for backward.
        precision: Dtypes.
        by_parameters: Whether every parameter is whole on one rank.
        files: Where parameters lie instead of memory, if anywhere.
    """

    group: ProcessGroup
    replicas: ProcessGroup | None
    keeps: bool
    precision: MixedPrecision
    by_parameters: bool
    files: Files | None

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks have memory in common."""
        return len(self.group.backend.node_ranks) == self.group.size


def build_flats(plans: Sequence[UnitPlan], choices: Choices) -> list[list[FlatParameter]]:
    """Lay out the parameters of each unit: a flat one for each dtype, the trained and the frozen apart; local."""
    mark_divided(plans[0].module)
    loads = [0] * choices.group.size
    return [_flats_of(plan, choices, loads) for plan in plans]


def _flats_of(plan: UnitPlan, choices: Choices, loads: list[int]) -> list[FlatParameter]:
    kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in plan.members:
        kinds.setdefault((member.parameter.dtype, member.parameter.requires_grad), []).append(member)
    flats = []
    for (dtype, _), members in kinds.items():
        numels = [member.parameter.numel() for member in members]
        size = choices.group.size
        layout = by_parameters(numels, size, loads) if choices.by_parameters else by_elements(numels, size)
        compute = choices.precision.compute_dtype(dtype)
        state = _state(choices, plan.depth, same_dtype=compute == dtype)
        flats.append(
            FlatParameter(
                members,
                layout,
                choices.group,
                dtype,
                compute,
                state,
                in_file=choices.files is not None,
            )
        )
    return flats


def _state(choices: Choices, depth: int, *, same_dtype: bool) -> State:
    if choices.on_one_node and same_dtype:
        return State.RESIDENT
    return State.KEPT if choices.keeps or depth == 0 else State.LENT


def make_slots(
    plans: Sequence[UnitPlan], flats: Sequence[Sequence[FlatParameter]], group: ProcessGroup
) -> list[Slot | None]:
    """Make the memory that units take turns in, two pieces for each depth; collective.

    Returns:
        The slot of each unit, None for those that need none.
    """
    lent = [[flat for flat in own if flat.state == State.LENT] for own in flats]
    sizes = [sum(_rounded(flat.buffer_bytes) for flat in own) for own in lent]
    slots: list[Slot | None] = [None] * len(plans)
    for depth in sorted({plan.depth for plan in plans}):
        users = [i for i, plan in enumerate(plans) if plan.depth == depth and sizes[i]]
        largest = max((sizes[i] for i in users), default=0)
        made = [Slot(group.node_empty([largest], torch.uint8)) for _ in range(min(2, len(users)))]
        for turn, i in enumerate(users):
            slots[i] = made[turn % 2]
    for slot, own in zip(slots, lent, strict=True):
        at = 0
        for flat in own:
            assert slot is not None
            flat.set_buffer(slot.memory[at : at + flat.buffer_bytes].view(flat.compute_dtype))
            at += _rounded(flat.buffer_bytes)
    return slots


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def allocate(flat: FlatParameter, choices: Choices) -> None:
    """Make the memory of a flat parameter's shard, and its buffer if it has one of its own; collective."""
    group, files = flat.group, choices.files
    if flat.state == State.RESIDENT and files is not None:
        flat.set_buffer(files.common([flat.layout.total], flat.dtype, group))
    elif flat.state != State.LENT:
        flat.set_buffer(group.node_empty([flat.layout.total], flat.compute_dtype))
    if not flat.in_place:
        size = flat.sizes[group.rank]
        flat.set_shard(torch.zeros(size, dtype=flat.dtype) if files is None else files.own([size], flat.dtype))
    if flat.in_place:
        low, high = flat.layout.bounds(group.rank)
        assert flat.buffer is not None
        flat.buffer[low:high].zero_()


def initialise(
    plan: UnitPlan,
    flats: Sequence[FlatParameter],
    choices: Choices,
    param_init_fn: Callable[[nn.Module], object] | None,
) -> None:
    """Give a unit's flat parameters memory and rank 0's values, and take the parameters' memory; collective."""
    for flat in flats:
        allocate(flat, choices)
    if choices.group.size > 1:
        choices.group.barrier()  # all have cleared their shards
    if choices.group.rank == 0:
        _materialise(plan, flats, param_init_fn)
    for flat in flats:
        flat.load(_value_of)
        if choices.replicas is not None:
            choices.replicas.broadcast(flat.shard.detach())
            flat.group.barrier()
        for member in flat.members:
            setattr(member.parameter, REPLACED, member.name)
            if not member.parameter.is_meta:
                member.parameter.data = torch.empty(0, dtype=flat.dtype)


def _value_of(member: Member) -> Tensor:
    owner, attribute = member.owners[0]
    parameters: Any = owner._parameters
    value: Tensor | None = dict.get(parameters, attribute)
    assert value is not None
    return value.detach()


def _materialise(
    plan: UnitPlan, flats: Sequence[FlatParameter], param_init_fn: Callable[[nn.Module], object] | None
) -> None:
    """Initialise modules on the meta device, in the memory of resident flat parameters."""
    homes = {
        id(owner): owner
        for flat in flats
        for member in flat.members
        if member.parameter.is_meta
        for owner, _ in member.owners
    }
    if not homes:
        return
    real: dict[int, nn.Parameter] = {}
    for flat in flats:
        for index, member in enumerate(flat.members):
            if member.parameter.is_meta:
                full = flat.fulls[index].data if flat.state == State.RESIDENT else None
                values = torch.empty(flat.shapes[index], dtype=flat.dtype) if full is None else full
                real[id(member.parameter)] = nn.Parameter(values, requires_grad=member.parameter.requires_grad)
    for module in homes.values():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                replacement = real.get(id(parameter))
                if replacement is None:  # it belongs to another unit, and gets its values there
                    replacement = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[attribute] = replacement
        _make_buffers_real(module)
        _initialise_module(module, plan.name, param_init_fn)


def initialise_buffers(model: nn.Module, param_init_fn: Callable[[nn.Module], object] | None) -> None:
    """Initialise modules that have buffers on the meta device and no parameters there; local.

    Raises:
        ValueError: A module cannot be initialised.
    """
    for name, module in model.named_modules():
        if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            continue
        _make_buffers_real(module)
        if next(module.parameters(recurse=False), None) is None:
            _initialise_module(module, name, param_init_fn)


def _make_buffers_real(module: nn.Module) -> None:
    for attribute, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = torch.zeros_like(buffer, device="cpu")


def _initialise_module(module: nn.Module, where: str, param_init_fn: Callable[[nn.Module], object] | None) -> None:
    with torch.no_grad():
        if param_init_fn is not None:
            param_init_fn(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"a {type(module).__name__} in {where!r} is on the meta device and has no reset_parameters(): "
                "give param_init_fn=, a function that initialises a module's own parameters and buffers"
            )
        reset()
