"""How parameters are cut: the ranks' parts against slices taken by numpy, and together they are the whole again."""

import numpy as np
import torch
from helpers.compare import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.tensor import Shard

EXAMPLES = settings(max_examples=20)
RANKS = st.sampled_from([1, 2, 3, 4, 8])


def numbered(size: int, dim: int) -> torch.Tensor:
    """A tensor of three dimensions, `size` along one of them, whose elements are all different."""
    shape = [2, 3, 2]
    shape[dim] = size
    return torch.arange(1, np.prod(shape) + 1, dtype=torch.float32).reshape(shape)


def assert_parts(shard: Shard, expected: list[np.ndarray], full: torch.Tensor) -> None:
    parts = [shard.cut(full, rank) for rank in range(shard.group_size)]
    for part, values in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part.numpy(), values)
        assert (part.is_contiguous(), part.shape[shard.dim]) == (True, shard.local)
        assert part.data_ptr() != full.data_ptr() or not part.numel()
    assert torch.equal(shard.join(parts), full)


@EXAMPLES
@given(ranks=RANKS, rows=st.integers(0, 4), dim=st.integers(0, 2))
def test_even(ranks, rows, dim):
    full = numbered(rows * ranks, dim)
    shard = Shard.even(dim, rows * ranks, ranks)
    assert_parts(shard, np.split(full.numpy(), ranks, dim), full)
    assert (shard.is_plain, [shard.rows(rank) for rank in range(ranks)]) == (True, [rows] * ranks)


@EXAMPLES
@given(ranks=RANKS, rows=st.lists(st.integers(0, 3), min_size=1, max_size=4), dim=st.integers(0, 2))
def test_packed(ranks, rows, dim):
    sizes = [ranks * size for size in rows]
    full = numbered(sum(sizes), dim)
    parts = np.split(full.numpy(), np.cumsum(sizes)[:-1], dim)
    expected = [
        np.concatenate(own, dim) for own in zip(*(np.split(part, ranks, dim) for part in parts), strict=True)
    ]
    assert_parts(Shard.packed(dim, sizes, ranks), expected, full)


@EXAMPLES
@given(ranks=RANKS, size=st.integers(1, 30), dim=st.integers(0, 2))
def test_padded(ranks, size, dim):
    full = numbered(size, dim)
    padding = [(0, -size % ranks if axis == dim else 0) for axis in range(3)]
    shard = Shard.padded(dim, size, ranks)
    assert_parts(shard, np.split(np.pad(full.numpy(), padding), ranks, dim), full)
    assert sum(shard.rows(rank) for rank in range(ranks)) == size
    assert shard.is_plain == (size % ranks == 0)


@EXAMPLES
@given(heads=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2, 4, 8]), width=st.integers(1, 3))
def test_heads(heads, ranks, width):
    full = numbered(heads * width, 1)
    copies, shard = max(1, ranks // heads), Shard.heads(1, heads, width, ranks)
    expected = np.split(full.numpy(), ranks // copies, 1)
    assert_parts(shard, list(np.repeat(np.stack(expected), copies, 0)), full)
    assert shard.copies == copies


def test_along_another_dimension():
    full = numbered(8, 2)
    expected = [full[..., rows].numpy() for rows in ([0, 1, 4, 5], [2, 3, 6, 7])]
    assert_parts(Shard.packed(0, [4, 4], 2).along(-1), expected, full)


def test_autograd_follows():
    full = torch.arange(6.0).requires_grad_()
    shard = Shard.padded(0, 6, 4)
    shard.join([shard.cut(full, rank) * (rank + 1) for rank in range(4)]).sum().backward()
    assert full.grad.tolist() == [1, 1, 2, 2, 3, 3]


ERRORS = [
    (lambda: Shard.even(0, 6, 4), "multiple of the 4 ranks of the group, got 6"),
    (lambda: Shard.packed(0, [4, 6], 4), "multiple of the 4 ranks of the group, got 6"),
    (
        lambda: Shard.heads(0, 3, 2, 2),
        "num_heads: expected a multiple or a divisor of the 2 ranks .* got 3",
    ),
    (lambda: Shard.heads(0, 0, 2, 2), "num_heads: expected"),
    (lambda: Shard(0, 4, (((0, 2),), ((1, 4),)), 3), "each of 4 rows on 1 ranks"),
    (lambda: Shard(0, 4, (((0, 2),), ((2, 3),)), 2), "each of 4 rows on 1 ranks"),
    (lambda: Shard(0, 4, (((0, 4),), ((0, 4),)), 4), "each of 4 rows on 1 ranks"),
    (lambda: Shard(0, 4, (((0, 4),), ((0, 2),)), 4, 2), "each of 4 rows on 2 ranks"),
    (lambda: Shard(0, 4, (((0, 2),), ((2, 4),)), 1), "local: expected at least the 2 rows"),
    (
        lambda: Shard.even(0, 4, 2).cut(torch.zeros(5), 0),
        r"size 4 along dim 0, got shape \[5\]",
    ),
    (lambda: Shard.even(0, 4, 2).join([torch.zeros(2)]), r"expected 2 parts of size 2 along dim 0"),
    (lambda: Shard.even(0, 4, 2).join([torch.zeros(2), torch.zeros(3)]), r"expected 2 parts of size 2 .*\[3\]"),
    (lambda: Shard.even(0, 4, 2).join([]), r"expected 2 parts of size 2"),
]


def test_errors():
    refused(ValueError, *ERRORS)
