"""Command-line options as data: each function returns the arguments of `add_argument` for one option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...arguments import file_to_write, positive

Options = Mapping[str, Mapping[str, Any]]
"""The arguments of `add_argument` by flag."""

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(\d+) ?(" + "|".join(UNITS) + ")", re.ASCII)

PICTURE = {
    "type": partial(file_to_write, endings=[".png"]),
    "help": "draw the figures into FILE.png",
    "metavar": "FILE.png",
}

TRACE = {
    "type": Path,
    "help": "trace the ranks into FOLDER/N-ranks, for axonmpi trace",
    "metavar": "FOLDER",
}


def number(text: str, default: int) -> dict[str, Any]:
    """Return an option whose value is a whole number from 1."""
    return {"type": positive, "default": default, "help": f"{text} (default: {default})", "metavar": "N"}


def numbers(text: str, default: Sequence[int]) -> dict[str, Any]:
    """Return an option whose values are whole numbers from 1."""
    help_text = f"{text} (default: {' '.join(map(str, default))})"
    return {"type": positive, "nargs": "+", "default": list(default), "help": help_text, "metavar": "N"}


def choices(names: Sequence[str], default: Sequence[str] = (), metavar: str = "NAME") -> dict[str, Any]:
    """Return an option whose values are some of these names, by default all."""
    help_text = f"some of {', '.join(names)} (default: {' '.join(default) or 'all'})"
    selected = list(default or names)
    return {"nargs": "+", "choices": names, "default": selected, "help": help_text, "metavar": metavar}


def sizes(default: Sequence[str]) -> dict[str, Any]:
    """Return an option whose values are sizes of tensors."""
    return {
        "nargs": "+",
        "type": size,
        "default": [size(text) for text in default],
        "help": f"bytes of a tensor (default: {' '.join(default)})",
        "metavar": "SIZE",
    }


def size(text: str) -> int:
    """Return the bytes of a size such as `64KiB`, a multiple of 4."""
    parts = _SIZE.fullmatch(text)
    nbytes = int(parts[1]) * UNITS[parts[2]] if parts else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"expected a size such as 4B, 64KiB or 16MiB, got {text!r}")
    if nbytes % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 bytes, got {text!r}")
    return nbytes
