"""The ranks of the world in a grid of named axes, with a group along every axis.

    DeviceMesh({"dp": 2, "pp": 2, "tp": 2})      eight ranks; the last axis varies fastest

                 pp 0        pp 1
               tp 0 1      tp 0 1       group("tp") of rank 5: ranks 4 5, its neighbours
    dp 0         0 1         2 3        group("pp") of rank 5: ranks 5 7
    dp 1         4 5         6 7        group("dp") of rank 5: ranks 1 5
                                        group("dp", "tp") of rank 5: ranks 0 1 4 5

Launchers put ranks with neighbouring numbers on one node, so the axis whose ranks talk most comes last. The groups
of an axis are disjoint and together have all ranks, so one call makes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from .across_ranks.comparison import raised_on_all, same_on_all_ranks
from .backends import LocalBackend, all_gather_number
from .groups.process_group import ProcessGroup
from .groups.world import World, get_world
from .utils.arguments import integer
from .utils.text import counted

INFERRED = -1
"""A size that follows from the number of ranks and the other sizes."""

_SHOWN_RANKS = 8
_SUGGESTIONS = 5


class DeviceMesh:
    """A grid of all ranks of a world: every rank has a coordinate on each axis and is in one group along it.

    Construction is collective over the world: three small calls compare the ranks' shapes and gather their nodes,
    and one call makes the groups of each axis with more than one rank.

    Args:
        shape: Number of ranks along each axis by its name, slowest first: neighbours along the last axis have
            neighbouring ranks. One size may be -1, which follows from the number of ranks.
        world: The ranks; None means the current world.

    Attributes:
        shape: Number of ranks along each axis.
        axes: Names of the axes.
        coordinates: This rank's coordinate on each axis.

    Raises:
        CommunicatorError: There is no world yet.
        TypeError: `shape` is no mapping of names to integers, or `world` no world.
        ValueError: The product of the sizes is not the number of ranks, or the ranks' shapes differ; on all ranks.
    """

    def __init__(self, shape: Mapping[str, int], world: World | None = None) -> None:
        world = get_world() if world is None else world
        if not isinstance(world, World):
            raise TypeError(f"world: expected an axonmpi.World or None, got {type(world).__name__}")
        self._world = world
        backend = world.default_group.backend
        with raised_on_all(backend):
            self.shape = _checked_shape(shape, world.size)
        todo = "Give all ranks the same axes in the same order."
        same_on_all_ranks(backend, [str(self.shape)], "shape: the mesh is not the same on all ranks", todo)
        self._nodes = all_gather_number(backend, world.node_rank)
        self.axes = tuple(self.shape)
        self._sizes = tuple(self.shape.values())
        self.coordinates = self.coordinates_of(world.rank)
        self._several = tuple(axis for axis in self.axes if self.shape[axis] > 1)
        alone = ProcessGroup(LocalBackend(memory=backend.place), [world.rank])
        self._groups: dict[tuple[str, ...], ProcessGroup] = {(): alone, self._several: world.default_group}
        for axis in self._several:
            self.group(axis)

    # ---- groups ---------------------------------------------------------------------------------------------

    def group(self, *axes: str) -> ProcessGroup:
        """Return the group of the ranks that have this rank's coordinates on all other axes.

        Collective over the world when several axes are joined for the first time, else local. The same axes return
        the same object, and all axes with more than one rank the world's default group.

        Args:
            axes: Names in any order, the group's ranks are in the order of the mesh; no names mean all axes.

        Raises:
            ValueError: An axis is unknown or named twice.
        """
        key = tuple(axis for axis in self._checked(axes) if axis in self._several)
        if key not in self._groups:
            self._groups[key] = self._world.partition(self._groups_along(key))
        return self._groups[key]

    def close(self) -> None:
        """Release the groups that were made for this mesh; collective in effect, may be called twice."""
        for group in self._groups.values():
            if group is not self._world.default_group:
                group.close()

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world's ranks in the `group` of the same axes; local."""
        along = self._checked(axes)
        own = tuple(slice(None) if axis in along else number for axis, number in self.coordinates.items())
        return tuple(self._grid()[own].flatten().tolist())

    def rank(self, *axes: str) -> int:
        """Return this rank's number in the `group` of the same axes: its coordinate if it is one axis; local."""
        number = 0
        for axis in self._checked(axes):
            number = number * self.shape[axis] + self.coordinates[axis]
        return number

    def size(self, *axes: str) -> int:
        """Return the number of ranks in the `group` of the same axes; local."""
        return math.prod(self.shape[axis] for axis in self._checked(axes))

    # ---- coordinates ----------------------------------------------------------------------------------------

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of one of the world's ranks; local.

        Raises:
            ValueError: It is no rank of the world.
        """
        if not 0 <= integer("rank", rank) < self._world.size:
            raise ValueError(f"rank: expected one of the world's, 0 to {self._world.size - 1}, got {rank}")
        return dict(zip(self.axes, map(int, np.unravel_index(rank, self._sizes)), strict=True))

    def rank_at(self, **coordinates: int) -> int:
        """Return the world's rank at some coordinates; local.

        Args:
            coordinates: Numbers by axis; other axes have this rank's.

        Raises:
            ValueError: An axis is unknown, or a number out of range.
        """
        self._checked(coordinates)
        for axis, number in coordinates.items():
            if not 0 <= integer(axis, number) < self.shape[axis]:
                raise ValueError(f"{axis}: expected a place from 0 to {self.shape[axis] - 1}, got {number}")
        return int(np.ravel_multi_index(tuple((self.coordinates | coordinates).values()), self._sizes))

    # ---- text -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"DeviceMesh({self.shape}, rank={self._world.rank})"

    def describe(self, max_rows: int = 16) -> str:
        """Return a table of the ranks along the last axis, and the axes whose groups span nodes; local.

        Args:
            max_rows: Largest number of rows; rows in the middle are left out.
        """
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.shape.items())
        nodes = len(np.unique(self._nodes))
        lines = [f"{sizes}: {counted(self._world.size, 'rank')} on {counted(nodes, 'node')}"]
        across = [axis for axis in self._several if self._crosses_nodes(axis)]
        if across:
            lines.append(f"groups across nodes: {', '.join(across)}")
        if self._several:
            lines += self._rows(max_rows)
        return "\n".join(lines)

    def _rows(self, most: int) -> list[str]:
        """Return the header of the table and a line for each group along the last axis."""
        *leading, last = self._several
        header = " ".join([*leading, f"ranks along {last}"])
        groups = self._groups_along((last,))
        left_out, half = len(groups) - most, (most + 1) // 2
        if left_out <= 0:
            return [header, *map(self._row, groups)]
        first, others = map(self._row, groups[:half]), map(self._row, groups[half + left_out :])
        return [header, *first, f"... {counted(left_out, 'row')} more", *others]

    def _row(self, ranks: NDArray[np.int32]) -> str:
        """Return the coordinates of a group on the other axes, and its ranks."""
        first = self.coordinates_of(int(ranks[0]))
        columns = [f"{first[axis]:>{len(axis)}}" for axis in self._several[:-1]]
        shown = [str(rank) for rank in ranks]
        if len(shown) > _SHOWN_RANKS:
            shown[_SHOWN_RANKS - 2 : -1] = ["..."]
        return " ".join(columns + shown)

    def _crosses_nodes(self, axis: str) -> bool:
        nodes, number = self._nodes.reshape(self._sizes), self.axes.index(axis)
        return bool((nodes.min(number) < nodes.max(number)).any())

    # ---- inside ---------------------------------------------------------------------------------------------

    def _checked(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Check names of axes and return them in the order of the mesh; no names mean all axes."""
        given = list(axes)
        unknown = [axis for axis in given if not isinstance(axis, str) or axis not in self.shape]
        if unknown:
            known = ", ".join(map(repr, self.axes))
            raise ValueError(f"axis: expected one of the mesh's, {known}, got {unknown[0]!r}")
        if len(set(given)) != len(given):
            raise ValueError(f"axes: expected different ones, got {given}")
        return tuple(axis for axis in self.axes if axis in given) if given else self.axes

    def _grid(self) -> NDArray[np.int32]:
        """Return [sizes of the axes] the world's ranks."""
        grid: NDArray[np.int32] = np.arange(self._world.size, dtype=np.int32).reshape(self._sizes)
        return grid

    def _groups_along(self, axes: tuple[str, ...]) -> NDArray[np.int32]:
        """Return [groups, ranks] the ranks of each group along some axes, given in the order of the mesh."""
        along = [self.axes.index(axis) for axis in axes]
        others = [number for number in range(len(self.axes)) if number not in along]
        groups: NDArray[np.int32] = self._grid().transpose(*others, *along).reshape(-1, self.size(*axes))
        return groups


def nearest_shapes(
    asked: Mapping[str, int], num_ranks: int, count: int | None = _SUGGESTIONS
) -> list[dict[str, int]]:
    """Return the possible shapes of `num_ranks` ranks, the nearest to a wanted shape first; local.

    Args:
        asked: Wanted number of ranks along each axis; -1 means any number.
        num_ranks: Product of the sizes.
        count: Largest number of shapes; None returns all.
    """

    def distance(shape: dict[str, int]) -> float:
        return sum(abs(math.log(shape[axis] / size)) for axis, size in asked.items() if size > 0)

    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    all_sizes = (sizes for sizes in itertools.product(divisors, repeat=len(asked)) if math.prod(sizes) == num_ranks)
    shapes = [dict(zip(asked, sizes, strict=True)) for sizes in all_sizes]
    return sorted(shapes, key=lambda shape: round(distance(shape), 9))[:count]


def _checked_shape(shape: object, num_ranks: int) -> dict[str, int]:
    """Check a shape and return it with the inferred size in place of -1."""
    if not isinstance(shape, Mapping):
        raise TypeError(f'shape: expected a mapping such as {{"dp": 2, "tp": 4}}, got {shape!r}')
    if not shape:
        raise ValueError('shape: expected at least one axis, such as {"dp": -1}, got none')
    sizes: dict[str, int] = {}
    for axis, size in shape.items():
        if not isinstance(axis, str) or not axis:
            raise TypeError(f"shape: expected names of axes, got {axis!r}")
        sizes[axis] = integer(axis, size)
        if sizes[axis] < 1 and sizes[axis] != INFERRED:
            raise ValueError(f"{axis}: expected a number of ranks from 1, or -1 for the ranks left, got {size}")
    fixed = {axis: size for axis, size in sizes.items() if size != INFERRED}
    if len(sizes) > len(fixed) + 1:
        inferred = [axis for axis in sizes if axis not in fixed]
        raise ValueError(f"shape: expected at most one size of -1, got {len(inferred)}: {', '.join(inferred)}")
    product = math.prod(fixed.values())
    if num_ranks % product or (product != num_ranks and fixed == sizes):
        raise ValueError(_product_message(sizes, fixed, num_ranks))
    return {axis: fixed.get(axis, num_ranks // product) for axis in sizes}


def _product_message(sizes: Mapping[str, int], fixed: Mapping[str, int], num_ranks: int) -> str:
    product = math.prod(fixed.values())
    wanted, other = f"is {num_ranks}, the number", f"{product} ranks"
    if fixed != sizes:
        wanted, other = f"divides {num_ranks}, the number", f"a number of ranks that {product} divides"
    asked = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
    near = " or ".join(map(str, nearest_shapes(sizes, num_ranks)))
    return (
        f"shape: expected sizes whose product {wanted} of ranks in the world, got {asked} = {product}; "
        f"take {near}, or start {other}"
    )
