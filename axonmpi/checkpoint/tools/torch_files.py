"""Files of `torch.save`: read without running anything in them, and written as one state dict or a dict of them."""

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
    """Read a file of `torch.save`; local. Tensors are mapped, if the file is not of before torch 1.6.

    Args:
        path: The file.
        only_model: Whether an optimizer's state is left alone.

    Raises:
        CheckpointError: It has something that cannot be read without running code in it, or is damaged.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read as a file of torch.save: {_first_line(error)}") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: has more than tensors and plain values, which only a program that trusts it can load: "
            f"{_refused(error)}"
        ) from None
    made = CheckpointData("torch", [(path.name, path.stat().st_size)])
    read_torch_dict(made, str(path), loaded, only_model=only_model)
    return made


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _refused(error: Exception) -> str:
    """Return what torch has met in the file, out of all that it says."""
    found = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return found[1] if found else _first_line(error)


class _Counted:
    """A file that tells how much was written to it."""

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
    kinds = {"model": data.model, "optimizer": data.optimizer}
    tensors = {
        kind: dict(zip(of_kind, data.fetch(of_kind.values()), strict=True)) for kind, of_kind in kinds.items()
    }
    total = sum(total_bytes(of_kind.values()) for of_kind in kinds.values())
    with path.open("wb") as opened:
        torch.save(torch_dict_of(data, tensors), cast("IO[bytes]", _Counted(opened, total, progress)))
        opened.flush()
        os.fsync(opened.fileno())
