"""Selection of units, the submodules that are gathered together.

    model                       unit "" (the rest: embedding, norm, head)
      ├─ embedding
      ├─ blocks
      │    ├─ 0                 unit "blocks.0"
      │    └─ 1                 unit "blocks.1"
      └─ norm, head

A parameter belongs to the innermost unit around all modules that use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

LEAF_NUMEL = 1 << 16
"""Repeated modules without children count as blocks from this many parameter elements on."""


@dataclass
class Member:
    """One parameter of the model.

    Attributes:
        name: The first of its names in the model.
        parameter: The parameter as it was at wrapping.
        owners: The modules with the parameter as an attribute, and the attribute's name.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


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
