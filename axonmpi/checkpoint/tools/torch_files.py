"""Files of `torch.save`: read without running code in them, and written as one state dict or a dict of them."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch

from ...errors import CheckpointError
from .checkpoint_data import CheckpointData, Progress, total_bytes
from .torch_dict import read_torch_dict, torch_dict_of


def from_torch_file(path: Path, *, only_model: bool) -> CheckpointData:
    """Read a file of `torch.save`; local. Tensors are mapped, unless torch before 1.6 has written the file.

    Args:
        path: The file.
        only_model: Leave an optimizer's state alone.

    Raises:
        CheckpointError: It is damaged, or reading it would run code in it.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read as a file of torch.save: {_first_line(error)}") from None
    except pickle.UnpicklingError as error:
        refused = re.search(r"WeightsUnpickler error: (.+)", str(error))
        reason = refused[1] if refused else _first_line(error)
        raise CheckpointError(
            f"{path}: has more than tensors and plain values, which only a program that trusts it can load: "
            f"{reason}"
        ) from None
    data = CheckpointData("torch", [(path.name, path.stat().st_size)])
    read_torch_dict(data, str(path), loaded, only_model=only_model)
    return data


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class _CountedFile:
    """A file that calls `progress` with the bytes that were written to it."""

    def __init__(self, file: IO[bytes], total: int, progress: Progress) -> None:
        self._file = file
        self._total = total
        self._progress = progress

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._progress(min(self._file.tell(), self._total), self._total)
        return written

    def flush(self) -> None:
        self._file.flush()


def write_torch_file(data: CheckpointData, path: Path, progress: Progress) -> None:
    """Write a file for `torch.load`; local.

    Raises:
        OSError: It cannot be written.
    """
    total = total_bytes([*data.model.values(), *data.optimizer.values()])
    with path.open("wb") as opened:
        torch.save(torch_dict_of(data), cast("IO[bytes]", _CountedFile(opened, total, progress)))
        opened.flush()
        os.fsync(opened.fileno())
