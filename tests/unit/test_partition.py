"""Cutting by integers, against torch.tensor_split and against what the words promise."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import axonmpi.partition
from axonmpi.partition import bucket_by_size, split_bounds, split_sizes

totals = st.integers(0, 500)
parts = st.integers(1, 40)


@given(totals, parts)
def test_split_sizes_are_those_of_tensor_split(total: int, parts: int) -> None:
    pieces = torch.tensor_split(torch.arange(total), parts)
    assert split_sizes(total, parts) == tuple(len(piece) for piece in pieces)


@given(totals, parts)
def test_split_bounds_cut_the_pieces_of_tensor_split(total: int, parts: int) -> None:
    values = torch.arange(total)
    pieces = torch.tensor_split(values, parts)
    bounds = split_bounds(total, parts)
    assert len(bounds) == len(pieces)
    for piece, (start, stop) in zip(pieces, bounds, strict=True):
        assert torch.equal(values[start:stop], piece)


def test_split_is_exact_beyond_what_floats_and_int32_hold() -> None:
    total = 2**61 + 3
    sizes = split_sizes(total, 7)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) == 1
    assert split_bounds(total, 7)[-1] == (total - sizes[-1], total)


@pytest.mark.parametrize("split", [split_sizes, split_bounds])
@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (4, 0), (4, -3)])
def test_split_refuses_what_cannot_be_cut(split, total: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"got total={total}, parts={parts}"):
        split(total, parts)


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_buckets_keep_order_and_everything(sizes: list[int], capacity: int) -> None:
    buckets = bucket_by_size(sizes, capacity)
    assert [position for bucket in buckets for position in bucket] == list(range(len(sizes)))
    assert all(buckets)


@given(st.lists(st.integers(0, 30)), st.integers(1, 20))
def test_buckets_hold_at_most_their_capacity_or_one_item(sizes: list[int], capacity: int) -> None:
    for bucket in bucket_by_size(sizes, capacity):
        assert sum(sizes[i] for i in bucket) <= capacity or len(bucket) == 1


@given(st.lists(st.integers(0, 30)), st.integers(1, 20))
def test_a_bucket_ends_only_when_the_next_item_does_not_fit(sizes: list[int], capacity: int) -> None:
    buckets = bucket_by_size(sizes, capacity)
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


@pytest.mark.parametrize("capacity", [0, -5])
def test_buckets_need_a_capacity(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {capacity}"):
        bucket_by_size([1], capacity)


def test_buckets_refuse_a_negative_size() -> None:
    with pytest.raises(ValueError, match="got -2 at position 1"):
        bucket_by_size([1, -2], 5)


def test_cutting_needs_no_torch() -> None:
    tree = ast.parse(Path(axonmpi.partition.__file__).read_text(encoding="utf-8"))
    modules = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert set(modules) == {"__future__", "collections.abc", "itertools"}
