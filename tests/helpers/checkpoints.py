"""Helpers of the tests of checkpoints: damage, errors that all ranks raise, actions of one rank."""

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import axonmpi as ax


def assert_checksums(folder: Path) -> None:
    """Compare the checksums of a checkpoint with those of its files, a mebibyte at a time."""
    for name, sums in load_file(folder / "checksums.safetensors").items():
        data = (folder / name).read_bytes()
        assert sums.tolist() == [zlib.crc32(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)], name


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sort values that come in the order of some file."""
    return dict(sorted(values.items()))


def cut_off(path: Path, size: int = 1) -> None:
    """Take so many bytes off the end of a file."""
    os.truncate(path, path.stat().st_size - size)


def entries(folder: Path) -> list[Path]:
    """Return everything below a folder, but for the locks of this process, which last as long as their objects."""
    return sorted(path for path in folder.rglob("*") if path.suffix != ".axonmpi-lock")


def flip(path: Path, *offsets: int) -> None:
    """Change a bit of each of these bytes of a file."""
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


def on_first(action: Callable[..., object], *args: object) -> None:
    """Do something on rank 0 when all ranks are here, before any goes on; collective."""
    ax.barrier()
    if ax.is_main_process():
        action(*args)
    ax.barrier()


def refused_on_all(kind: type[Exception], call: Callable[..., object], *args: object, **options: object) -> str:
    """Return the message of an error that all ranks raise with the same text; collective."""
    with pytest.raises(kind) as error:
        call(*args, **options)
    (text,) = set(ax.all_gather_object(str(error.value)))
    return text
