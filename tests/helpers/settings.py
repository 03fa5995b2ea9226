"""Rows of settings in which every two values of two different settings meet: all pairs, not all products.

all_pairs(dtype=[a, b, c], shape=[s, t], way=[x, y])     a s x
a t y
b s y      6 rows instead of 12
b t x
c s x
c t y
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

Entry = tuple[int, int]
"""The number of a setting, and of one of its values."""


def all_pairs(**settings: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the rows, the same in every process: each value is the one that brings the most missing pairs."""
    sizes = map(len, settings.values())
    columns = [[(setting, value) for value in range(size)] for setting, size in enumerate(sizes)]
    pairs = itertools.chain.from_iterable(itertools.product(*two) for two in itertools.combinations(columns, 2))
    missing = dict.fromkeys(map(frozenset, pairs))
    rows: list[dict[str, Any]] = []
    while missing:
        chosen: dict[int, int] = dict(sorted(next(iter(missing))))
        for setting, column in enumerate(columns):
            if setting not in chosen:
                turn = len(rows) % len(column)  # of equals, each is taken in turn
                turned = [*column[turn:], *column[:turn]]
                chosen[setting] = max(turned, key=lambda entry: _new_pairs(entry, chosen, missing))[1]
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: values[chosen[setting]] for setting, (name, values) in enumerate(settings.items())})
    return rows


def _new_pairs(entry: Entry, chosen: dict[int, int], missing: dict[frozenset[Entry], None]) -> int:
    return sum(frozenset((entry, other)) in missing for other in chosen.items())


def each_pair(**settings: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by the rows of `all_pairs`."""
    return pytest.mark.parametrize(list(settings), [list(row.values()) for row in all_pairs(**settings)])
