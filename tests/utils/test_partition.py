"""Cutting by integers, against torch.tensor_split and against what the words promise."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers.compare import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.fsdp.layout import by_elements, by_parameters
from axonmpi.utils.partition import bucket_by_size, split_bounds, split_range, split_sizes

EXAMPLES = settings(max_examples=40, derandomize=True, database=None)
totals = st.integers(0, 500)
parts = st.integers(1, 40)


@EXAMPLES
@given(totals, parts)
def test_pieces_are_those_of_tensor_split(total: int, parts: int) -> None:
    values = torch.arange(total)
    pieces = torch.tensor_split(values, parts)
    assert split_sizes(total, parts) == tuple(len(piece) for piece in pieces)
    assert split_bounds(total, parts) == tuple(split_range(total, parts, index) for index in range(parts))
    for piece, (start, stop) in zip(pieces, split_bounds(total, parts), strict=True):
        assert torch.equal(values[start:stop], piece)


def test_split_is_exact_beyond_what_floats_and_int32_hold() -> None:
    total = 2**61 + 3
    sizes = split_sizes(total, 7)
    assert (sum(sizes), max(sizes) - min(sizes)) == (total, 1)
    assert split_bounds(total, 7)[-1] == (total - sizes[-1], total)


def test_what_cannot_be_cut_is_refused() -> None:
    for total, parts in ((-1, 2), (4, 0), (4, -3)):
        words = f"got total={total}, parts={parts}"
        refused(
            ValueError, (partial(split_sizes, total, parts), words), (partial(split_bounds, total, parts), words)
        )
    refused(
        ValueError,
        (lambda: bucket_by_size([1], 0), "at least 1, got 0"),
        (lambda: bucket_by_size([1], -5), "at least 1, got -5"),
        (lambda: bucket_by_size([1, -2], 5), "got -2 at position 1"),
    )


@EXAMPLES
@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_buckets_keep_the_order_and_are_as_full_as_can_be(sizes: list[int], capacity: int) -> None:
    buckets = bucket_by_size(sizes, capacity)
    assert [position for bucket in buckets for position in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or (bucket and sum(sizes[i] for i in bucket) <= capacity)
    for bucket, following in pairwise(buckets):
        assert sum(sizes[i] for i in bucket) + sizes[following[0]] > capacity


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3, 2, 9, 1], [[0, 1], [2], [3]]),
        ([9, 9], [[0], [1]]),
        ([5, 0, 0, 1], [[0, 1, 2], [3]]),
        ([0, 6, 0], [[0], [1], [2]]),
    ],
)
def test_buckets_of_five(sizes: list[int], expected: list[list[int]]) -> None:
    assert bucket_by_size(iter(sizes), 5) == expected


@EXAMPLES
@given(st.lists(st.integers(0, 100), min_size=1, max_size=7), st.integers(1, 9))
def test_the_ranks_that_have_a_part_of_a_parameter(numels, ranks):
    for layout in (by_elements(numels, ranks), by_parameters(numels, ranks, [0] * ranks)):
        for index in range(len(numels)):
            parts = [layout.part(index, rank) for rank in range(ranks)]
            assert list(layout.holders(index)) == [rank for rank, (first, last) in enumerate(parts) if first < last]
            assert sum(last - first for first, last in parts) == numels[index]
