"""Which part of a parameter a rank has, and which ranks have the other parts.

A wrapper that divides parameters among ranks marks the parts. A pipeline, which compares tied parameters, reads
from the marks whether two parts have the same elements; a norm reads over which ranks to sum. Modules with divided
parameters have two attributes, `process_group` and `shards`, which are checked before ranks get the same values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..groups.process_group import ProcessGroup

_AXES, _ELEMENTS, _WHOLE = "_axonmpi_axes", "_axonmpi_elements", "_axonmpi_whole"
_replicas: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # no attribute: whole parameters may be pickled


@dataclass(frozen=True)
class Axis:
    """Ranks that have a parameter together.

    Attributes:
        group: The ranks.
        copies: On how many of them each element is.
        of_layer: Whether a layer divides it, which computes with the part, and no wrapper.
    """

    group: ProcessGroup
    copies: int
    of_layer: bool = False


def mark_sharded(parameter: nn.Parameter, group: ProcessGroup, copies: int = 1, *, of_layer: bool = False) -> None:
    """Say that ranks of a group have different parts of a parameter, each element on `copies` of them; local."""
    if group.size > 1:
        setattr(parameter, _AXES, (*axes_of(parameter), Axis(group, copies, of_layer)))


def axes_of(parameter: Tensor) -> tuple[Axis, ...]:
    """Return among which ranks a parameter is divided, one way after the other; empty for a whole one; local."""
    axes: tuple[Axis, ...] = getattr(parameter, _AXES, ())
    return axes


def mark_replicated(parameters: Iterable[Tensor], axis: Axis) -> None:
    """Say that all ranks of an axis get the same gradients of parameters, as long as the axis is kept; local."""
    for parameter in parameters:
        _replicas[parameter] = weakref.ref(axis)


def replica_axis(parameter: Tensor) -> Axis | None:
    """Return which ranks have the same gradient of a parameter, if a wrapper has said so; local."""
    axis: weakref.ref[Axis] | None = _replicas.get(parameter)
    return None if axis is None else axis()


def mark_slice(part: nn.Parameter, first: int, last: int, whole: torch.Size) -> None:
    """Say that a parameter is the elements from `first` up to `last` of one of shape `whole`; local."""
    setattr(part, _ELEMENTS, (first, last))
    setattr(part, _WHOLE, whole)


def is_shown_as_slice(parameter: Tensor) -> bool:
    """Say whether a parameter that was marked as a part has not the shape of the whole now; local."""
    return getattr(parameter, _WHOLE, parameter.shape) != parameter.shape


def slice_of(parameter: Tensor) -> tuple[int, int] | None:
    """Return which elements of a larger parameter this one has; None for a whole one; local."""
    elements: tuple[int, int] | None = getattr(parameter, _ELEMENTS, None)
    return elements


def sharded_modules(module: nn.Module) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield the name of each submodule whose own parameters are divided, and the ranks that have them; local."""
    for name, part in module.named_modules():
        group = getattr(part, "process_group", None)
        if getattr(part, "shards", None) and isinstance(group, ProcessGroup) and group.size > 1:
            yield name, group


def common_ranks(group: ProcessGroup, other: ProcessGroup) -> list[int]:
    """Return the ranks that are in both of two groups, as numbers of the world; none if that is one rank; local."""
    ranks = sorted(set(group.ranks) & set(other.ranks))
    return ranks if len(ranks) > 1 else []


def mark_sharded_layers(module: nn.Module) -> None:
    """Call `mark_parts()` of each submodule that has it, which marks the parameters that it divides; local."""
    for part in module.modules():
        if callable(mark := getattr(part, "mark_parts", None)):
            mark()


def check_not_sharded(module: nn.Module, group: ProcessGroup) -> None:
    """Raise if ranks of a group that is to have the same parameters have different parts of them; local.

    Args:
        module: This rank's model.
        group: The ranks that get the same values, or average gradients.

    Raises:
        ValueError: Naming the first module that is divided over ranks of the group.
    """
    for name, divided in sharded_modules(module):
        if ranks := common_ranks(group, divided):
            raise ValueError(
                f"process_group: expected ranks that have the same part of {name or 'the model'!r}, which is "
                f"divided over ranks {list(divided.ranks)}, got ranks {list(group.ranks)}, of which {ranks} have "
                "different parts; use the group of another axis, as in process_group=mesh.group('dp')"
            )
