"""Checkpoints: standard files that all ranks write together, and that any layout of ranks loads."""

from __future__ import annotations

from .saving import save_checkpoint

__all__ = ["save_checkpoint"]
