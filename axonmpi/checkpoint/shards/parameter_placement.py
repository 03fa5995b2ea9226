"""Where a rank's memory of a tensor lies in the whole one.

    whole parameter [8, 6]      rows 0 1 6 7 are those of this rank's layer: its `ranges`
    of the layer    [4, 6]      FSDP gives this rank the elements 5 to 13: its `bounds`
    of the rank     [9]         pieces [1, 1] at (0, 5), [1, 6] at (1, 0), [1, 2] at (6, 0) of the whole one

What optimizers keep for a parameter is laid out as the rank's memory of it is, so it makes the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...tensor.shards import Range, Shard, Sharded
from ...tensor.transposed import TransposedShard, whole_shape
from .subarrays import Subarray, subarrays_of_range
from .tensor_shard import Piece, TensorShard


class Replicas(NamedTuple):
    """Ranks that have the same.

    Attributes:
        ranks: How many.
        number: This rank's number among them.
    """

    ranks: int
    number: int

    def each_of(self, others: Replicas) -> Replicas:
        """Return the ranks where each of these has as many others."""
        return Replicas(self.ranks * others.ranks, self.number * others.ranks + others.number)


UNREPLICATED = Replicas(1, 0)


@dataclass(frozen=True)
class Placement:
    """Where a rank's memory of a parameter, or of what is laid out as it is, lies in the whole one.

    Attributes:
        name: The whole parameter's name in the file.
        shape: Of the whole parameter.
        local: Shape of what the rank's layer computes with, padding included.
        bounds: Which elements of it the rank has, from and to.
        memory: Shape of the rank's memory of them.
        dim: Dimension of `local` that is cut.
        ranges: Rows of the whole parameter along it, in the order in which `local` has them; None if it is not cut.
        is_transposed: Whether the whole parameter is transposed against `local`.
        elements: The ranks that have the same elements, but for replicas with all shards alike.
        wholes: The ranks that have what goes with the parameter and is not divided, such as a count of steps.
        is_first: False for a copy of a tied parameter that belongs to an earlier stage.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    bounds: tuple[int, int]
    memory: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] | None = None
    is_transposed: bool = False
    elements: Replicas = UNREPLICATED
    wholes: Replicas = UNREPLICATED
    is_first: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of the parameter, laid out as in the file."""
        return self.ranges is None and self.bounds == (0, math.prod(self.shape))

    @property
    def is_empty(self) -> bool:
        """Whether other ranks have all of its elements."""
        return self.bounds[0] == self.bounds[1] and math.prod(self.shape) > 0

    def shard(self, memory: Tensor, key: str = "") -> TensorShard:
        """Return the shard that memory is which is laid out as the rank's memory of the parameter; local.

        Args:
            memory: The parameter's, or that of an optimizer's state for it.
            key: The state's name.
        """
        name = f"{self.name}.{key}" if key else self.name
        pieces, is_split = list(self._pieces(memory.detach())), bool(self.shape)
        return TensorShard(name, self.shape, memory.dtype, pieces, *self.elements, is_split)

    def replicated(self, memory: Tensor, key: str) -> TensorShard:
        """Return the shard that a tensor is which belongs to the parameter and which ranks have whole; local."""
        shape = tuple(memory.shape)
        pieces = [Piece(Subarray.whole(shape), memory.detach())]
        return TensorShard(f"{self.name}.{key}", shape, memory.dtype, pieces, *self.wholes, is_split=bool(shape))

    def _pieces(self, memory: Tensor) -> Iterator[Piece]:
        first, last = self.bounds
        if first == last:
            return
        if last - first == math.prod(self.local):
            yield from self._in_whole(Subarray.whole(self.local), memory)
            return
        elements, at = memory.view(-1), 0
        for subarray in subarrays_of_range(self.local, first, last):
            yield from self._in_whole(subarray, elements[at : at + subarray.numel].view(subarray.size))
            at += subarray.numel

    def _in_whole(self, subarray: Subarray, view: Tensor) -> Iterator[Piece]:
        """Yield the pieces of a subarray of `local` in the full parameter: one for each range, none for padding."""
        if self.ranges is None:
            yield Piece(subarray, view)
            return
        at, begin, end = 0, subarray.start[self.dim], subarray.start[self.dim] + subarray.size[self.dim]
        for start, stop in self.ranges:
            low, high = max(begin, at), min(end, at + stop - start)
            if low < high:
                where = _with(subarray.start, self.dim, start + low - at)
                size = _with(subarray.size, self.dim, high - low)
                rows = view.narrow(self.dim, low - begin, high - low)
                yield (
                    Piece(Subarray(where[::-1], size[::-1]), rows.t())
                    if self.is_transposed
                    else Piece(Subarray(where, size), rows)
                )
            at += stop - start


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


class Layers:
    """The parallel layers among a model's modules.

    Raises:
        ValueError: They belong to different groups of ranks.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._cuts: dict[int, Shard] = {}
        groups: list[ProcessGroup] = []
        for module in modules:
            if isinstance(module, Sharded):
                groups.append(module.process_group)
                parameters: dict[str, Any] = module._parameters
                self._cuts |= {id(dict.get(parameters, name)): shard for name, shard in module.shards.items()}
        if any(group.ranks != groups[0].ranks for group in groups):
            raise ValueError("model: expected parallel layers that all belong to one group of ranks")
        self._ranks = Replicas(groups[0].size, groups[0].rank) if groups else UNREPLICATED

    def placement(
        self,
        name: str,
        tensor: Tensor,
        local: tuple[int, ...],
        bounds: tuple[int, int],
        memory: tuple[int, ...],
        beside: tuple[Replicas, Replicas],
        *,
        is_first: bool,
    ) -> Placement:
        """Return where a tensor lies; local.

        Args:
            name: In the file.
            tensor: As modules have it.
            local: Shape of what the layer computes with.
            bounds: Which elements of it this rank has.
            memory: Shape of the rank's memory of them.
            beside: The ranks outside of the layers' group that have the same elements, and what goes with them.
            is_first: Whether it is no copy of an earlier stage's.
        """
        shard = self._cuts.get(id(tensor))
        elements, wholes = (copies.each_of(self._ranks) for copies in beside)
        is_transposed = isinstance(shard, TransposedShard)
        if shard is None or (shard.group_size == 1 and not is_transposed):
            return Placement(
                name, local, local, bounds, memory, elements=elements, wholes=wholes, is_first=is_first
            )
        shard = shard.along(shard.dim % len(local))
        ranges = shard.ranges[self._ranks.number]
        alike = [rank for rank, other in enumerate(shard.ranges) if other == ranges]
        of_layer = Replicas(len(alike), alike.index(self._ranks.number)) if ranges else UNREPLICATED
        return Placement(
            name,
            tuple(whole_shape(shard, local)),
            local,
            bounds,
            memory,
            shard.dim,
            ranges,
            is_transposed,
            beside[0].each_of(of_layer),
            wholes,
            is_first,
        )
