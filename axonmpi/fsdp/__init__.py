"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among the ranks."""

from __future__ import annotations

from .guard import ScatteredParameterError
from .memory import FSDPMemoryStats
from .optimizers import ShardedGradScaler
from .options import CPUOffload, MixedPrecision, ShardingStrategy
from .wrapper import FullyShardedDataParallel

__all__ = [
    "CPUOffload",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ScatteredParameterError",
    "ShardedGradScaler",
    "ShardingStrategy",
]
