"""Settings of collectives, chosen so that every two values of two different settings meet in one row.

pairwise(dtype=[a, b, c], shape=[s, t], way=[x, y])      a s x
                                                         a t y
                                                         b s y      6 rows in place of 12
                                                         b t x
                                                         c s x
                                                         c t y
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(**settings: Sequence[Any]) -> list[dict[str, Any]]:
    """Make the rows, the same in every process: each value is the one that brings the most missing pairs."""
    entries = [
        [(setting, number) for number in range(len(values))] for setting, values in enumerate(settings.values())
    ]
    missing = dict.fromkeys(
        pair for one, other in itertools.combinations(entries, 2) for pair in itertools.product(one, other)
    )
    rows: list[dict[str, Any]] = []
    while missing:
        row = list(next(iter(missing)))
        for candidates in entries:
            if candidates[0][0] not in [setting for setting, _ in row]:
                turn = len(rows) % len(candidates)  # of equals, each is taken in turn
                turned = [*candidates[turn:], *candidates[:turn]]
                row.append(max(turned, key=lambda entry: sum(_pair(entry, other) in missing for other in row)))
        for one, other in itertools.combinations(row, 2):
            missing.pop(_pair(one, other), None)
        rows.append({name: settings[name][number] for name, (_, number) in zip(settings, sorted(row), strict=True)})
    return rows


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)
