"""Ranks, numbers and tables as text, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

MAX_LISTED = 16
"""The longest list of numbers that a message shows in full."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 2", and many ranks as "ranks 0-511, 520"; local."""
    ordered = sorted(ranks)
    if len(ordered) > MAX_LISTED:
        return f"ranks {in_ranges(ordered, ', ', MAX_LISTED)}"
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def listed(numbers: Sequence[int]) -> str:
    """Return "[3, 1, 2]", with dots for the middle of many numbers; local."""
    if len(numbers) <= MAX_LISTED:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[: MAX_LISTED - 2]))}, ..., {numbers[-1]}]"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each text, the text of the lowest rank first; local.

    Args:
        texts: By rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_of.setdefault(texts[rank], []).append(rank)
    return ranks_of


def lines_of_ranks(ranks_of: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return an indented line for each text, which names its ranks; local."""
    return "\n  ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_of)


def first_difference(lists: Sequence[Sequence[str]]) -> str:
    """Return a line for each text at the first index at which the ranks' lists differ; empty if none does; local.

    Args:
        lists: Texts of each rank.
    """
    for texts in zip_longest(*lists, fillvalue="no further one"):
        if len(set(texts)) > 1:
            return lines_of_ranks(ranks_by_text(dict(enumerate(texts))).items())
    return ""


def text_of_problems(problems: Sequence[str]) -> str:
    """Return the message of an error that all ranks raise; empty if no rank has a problem; local.

    Args:
        problems: Problem of each rank, empty for none.

    Returns:
        The problem if all ranks have the same one, else a line for each problem, which names its ranks.
    """
    found = ranks_by_text({rank: problem for rank, problem in enumerate(problems) if problem})
    if len(set(problems)) == 1:
        return problems[0]
    return "\n".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in found.items())


def counted(number: int, word: str, words: str = "") -> str:
    """Return "1 rank" or "4 ranks"; local.

    Args:
        number: The number.
        word: The noun.
        words: Its plural, if that is not `word` and an s.
    """
    return f"{number} {word if number == 1 else words or word + 's'}"


def printable(text: str) -> str:
    """Escape the control characters of a text, such as terminal sequences, except line ends; local."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def in_ranges(numbers: Sequence[int], separator: str = " ", most: int | None = None) -> str:
    """Return ascending numbers as "0-3 8-11 16"; local.

    Args:
        numbers: Numbers in ascending order.
        separator: The text between two ranges.
        most: The largest number of ranges to show; dots replace the ranges in the middle.
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if most is not None and len(shown) > most:
        shown[most - 1 : -1] = ["..."]
    return separator.join(shown)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return the rows of a table as lines with columns of equal width; local.

    Args:
        rows: Rows of the same length.
        left: Indices of the columns to align on the left; the others are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number in left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def quoted(names: Sequence[str], most: int) -> str:
    """Return "'a', 'b' and 3 more"; local.

    Args:
        names: The names; an empty list gives an empty text.
        most: Number of names to show.
    """
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
