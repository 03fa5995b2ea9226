"""Tensor parallelism: layers whose parameters are cut over the ranks of a group (layer 5)."""

from __future__ import annotations

from .linear import ColumnParallelLinear, RowParallelLinear
from .shards import Shard, Sharded

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "Shard",
    "Sharded",
]
