"""Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over the ranks.

`FullyShardedDataParallel` wraps a model as PyTorch's FSDP does: each rank keeps a shard of every parameter, a
unit of the model (a block, say) is gathered while it computes, and its gradients are reduce-scattered. Ranks of
one node compute with one copy in shared memory and gather nothing.

Read `wrapper.py` (the public class), `flat_parameter.py` (shards and buffers) and `runtime.py` (forward and
backward, with the states in `clock.py`) first. Files import `wrapping`, `across_ranks`, `groups`, `backends` and
packages below these.
"""

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
