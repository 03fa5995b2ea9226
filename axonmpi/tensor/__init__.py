"""Tensor parallelism: layers whose parameters are cut over the ranks of a group (layer 5)."""

from __future__ import annotations

from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import parallel_cross_entropy
from .shards import Shard, Sharded

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "Shard",
    "Sharded",
    "VocabParallelEmbedding",
    "parallel_cross_entropy",
]
