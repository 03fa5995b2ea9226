"""Data parallelism: every rank has the full model and a part of the batch, and gradients are averaged.

`DistributedDataParallel` is used as torch's class of this name. Read `wrapper.py` first, then `reducer.py`, which
averages gradients while backward runs, in the flat tensors of `buckets.py`. `GradientSynchronizer` is for training
loops without a wrapper. The package imports `wrapping`, `across_ranks`, `groups` and `backends`.
"""

from __future__ import annotations

from .gradient_synchronizer import GradientBucket, GradientSynchronizer
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "GradientBucket", "GradientSynchronizer"]
