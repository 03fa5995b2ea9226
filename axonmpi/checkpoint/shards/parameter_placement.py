"""The elements of a full parameter that this rank's memory has, and the ranks with the same elements.

    full parameter        [8, 6]      this rank's tensor-parallel layer has rows 0 1 6 7: its `ranges`
    of the layer          [4, 6]      FSDP gives this rank the elements 5 to 13: its `bounds`
    memory of the rank    [9]         pieces [1, 1] at (0, 5), [1, 6] at (1, 0), [1, 2] at (6, 0) of the full one

An optimizer's state of a parameter has the shape of the rank's memory of it, and so the same placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...tensor.shards import Range, Shard, Sharded
from .subarrays import Subarray
from .tensor_shard import UNREPLICATED, Piece, Replicas, TensorShard, pieces_of_range


@dataclass(frozen=True)
class Placement:
    """The placement of a rank's memory in a full parameter, also for state of an optimizer of the same shape.

    Attributes:
        name: The full parameter's name in the file.
        shape: Of the full parameter.
        layer_shape: Of the tensor that the rank's layer computes with, padding included.
        bounds: First and last element of that tensor, plus one, that the rank has.
        memory_shape: Of the rank's memory.
        dim: Dimension of `layer_shape` along which a layer is sharded.
        ranges: Rows of the full parameter along it, in the layer's order; None if the layer is not sharded.
        is_transposed: The full parameter is transposed against the layer's.
        replicas: The ranks with the same elements; replicas with equal shards of all tensors do not count.
        state_replicas: The ranks with the same unsharded optimizer state, such as `step`.
        is_first: False for a copy of a tied parameter that belongs to an earlier stage.
    """

    name: str
    shape: tuple[int, ...]
    layer_shape: tuple[int, ...]
    bounds: tuple[int, int]
    memory_shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] | None = None
    is_transposed: bool = False
    replicas: Replicas = UNREPLICATED
    state_replicas: Replicas = UNREPLICATED
    is_first: bool = True

    @property
    def is_full(self) -> bool:
        """True if the rank has the full parameter, as in the file."""
        return self.ranges is None and self.bounds == (0, math.prod(self.shape))

    @property
    def is_empty(self) -> bool:
        """True if other ranks have all of its elements."""
        return self.bounds[0] == self.bounds[1] and math.prod(self.shape) > 0

    def shard(self, memory: Tensor, key: str = "") -> TensorShard:
        """Return the shard in memory that has this placement; local.

        Args:
            memory: [*memory_shape] of the parameter, or of the optimizer's state for it.
            key: Name of the state.
        """
        name = f"{self.name}.{key}" if key else self.name
        pieces, is_split = list(self._pieces(memory.detach())), bool(self.shape)
        return TensorShard(name, self.shape, memory.dtype, pieces, self.replicas, is_split)

    def unsharded_state(self, memory: Tensor, key: str) -> TensorShard:
        """Return the shard of a state that is not sharded with the parameter; local.

        Args:
            memory: The full state.
            key: Its name.
        """
        shape = tuple(memory.shape)
        pieces = [Piece(Subarray.full(shape), memory.detach())]
        name, is_split = f"{self.name}.{key}", bool(shape)
        return TensorShard(name, shape, memory.dtype, pieces, self.state_replicas, is_split)

    def _pieces(self, memory: Tensor) -> Iterator[Piece]:
        first, last = self.bounds
        if first == last:
            return
        if last - first == math.prod(self.layer_shape):
            yield from self._in_full(Subarray.full(self.layer_shape), memory)
            return
        for piece in pieces_of_range(memory.view(-1), self.layer_shape, first):
            yield from self._in_full(piece.subarray, piece.view)

    def _in_full(self, of_layer: Subarray, view: Tensor) -> Iterator[Piece]:
        """Yield the pieces of a subarray of the layer's tensor: one for each range, none for padding."""
        if self.ranges is None:
            yield Piece(of_layer, view)
            return
        at, begin = 0, of_layer.start[self.dim]
        end = begin + of_layer.size[self.dim]
        for start, stop in self.ranges:
            low, high = max(begin, at), min(end, at + stop - start)
            if low < high:
                piece_start = _with(of_layer.start, self.dim, start + low - at)
                piece_size = _with(of_layer.size, self.dim, high - low)
                rows = view.narrow(self.dim, low - begin, high - low)
                if self.is_transposed:
                    yield Piece(Subarray(piece_start[::-1], piece_size[::-1]), rows.t())
                else:
                    yield Piece(Subarray(piece_start, piece_size), rows)
            at += stop - start


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


class ParallelLayers:
    """The tensor-parallel layers among a model's modules.

    Raises:
        ValueError: They belong to different groups of ranks.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._shards: dict[int, Shard] = {}
        groups: list[ProcessGroup] = []
        for module in modules:
            if isinstance(module, Sharded):
                groups.append(module.process_group)
                parameters: dict[str, Any] = module._parameters
                self._shards |= {id(dict.get(parameters, name)): shard for name, shard in module.shards.items()}
        if any(group.ranks != groups[0].ranks for group in groups):
            raise ValueError("model: expected parallel layers that all belong to one group of ranks")
        self._ranks = Replicas(groups[0].size, groups[0].rank) if groups else UNREPLICATED

    def placement(
        self,
        name: str,
        tensor: Tensor,
        layer_shape: tuple[int, ...],
        bounds: tuple[int, int],
        memory_shape: tuple[int, ...],
        replicas: Replicas,
        state_replicas: Replicas,
        *,
        is_first: bool,
    ) -> Placement:
        """Return the placement of a tensor; local.

        Args:
            name: In the file.
            tensor: Of a module.
            layer_shape: Of the tensor that the layer computes with.
            bounds: First and last element of that tensor, plus one, that this rank has.
            memory_shape: Of the rank's memory.
            replicas: The ranks with the same elements, one for each group of layers.
            state_replicas: The ranks with the same unsharded optimizer state, one for each group of layers.
            is_first: False for a copy of an earlier stage's parameter.
        """
        shard = self._shards.get(id(tensor))
        all_state_replicas = state_replicas.times(self._ranks)
        if shard is None or (shard.group_size == 1 and not shard.is_transposed):
            return Placement(
                name,
                layer_shape,
                layer_shape,
                bounds,
                memory_shape,
                replicas=replicas.times(self._ranks),
                state_replicas=all_state_replicas,
                is_first=is_first,
            )
        ranges = shard.ranges[self._ranks.rank]
        same_rows = [rank for rank, other in enumerate(shard.ranges) if other == ranges and ranges]
        return Placement(
            name,
            tuple(shard.full_shape(layer_shape)),
            layer_shape,
            bounds,
            memory_shape,
            shard.dim % len(layer_shape),
            ranges,
            shard.is_transposed,
            replicas.times(Replicas.among(same_rows, self._ranks.rank)),
            all_state_replicas,
            is_first,
        )
