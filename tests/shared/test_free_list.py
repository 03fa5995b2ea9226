"""The list of free ranges: what is taken never overlaps, is aligned, and becomes one range again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.backends.shared_memory import FreeList

SIZE = 1 << 16
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)
steps = st.lists(
    st.tuples(st.integers(1, SIZE // 4), st.sampled_from([1, 2, 64, 4096, 8192]), st.integers(0, 5)), max_size=60
)


@EXAMPLES
@given(steps=steps)
def test_any_order_of_taking_and_giving_back(steps) -> None:
    free, taken = FreeList(SIZE), {}
    for size, alignment, which in steps:
        start = free.take(size, alignment)
        if start is None:
            assert not fits(taken, size, alignment)
        else:
            assert start % alignment == 0
            assert 0 <= start <= SIZE - size
            for other, length in taken.items():
                assert start + size <= other or other + length <= start
            taken[start] = size
        if which < 3 and taken:
            oldest = sorted(taken)[which % len(taken)]
            free.give_back(oldest, taken.pop(oldest))
        assert free.largest == largest_gap(taken)
    for start, size in taken.items():
        free.give_back(start, size)
    assert free.largest == SIZE
    assert free.take(SIZE, 1) == 0


def gaps(taken: dict[int, int]) -> list[tuple[int, int]]:
    """The free ranges, found anew from those in use."""
    edges = [(0, 0), *sorted((start, start + size) for start, size in taken.items()), (SIZE, SIZE)]
    return [(before[1], after[0]) for before, after in itertools.pairwise(edges)]


def largest_gap(taken: dict[int, int]) -> int:
    return max(stop - start for start, stop in gaps(taken))


def fits(taken: dict[int, int], size: int, alignment: int) -> bool:
    return any(-(-start // alignment) * alignment + size <= stop for start, stop in gaps(taken))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_join_in_any_order(order) -> None:
    free = FreeList(300)
    assert [free.take(100, 1) for _ in range(3)] == [0, 100, 200]
    assert free.largest == 0
    assert free.take(1, 1) is None
    for which in order:
        free.give_back(100 * which, 100)
    assert free.largest == 300


def test_what_alignment_leaves_over_is_used() -> None:
    free = FreeList(10_000)
    assert free.take(10, 1) == 0
    assert free.take(4096, 4096) == 4096
    assert free.take(4086, 1) == 10
    assert free.largest == 10_000 - 8192
    assert free.take(2000, 4096) is None
    assert free.take(10_000 - 8192, 4096) == 8192
    assert free.largest == 0


def test_an_empty_list_has_nothing() -> None:
    free = FreeList(0)
    assert free.largest == 0
    assert free.take(1, 1) is None
