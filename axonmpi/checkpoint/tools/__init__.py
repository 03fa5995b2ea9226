"""Tools for files of checkpoints and weights, for one process and without a model: inspect, verify, convert.

`convert.py` reads any known format into a `CheckpointData` and writes it in another one; `describe.py` shows it,
and `verify.py` compares checksums. They use the file formats of this package, and torch's own readers and
writers.
"""

from __future__ import annotations

from .checkpoint_data import FORMATS, Progress
from .convert import convert_checkpoint
from .describe import describe_checkpoint, description_text
from .verify import Damage, Verification, verify_checkpoint

__all__ = [
    "FORMATS",
    "Damage",
    "Progress",
    "Verification",
    "convert_checkpoint",
    "describe_checkpoint",
    "description_text",
    "verify_checkpoint",
]
