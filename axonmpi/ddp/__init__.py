"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged."""

from __future__ import annotations

from .gradient_synchronizer import GradientBucket, GradientSynchronizer
from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "GradientBucket", "GradientSynchronizer"]
