"""Layouts of cut tensors: a dimension is a product of factors, each of which one axis of the mesh may cut.

    [8, 3, 100, 64], cut along dim 2 by "y"         (8) (3) (100 y) (64)
    its dims 2 and 3 flattened                      (8) (3) (100 y · 64)
    transposed to [8, 6400, 3]                      (8) (100 y · 64) (3)

A factor of n elements is cut as `torch.tensor_split` cuts, so tensors of one shape lie alike, whatever made them.
Factors of a dimension are in the order of memory, the slowest first. Nothing here communicates.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mesh import DeviceMesh
from ..utils.partition import split_range


class Factor(NamedTuple):
    """A factor of a dimension.

    Attributes:
        size: Number of elements of the whole.
        axis: The axis that cuts it; None: every rank has all of it.
    """

    size: int
    axis: str | None = None


Dim = tuple[Factor, ...]
"""The factors of one dimension, the slowest first."""


@dataclass(frozen=True)
class Layout:
    """The shape of a whole tensor, and which ranks have which part of it.

    Attributes:
        dims: The factors of each dimension.
    """

    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, dims: Iterable[Iterable[Factor]]) -> Layout:
        """Return a layout with joined factors: those of size 1 vanish, and uncut neighbours are one."""
        return cls(tuple(tuple(_joined(dim)) for dim in dims))

    @classmethod
    def cut(cls, shape: Sequence[int], cuts: dict[int, str]) -> Layout:
        """Return the layout of a tensor some of whose dimensions are cut, each by an axis."""
        return cls.of([Factor(size, cuts.get(dim))] for dim, size in enumerate(shape))

    @cached_property
    def shape(self) -> torch.Size:
        """The whole tensor's shape."""
        return torch.Size([prod(factor.size for factor in dim) for dim in self.dims])

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut it, in the order of its dimensions."""
        return tuple(factor.axis for dim in self.dims for factor in dim if factor.axis is not None)

    def dim_of(self, axis: str) -> int:
        """Return the dimension that an axis cuts."""
        return next(number for number, dim in enumerate(self.dims) if any(f.axis == axis for f in dim))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the axes that cut a dimension."""
        return tuple(factor.axis for factor in self.dims[dim] if factor.axis is not None)

    def is_cut(self, dim: int) -> bool:
        """Return True if an axis cuts the dimension."""
        return any(factor.axis is not None for factor in self.dims[dim])

    def axis_of(self, dim: int) -> str | None:
        """Return the axis that cuts a dimension as `torch.tensor_split` does; None without one.

        Raises:
            ValueError: The dimension has factors; see `movement.simplified`.
        """
        axes = self.axes_of(dim)
        if axes and len(self.dims[dim]) > 1:
            raise ValueError(f"dimension {dim} of {self} is cut in factors")
        return axes[0] if axes else None

    def replaced(self, changes: Mapping[int, Iterable[Factor]]) -> Layout:
        """Return the layout with other factors in some dimensions."""
        return Layout.of(changes.get(number, dim) for number, dim in enumerate(self.dims))

    def __str__(self) -> str:
        texts = [" · ".join(f"{f.size}{' ' + f.axis if f.axis else ''}" for f in dim) or "1" for dim in self.dims]
        return f"[{', '.join(texts)}]"


def _joined(dim: Iterable[Factor]) -> Iterator[Factor]:
    before = Factor(1)
    for factor in dim:
        if factor.axis is None and before.axis is None:
            before = Factor(before.size * factor.size)
            continue
        if before != Factor(1):
            yield before
        before = factor
    if before != Factor(1):
        yield before


# ---- parts ------------------------------------------------------------------------------------------------------


def bounds(mesh: DeviceMesh, factor: Factor) -> tuple[int, int]:
    """Return the first element of a factor that this rank has, and the one after the last; local."""
    if factor.axis is None:
        return 0, factor.size
    return split_range(factor.size, mesh.size(factor.axis), mesh.rank(factor.axis))


def part_size(mesh: DeviceMesh, dim: Iterable[Factor]) -> int:
    """Return the elements of a dimension that this rank has; local."""
    return prod(high - low for low, high in (bounds(mesh, factor) for factor in dim))


def part_shape(mesh: DeviceMesh, whole: Layout) -> list[int]:
    """Return the shape of this rank's part; local."""
    return [part_size(mesh, dim) for dim in whole.dims]


def coordinates_along(mesh: DeviceMesh, axes: Iterable[str]) -> list[dict[str, int]]:
    """Return the coordinates of each rank of `mesh.group(*axes)` along these axes; local."""
    ordered = [axis for axis in mesh.axes if axis in axes]
    numbers = itertools.product(*(range(mesh.size(axis)) for axis in ordered))
    return [dict(zip(ordered, each, strict=True)) for each in numbers]


def block_at(whole: Layout, mesh: DeviceMesh, number: Mapping[str, int]) -> tuple[slice, ...]:
    """Return the part of each factor that the rank at some coordinates has; local."""
    factors = (factor for dim in whole.dims for factor in dim)
    return tuple(
        slice(0, f.size) if f.axis is None else slice(*split_range(f.size, mesh.size(f.axis), number[f.axis]))
        for f in factors
    )


def part_numels(whole: Layout, mesh: DeviceMesh) -> list[int]:
    """Return the elements that each rank of `mesh.group(*whole.axes)` has; local."""
    ranks = coordinates_along(mesh, whole.axes)
    return [prod(part.stop - part.start for part in block_at(whole, mesh, number)) for number in ranks]


def assembled(parts: Sequence[Tensor], whole: Layout, mesh: DeviceMesh) -> Tensor:
    """Return the whole tensor of the parts of the ranks of the axes that cut it; local.

    Args:
        parts: [ranks of `mesh.group(*whole.axes)`] the elements of each part in order, of any shape.
        whole: The layout.
        mesh: The ranks.
    """
    result = parts[0].new_empty([factor.size for dim in whole.dims for factor in dim])
    for part, number in zip(parts, coordinates_along(mesh, whole.axes), strict=True):
        block = result[block_at(whole, mesh, number)]
        block.copy_(part.reshape(block.shape))
    return result.reshape(whole.shape)


# ---- reshapes ---------------------------------------------------------------------------------------------------


def reshaped(layout: Layout, shape: Sequence[int]) -> tuple[Layout, Layout] | None:
    """Return the layouts between which a reshape moves nothing, the one before it and the one behind it.

    A cut factor that is divided is cut along its outermost part: the layout before it has that part and the rest of
    the factor side by side, in one dimension.

    Args:
        layout: The tensor's layout.
        shape: The new shape of the whole, of as many elements.

    Returns:
        The two layouts, the first of which is `layout` unless a cut factor is divided. None: a new dimension begins
        or ends in the middle of a factor that it does not divide, or there are no elements.
    """
    if 0 in shape:
        return None
    before: list[list[Factor]] = [[] for _ in layout.dims]
    queue = deque((factor, dim) for dim, factors in enumerate(layout.dims) for factor in factors)
    after: list[list[Factor]] = []
    for number, size in enumerate(shape):
        taken: list[Factor] = []
        rest, ends_here = size, size == 1 or 1 not in shape[number + 1 :]
        while queue and (rest > 1 or (queue[0][0].size == 1 and ends_here)):
            factor, dim = queue.popleft()
            if factor.size > rest:
                if factor.size % rest:
                    return None
                queue.appendleft((Factor(factor.size // rest), dim))
                factor = Factor(rest, factor.axis)
            elif rest % factor.size:
                return None
            taken.append(factor)
            before[dim].append(factor)
            rest //= factor.size
        after.append(taken)
    return None if queue else (Layout.of(before), Layout.of(after))


# ---- reductions -------------------------------------------------------------------------------------------------


def over(whole: Layout, dim: Any, *, keepdim: bool) -> tuple[list[int], Layout, tuple[str, ...]]:
    """Return the dimensions of a reduction, its result's layout, and the axes that cut the dimensions.

    Args:
        whole: The layout of the tensor that is reduced.
        dim: A dimension, several, or None for all; an empty list means all, too.
        keepdim: Whether they stay, with size 1.
    """
    count = len(whole.dims)
    given = range(count) if dim is None or dim == [] or dim == () else [dim] if isinstance(dim, int) else dim
    dims = [range(count)[number] for number in given]  # or an IndexError
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"dim: expected each dimension once, got {dim}")
    axes = tuple(axis for number in dims for axis in whole.axes_of(number))
    kept = [number for number in range(count) if keepdim or number not in dims]
    return dims, Layout(tuple(() if number in dims else whole.dims[number] for number in kept)), axes
