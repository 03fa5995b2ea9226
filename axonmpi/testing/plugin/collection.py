"""Whether all ranks collected the same tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...utils.text import first_difference
from .verdict_channel import SessionStoppedError

_USAGE_ERROR = 4


def merge_collected(given: Mapping[int, Sequence[str]]) -> SessionStoppedError | None:
    """Return how the ranks differ, or None if they do not; local.

    Args:
        given: By rank, what could not be collected and why, then the ids of the tests in their order.
    """
    difference = first_difference([given[rank] for rank in sorted(given)])
    if not difference:
        return None
    return SessionStoppedError(
        "the ranks did not collect the same tests in the same order, so they cannot run them together. "
        "Does something that differs from rank to rank decide what is collected (a random order, the order of a "
        f"set, the time, the rank)? The first difference is\n  {difference}",
        _USAGE_ERROR,
    )
