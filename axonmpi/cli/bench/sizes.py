"""Sizes as people write them: 4B, 64KiB, 16MiB."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WRITTEN = re.compile(r"(\d+) ?(" + "|".join(_UNITS) + ")", re.ASCII)


def parse_size(text: str) -> int:
    """Return the number of bytes that `64KiB` or the like stands for; local.

    Raises:
        ValueError: The text is no size, or the size is zero.
    """
    written = _WRITTEN.fullmatch(text)
    nbytes = int(written[1]) * _UNITS[written[2]] if written else 0
    if not nbytes:
        raise ValueError(f"expected a size such as 4B, 64KiB or 16MiB, got {text!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that divides it, such as `64 KiB`; local."""
    unit = next(unit for unit in reversed(_UNITS) if nbytes % _UNITS[unit] == 0)
    return f"{nbytes // _UNITS[unit]} {unit}"
