"""Shards of weights that the whole model keeps as [in, out], and parallel layers as [out, in]."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .shards import Shard


@dataclass(frozen=True)
class TransposedShard(Shard):
    """A shard whose parts are [out, in] and whose whole is [in, out]; `dim` and `ranges` are those of the parts."""

    @classmethod
    def of(cls, shard: Shard) -> TransposedShard:
        """Return the transposed form of a shard of [out, in]; local."""
        return cls(**{field.name: getattr(shard, field.name) for field in dataclasses.fields(shard)})

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's part, [out, in], of a weight [in, out]; local."""
        return super().cut(full.t(), rank)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the weight, [in, out], of the ranks' parts, [out, in]; local."""
        return super().join(parts).t().contiguous()


def whole_shape(shard: Shard | None, part: Sequence[int]) -> list[int]:
    """Return the shape of a whole parameter, from the shape of a rank's part; local.

    Args:
        shard: How it is cut; None if it is not.
        part: The shape of the part.
    """
    if shard is None:
        return list(part)
    whole = [*part[: shard.dim], shard.size, *part[shard.dim + 1 :]]
    return whole[::-1] if isinstance(shard, TransposedShard) else whole
