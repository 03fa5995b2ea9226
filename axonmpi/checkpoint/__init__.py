"""Checkpoints: standard files that all ranks write together, and that any layout of ranks loads."""

from __future__ import annotations

from .folder import CheckpointFolder
from .loading import CheckpointInfo, load_checkpoint
from .preemption import PreemptionGuard
from .saving import save_checkpoint

__all__ = ["CheckpointFolder", "CheckpointInfo", "PreemptionGuard", "load_checkpoint", "save_checkpoint"]
