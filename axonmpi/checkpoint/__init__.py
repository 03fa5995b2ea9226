"""Checkpoints: standard files that all ranks write together, and that any layout of ranks loads."""

from __future__ import annotations

from .loading import CheckpointInfo, load_checkpoint
from .saving import save_checkpoint

__all__ = ["CheckpointInfo", "load_checkpoint", "save_checkpoint"]
