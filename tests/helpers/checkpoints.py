"""What tests of checkpoints share: damage, errors that all ranks raise, actions of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import axonmpi as ax

__all__ = ["by_name", "cut_off", "flip", "on_first", "refused_on_all"]


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sort values that come in the order of some file."""
    return dict(sorted(values.items()))


def cut_off(path: Path, size: int = 1) -> None:
    """Take so many bytes off the end of a file."""
    os.truncate(path, path.stat().st_size - size)


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
