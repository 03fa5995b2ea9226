"""Tables of figures: each column is a heading and a function that formats its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from ....utils.text import aligned
from .options import UNITS

Column = tuple[str, Callable[[Any], str]]
"""A heading, of one or more lines, and a function from a row's figures to the text of the cell."""

BAR: Column = ("|", lambda row: "|")


def table_lines(columns: Sequence[Column], rows: Iterable[Any], left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; the columns with these numbers are aligned on the left."""
    height = 1 + max(heading.count("\n") for heading, _ in columns)
    headings = [_heading_lines(heading, height) for heading, _ in columns]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return aligned([*map(list, zip(*headings, strict=True)), *cells], left)


def _heading_lines(heading: str, height: int) -> list[str]:
    if heading == BAR[0]:
        return [heading] * height
    lines = heading.split("\n")
    return [""] * (height - len(lines)) + lines


def figure(*keys: str, form: str = ".1f", scale: float = 1.0) -> Callable[[Any], str]:
    """Return a function that formats the number at `row[keys[0]][keys[1]]...`, multiplied by `scale`."""
    return lambda row: f"{reduce(getitem, keys, row) * scale:{form}}"


def text(key: str) -> Callable[[Any], str]:
    """Return a function that formats `row[key]`."""
    return lambda row: str(row[key])


def ratio(over: str, under: str, *keys: str) -> Callable[[Any], str]:
    """Return a function that formats the ratio of two numbers of `row[keys[0]]...`, "-" if one is missing."""

    def cell(row: Any) -> str:
        numbers = reduce(getitem, keys, row)
        return f"{numbers[over] / numbers[under]:.2f}" if over in numbers and under in numbers else "-"

    return cell


def gain(other: float, ours: float) -> str:
    """Return the ratio of another overhead to ours."""
    return f"{other / ours:.1f}" if ours > 0 else "no overhead"


def format_size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it, such as `64 KiB`."""
    unit = next(unit for unit in reversed(UNITS) if nbytes % UNITS[unit] == 0)
    return f"{nbytes // UNITS[unit]} {unit}"


def format_time(microseconds: float | None) -> str:
    """Return a time in microseconds, or in milliseconds from one millisecond on; "-" for None."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.2f} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"
