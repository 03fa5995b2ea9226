"""Checks at every load that `state.json`, `checksums.safetensors` and the other files belong together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError
from .checksums import Checksums, block_count, checksums_of, crc32
from .small_files import check_plain_name, read_small, regular_size
from .state_file import CHECKSUMS_FILE, STATE_FILE, read_state
from .tensor_file import TensorEntry, read_header


def read_checksums(folder: Path, state: Mapping[str, Any]) -> dict[str, Checksums]:
    """Return the checksums of each file by its name; local.

    Args:
        folder: The checkpoint.
        state: Content of its `state.json`; empty if that is damaged.

    Raises:
        CheckpointError: They are damaged, or of another checkpoint.
    """
    path = folder / CHECKSUMS_FILE
    entries = read_header(path).entries
    data = read_small(path)
    own = f"{crc32(data):08x}"
    if own != state.get("checksums", own):
        raise CheckpointError(f"{path}: it is damaged, or of another checkpoint than {STATE_FILE}")
    try:
        return {check_plain_name(name): _checksums_in(entry, data) for name, entry in entries.items()}
    except ValueError as error:
        raise CheckpointError(f"{path}: it is damaged: {error}") from None


def _checksums_in(entry: TensorEntry, data: bytes) -> Checksums:
    if entry.spec.dtype != torch.uint32 or len(entry.spec.shape) != 1:
        raise ValueError(f"{entry.spec.name!r} has no list of checksums")
    return np.frombuffer(data[entry.start : entry.stop], dtype="<u4")


def check_file(path: Path, checksums: Checksums) -> None:
    """Check the size of a file, and the content of a file without tensors; local.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    size = regular_size(path)
    if block_count(size) != len(checksums):
        raise CheckpointError(
            f"{path}: has {size} bytes, and {CHECKSUMS_FILE} has checksums of {len(checksums)} blocks of 1 MiB: it "
            "is cut off, or of another checkpoint"
        )
    if path.suffix != ".safetensors" and (checksums_of(read_small(path)) != checksums).any():
        raise CheckpointError(f"{path}: its bytes are not those that were written: the file is damaged")


def damage_of(folder: Path) -> str:
    """Return the first damage of a checkpoint, values of tensors not read; empty if there is none; local."""
    try:
        state = read_state(folder)
        if not state:
            return f"{folder / STATE_FILE}: is missing"
        for name, checksums in read_checksums(folder, state).items():
            check_file(folder / name, checksums)
            if name.endswith(".safetensors"):
                read_header(folder / name)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    return ""
