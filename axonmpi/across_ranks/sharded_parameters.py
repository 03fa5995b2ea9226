"""Marks on parameters of sharded layers: the group of the shards, and this rank's slice.

FSDP and tensor parallel layers set the marks. A pipeline, which compares tied parameters, reads whether two slices
have the same elements; the norm of gradients reads the ranks to sum over. A module with sharded parameters has two
attributes, `process_group` and `shards`, which are checked before ranks get the same values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..groups.process_group import ProcessGroup

_AXES, _SLICE, _FULL_SHAPE = "_axonmpi_axes", "_axonmpi_slice", "_axonmpi_full_shape"  # attributes
_replicas: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # no attribute: full parameters may be pickled


@dataclass(frozen=True)
class Axis:
    """A group whose ranks hold shards, or replicas, of a parameter.

    Attributes:
        group: The ranks.
        copies: Number of these ranks that hold each element.
        of_layer: True if a layer shards the parameter and computes with the shard, False for a wrapper.
    """

    group: ProcessGroup
    copies: int
    of_layer: bool = False


def mark_sharded(parameter: nn.Parameter, group: ProcessGroup, copies: int = 1, *, of_layer: bool = False) -> None:
    """Mark a parameter as sharded over a group, each element on `copies` of its ranks; local."""
    if group.size > 1:
        setattr(parameter, _AXES, (*axes_of(parameter), Axis(group, copies, of_layer)))


def axes_of(parameter: Tensor) -> tuple[Axis, ...]:
    """Return the axes along which a parameter is sharded, in the order of sharding; empty for a full one; local."""
    axes: tuple[Axis, ...] = getattr(parameter, _AXES, ())
    return axes


def mark_replicated(parameters: Iterable[Tensor], axis: Axis) -> None:
    """Mark parameters as having equal gradients on all ranks of an axis, as long as the axis lives; local."""
    for parameter in parameters:
        _replicas[parameter] = weakref.ref(axis)


def replica_axis(parameter: Tensor) -> Axis | None:
    """Return the axis whose ranks have equal gradients of a parameter, None if no wrapper has marked it; local."""
    axis: weakref.ref[Axis] | None = _replicas.get(parameter)
    return None if axis is None else axis()


def mark_slice(parameter: nn.Parameter, first: int, last: int, full_shape: torch.Size) -> None:
    """Mark a parameter as elements `first` up to `last` of a full one; local."""
    setattr(parameter, _SLICE, (first, last))
    setattr(parameter, _FULL_SHAPE, full_shape)


def is_shown_as_slice(parameter: Tensor) -> bool:
    """Return True if a parameter that is marked as a slice does not have the full shape at present; local."""
    return getattr(parameter, _FULL_SHAPE, parameter.shape) != parameter.shape


def slice_of(parameter: Tensor) -> tuple[int, int] | None:
    """Return the elements of the full parameter that this slice has, from and up to; None for a full one; local."""
    elements: tuple[int, int] | None = getattr(parameter, _SLICE, None)
    return elements


def sharded_modules(module: nn.Module) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield the name and the group of each submodule whose own parameters are sharded; local."""
    for name, part in module.named_modules():
        group = getattr(part, "process_group", None)
        if getattr(part, "shards", None) and isinstance(group, ProcessGroup) and group.size > 1:
            yield name, group


def common_ranks(group: ProcessGroup, other: ProcessGroup) -> list[int]:
    """Return the world's ranks that are in both groups; empty if there is only one; local."""
    ranks = sorted(set(group.ranks) & set(other.ranks))
    return ranks if len(ranks) > 1 else []


def mark_sharded_layers(module: nn.Module) -> None:
    """Call `mark_parts()` of each submodule that has this method, which marks its sharded parameters; local."""
    for part in module.modules():
        if callable(mark := getattr(part, "mark_parts", None)):
            mark()


def check_not_sharded(module: nn.Module, group: ProcessGroup) -> None:
    """Raise if a module is sharded over ranks that are to have equal parameters; local.

    Args:
        module: This rank's model.
        group: The ranks that get equal values, or average gradients.

    Raises:
        ValueError: Names the first module that is sharded over ranks of the group.
    """
    for name, sharding in sharded_modules(module):
        if ranks := common_ranks(group, sharding):
            raise ValueError(
                f"process_group: expected ranks that have the same part of {name or 'the model'!r}, which is "
                f"divided over ranks {list(sharding.ranks)}, got ranks {list(group.ranks)}, of which {ranks} have "
                "different parts; use the group of another axis, as in process_group=mesh.group('dp')"
            )
