"""What one looks at, checks and converts checkpoints with: tools for one process, which needs no model."""

from __future__ import annotations

from .checkpoint_data import FORMATS, Progress
from .convert import convert_checkpoint
from .describe import describe_checkpoint, text_of
from .verify import Damage, Verification, verify_checkpoint

__all__ = [
    "FORMATS",
    "Damage",
    "Progress",
    "Verification",
    "convert_checkpoint",
    "describe_checkpoint",
    "text_of",
    "verify_checkpoint",
]
