"""The ranks of the world in a grid of named axes, with a group along every axis.

    DeviceMesh({"dp": 2, "pp": 2, "tp": 2})      eight ranks; the last axis varies fastest

                 pp 0        pp 1
               tp 0 1      tp 0 1       group("tp") of rank 5: ranks 4 5, its neighbours
    dp 0         0 1         2 3        group("pp") of rank 5: ranks 5 7
    dp 1         4 5         6 7        group("dp") of rank 5: ranks 1 5
                                        group("dp", "tp") of rank 5: ranks 0 1 4 5

Launchers put ranks with neighbouring numbers on one node, so the axis whose ranks talk most comes last. The groups
of an axis, one for each place on the other axes, are disjoint and together all ranks: they are made by one call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from .backends import LocalBackend, all_gather_number, gather_if_different
from .groups.process_group import ProcessGroup
from .groups.world import World, get_world
from .utils.arguments import integer
from .utils.text import counted, lines_of_ranks, ranks_by_text, text_of_problems

INFERRED = -1
"""The size of an axis that gets the ranks which the other axes leave."""

_SHOWN_RANKS = 8
_SUGGESTIONS = 5


class DeviceMesh:
    """A grid of all ranks of a world: every rank has a place on each axis and is in one group along it.

    Making it is collective over the world: so many calls as it has axes of more than one rank, one that checks that
    all ranks make the same mesh, and one that tells each rank's node. Axes of one rank cost nothing.

    Args:
        shape: Number of ranks along each axis by its name, slowest first: neighbours along the last axis have
            neighbouring ranks. One of the sizes may be -1: the ranks that the others leave.
        world: The ranks; None means the current world.

    Attributes:
        shape: Number of ranks along each axis.
        axes: Names of the axes.
        coordinates: This rank's place on each axis.

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
        self.shape = _agreed(world, shape)
        self._nodes = all_gather_number(world.default_group.backend, world.node_rank)
        self.axes = tuple(self.shape)
        self._sizes = tuple(self.shape.values())
        self.coordinates = self.coordinates_of(world.rank)
        self._several = tuple(axis for axis in self.axes if self.shape[axis] > 1)
        alone = ProcessGroup(LocalBackend(memory=world.default_group.backend.place), [world.rank])
        self._groups: dict[tuple[str, ...], ProcessGroup] = {(): alone, self._several: world.default_group}
        for axis in self._several:
            self.group(axis)

    # ---- groups ---------------------------------------------------------------------------------------------

    def group(self, *axes: str) -> ProcessGroup:
        """Return the group of the ranks whose places differ from this one's on the given axes alone.

        Collective over the world when several axes are joined for the first time, local else. The same axes give
        the same object. All axes that have more than one rank give the world's default group.

        Args:
            axes: Names in any order; ranks are numbered in the order of the mesh. None at all: all axes.

        Raises:
            ValueError: There is no such axis, or it is named twice.
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
        """Return the world's ranks that `group` of the same axes has; local."""
        along = self._checked(axes)
        own = tuple(slice(None) if axis in along else place for axis, place in self.coordinates.items())
        return tuple(self._grid()[own].flatten().tolist())

    def rank(self, *axes: str) -> int:
        """Return this rank's number in `group` of the same axes, that is its place on a single axis; local."""
        number = 0
        for axis in self._checked(axes):
            number = number * self.shape[axis] + self.coordinates[axis]
        return number

    def size(self, *axes: str) -> int:
        """Return the number of ranks in `group` of the same axes; local."""
        return math.prod(self.shape[axis] for axis in self._checked(axes))

    # ---- places ---------------------------------------------------------------------------------------------

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the place of one of the world's ranks on each axis; local.

        Raises:
            ValueError: It is no rank of the world.
        """
        if not 0 <= integer("rank", rank) < self._world.size:
            raise ValueError(f"rank: expected one of the world's, 0 to {self._world.size - 1}, got {rank}")
        return dict(zip(self.axes, map(int, np.unravel_index(rank, self._sizes)), strict=True))

    def rank_at(self, **coordinates: int) -> int:
        """Return the world's rank at a place; local.

        Args:
            coordinates: Places by axis; on axes that are not named, this rank's.

        Raises:
            ValueError: There is no such axis or place.
        """
        place = dict(self.coordinates)
        for axis in self._checked(coordinates) if coordinates else ():
            place[axis] = integer(axis, coordinates[axis])
            if not 0 <= place[axis] < self.shape[axis]:
                raise ValueError(f"{axis}: expected a place from 0 to {self.shape[axis] - 1}, got {place[axis]}")
        return int(np.ravel_multi_index(tuple(place.values()), self._sizes))

    # ---- text -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"DeviceMesh({self.shape}, rank={self._world.rank})"

    def describe(self, max_rows: int = 16) -> str:
        """Return a small table of which rank is where, and which axes stay on a node; local.

        Args:
            max_rows: Rows of the table; rows in the middle are left out.
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
        """Return the header of the table and a line for each place on all axes but the last, if there are few."""
        *leading, last = self._several
        groups = self._groups_along((last,))
        left_out, half = max(0, len(groups) - most), (most + 1) // 2
        middle = [f"... {counted(left_out, 'row')} more"] if left_out else []
        first, others = map(self._row, groups[:half]), map(self._row, groups[half + left_out :])
        return [" ".join([*leading, f"ranks along {last}"]), *first, *middle, *others]

    def _row(self, ranks: NDArray[np.int32]) -> str:
        place = self.coordinates_of(int(ranks[0]))
        columns = [f"{place[axis]:>{len(axis)}}" for axis in self._several[:-1]]
        return " ".join([*columns, _listed(ranks.tolist())])

    def _crosses_nodes(self, axis: str) -> bool:
        nodes, number = self._nodes.reshape(self._sizes), self.axes.index(axis)
        return bool((nodes.min(number) < nodes.max(number)).any())

    # ---- inside ---------------------------------------------------------------------------------------------

    def _checked(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Check names of axes and return them in the mesh's order; no names mean all axes."""
        given = list(axes)
        unknown = [axis for axis in given if not isinstance(axis, str) or axis not in self.shape]
        if unknown:
            known = ", ".join(map(repr, self.axes))
            raise ValueError(f"axis: expected one of the mesh's, {known}, got {unknown[0]!r}")
        if len(set(given)) != len(given):
            raise ValueError(f"axes: expected different ones, got {given}")
        return tuple(axis for axis in self.axes if axis in given) if given else self.axes

    def _grid(self) -> NDArray[np.int32]:
        """Return the ranks at their places."""
        grid: NDArray[np.int32] = np.arange(self._world.size, dtype=np.int32).reshape(self._sizes)
        return grid

    def _groups_along(self, axes: tuple[str, ...]) -> NDArray[np.int32]:
        """Return [groups, ranks] the ranks of each group along some axes, which are in the mesh's order."""
        along = [self.axes.index(axis) for axis in axes]
        others = [number for number in range(len(self.axes)) if number not in along]
        groups: NDArray[np.int32] = self._grid().transpose(*others, *along).reshape(-1, self.size(*axes))
        return groups


def nearest_shapes(
    asked: Mapping[str, int], num_ranks: int, count: int | None = _SUGGESTIONS
) -> list[dict[str, int]]:
    """Return the possible shapes of `num_ranks` ranks, the shapes nearest to what was asked first; local.

    Args:
        asked: Number of ranks along each axis; -1 means any number.
        num_ranks: Ranks to place.
        count: How many shapes; None returns all.
    """

    def distance(shape: dict[str, int]) -> float:
        return sum(abs(math.log(shape[axis] / size)) for axis, size in asked.items() if size > 0)

    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    all_sizes = (sizes for sizes in itertools.product(divisors, repeat=len(asked)) if math.prod(sizes) == num_ranks)
    shapes = [dict(zip(asked, sizes, strict=True)) for sizes in all_sizes]
    return sorted(shapes, key=lambda shape: round(distance(shape), 9))[:count]


def _checked_shape(shape: object, num_ranks: int) -> dict[str, int]:
    """Check what was asked for and return it, with the size that is to be inferred."""
    if not isinstance(shape, Mapping):
        raise TypeError(f'shape: expected a mapping such as {{"dp": 2, "tp": 4}}, got {shape!r}')
    if not shape:
        raise ValueError('shape: expected at least one axis, such as {"dp": -1}, got none')
    for axis, size in shape.items():
        _check_axis(axis, size)
    inferred = [axis for axis, size in shape.items() if size == INFERRED]
    if len(inferred) > 1:
        raise ValueError(f"shape: expected at most one size of -1, got {len(inferred)}: {', '.join(inferred)}")
    product = math.prod(size for size in shape.values() if size != INFERRED)
    if num_ranks % product or (product != num_ranks and not inferred):
        raise ValueError(_product_message(shape, product, num_ranks))
    return {axis: num_ranks // product if size == INFERRED else size for axis, size in shape.items()}


def _check_axis(axis: object, size: object) -> None:
    if not isinstance(axis, str) or not axis:
        raise TypeError(f"shape: expected names of axes, got {axis!r}")
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{axis}: expected a number of ranks as an int, got {size!r}")
    if size < 1 and size != INFERRED:
        raise ValueError(f"{axis}: expected a number of ranks from 1, or -1 for those that are left, got {size}")


def _product_message(shape: Mapping[str, int], product: int, num_ranks: int) -> str:
    asked = " x ".join(f"{axis}={size}" for axis, size in shape.items() if size != INFERRED)
    near = " or ".join(map(str, nearest_shapes(shape, num_ranks)))
    if INFERRED in shape.values():
        wanted, other = f"divides {num_ranks}, the number", f"a number of ranks that {product} divides"
    else:
        wanted, other = f"is {num_ranks}, the number", f"{product} ranks"
    return (
        f"shape: expected sizes whose product {wanted} of ranks in the world, got {asked} = {product}; "
        f"take {near}, or start {other}"
    )


def _agreed(world: World, shape: object) -> dict[str, int]:
    """Return the checked shape; collective. What is wrong on one rank raises on all."""
    problem: Exception | None = None
    checked: dict[str, int] = {}
    try:
        checked = _checked_shape(shape, world.size)
    except (TypeError, ValueError) as error:
        problem = error
    own = "" if problem is None else str(problem)
    told = gather_if_different(world.default_group.backend, (own, str(checked)))
    problems, shapes = zip(*told, strict=True)
    if problem is not None:
        raise problem
    if text := text_of_problems(problems):
        raise ValueError(text)
    ranks_of = ranks_by_text(dict(enumerate(shapes)))
    if len(ranks_of) > 1:
        raise ValueError(f"shape: expected the same on all ranks, got\n  {lines_of_ranks(ranks_of.items())}")
    return checked


def _listed(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > _SHOWN_RANKS:
        shown[_SHOWN_RANKS - 2 : -1] = ["..."]
    return " ".join(shown)
