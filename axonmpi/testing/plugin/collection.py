"""Whether all ranks collected the same tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from ..rank_text import merge_texts
from .meeting import SessionStoppedError

__all__ = ["Collected", "merge_collected"]

_USAGE_ERROR = 4


@dataclass(frozen=True)
class Collected:
    """What one rank collected.

    Attributes:
        tests: The ids of the tests, in the order in which they will run.
        errors: What could not be collected, and why.
    """

    tests: tuple[str, ...]
    errors: tuple[str, ...]


def merge_collected(given: Mapping[int, Collected]) -> SessionStoppedError | None:
    """Return how the ranks differ, or None if they do not; local."""
    first = given[0]
    differing = {rank: _difference(first, other) for rank, other in given.items() if other != first}
    if not differing:
        return None
    return SessionStoppedError(
        "the ranks did not collect the same tests in the same order, so they cannot run them together. "
        "Does something that differs from rank to rank decide what is collected (a random order, the order of a "
        "set, the time, the rank)?\n" + merge_texts(differing),
        _USAGE_ERROR,
    )


def _difference(first: Collected, other: Collected) -> str:
    """Say how a rank differs from rank 0."""
    if first.errors != other.errors:
        theirs = "\n".join(other.errors) or "everything could be collected"
        return f"{theirs}\nwhile on rank 0: " + ("\n".join(first.errors) or "everything could be collected")
    pairs = enumerate(zip_longest(first.tests, other.tests, fillvalue="nothing"))
    number, (expected, got) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return (
        f"{len(other.tests)} tests, rank 0 has {len(first.tests)}; the first to differ is number {number + 1}: "
        f"{got}, where rank 0 has {expected}"
    )
