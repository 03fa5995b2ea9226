"""Numbers in words, for what the trainer shows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "counted", "in_ranges"]


def counted(number: int, word: str, words: str = "") -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def in_ranges(numbers: Sequence[int], most: int) -> str:
    """Return ascending numbers as "0-3 8-11 16", with at most so many ranges; those in the middle are left out."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(shown) > most:
        shown[most - 1 : -1] = ["..."]
    return " ".join(shown)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return rows of texts as lines in columns.

    Args:
        rows: As many texts in each.
        left: Numbers of the columns that are aligned on the left; the others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number in left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
