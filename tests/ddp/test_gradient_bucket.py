"""GradientBucket: what goes in comes out, as views of one flat tensor, and a refusal changes nothing."""

import math

import pytest
import torch
from helpers.compare import assert_equal, refused
from hypothesis import given
from hypothesis import strategies as st

from axonmpi import GradientBucket

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex128]
shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=8)


def numbers(shape: tuple[int, ...], start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).to(dtype).view(shape)


@given(shapes, st.integers(1, 80), st.sampled_from(DTYPES))
def test_tensors_come_out_as_they_went_in(shapes: list[tuple[int, ...]], capacity: int, dtype: torch.dtype) -> None:
    bucket = GradientBucket(capacity)
    taken: list[torch.Tensor] = []
    for number, shape in enumerate(shapes):
        tensor = numbers(shape, 100 * number, dtype)
        fits = bucket.size + tensor.numel() <= capacity
        assert bucket.add(tensor) is fits
        taken += [tensor] if fits else []
    assert_equal(bucket.extract(), taken)
    assert bucket.data.tolist() == [value for part in taken for value in part.flatten().tolist()]
    assert bucket.size == bucket.data.numel() == sum(part.numel() for part in taken)
    assert (bucket.is_full, bucket.is_empty, bucket.capacity) == (bucket.size == capacity, not taken, capacity)


def test_copies_go_in_and_views_come_out() -> None:
    bucket = GradientBucket(10)
    tensor = numbers((2, 3)).requires_grad_()
    bucket.add(tensor)
    bucket.add(torch.tensor(7.0))
    before, data = bucket.extract(), bucket.data
    assert (data.is_contiguous(), data.requires_grad) == (True, False)
    data.mul_(2)
    for parts in (before, bucket.extract()):
        assert (parts[0].tolist(), parts[1].item()) == ([[0, 2, 4], [6, 8, 10]], 14)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    with torch.no_grad():
        tensor.zero_()
    assert bucket.data.tolist() == [0, 2, 4, 6, 8, 10, 14]


@pytest.mark.parametrize(
    "tensor",
    [
        numbers((3, 4)).t(),
        numbers((4, 6))[::2, 1::2],
        numbers((1, 3)).expand(4, 3),
        numbers((2, 3, 2, 2)).to(memory_format=torch.channels_last),
        torch.view_as_complex(numbers((3, 2))).conj(),
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "conjugated"],
)
def test_strides_do_not_matter(tensor: torch.Tensor) -> None:
    bucket = GradientBucket(100)
    bucket.add(tensor)
    assert_equal((bucket.extract()[0], bucket.data), (tensor, tensor.flatten()))


def test_clear_empties_and_leaves_what_was_extracted_alone() -> None:
    bucket = GradientBucket(4)
    bucket.add(numbers((4,)))
    extracted = bucket.extract()[0]
    bucket.clear()
    assert (bucket.is_empty, bucket.is_full, bucket.size, bucket.extract()) == (True, False, 0, [])
    assert bucket.add(numbers((2,), 50, torch.float64))
    assert (bucket.data.tolist(), extracted.tolist()) == ([50, 51], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("t", "errors", "message"),
    [
        (
            numbers((1,), dtype=torch.float64),
            (TypeError, ValueError),
            r"t: expected torch.float32 .* got torch.float64",
        ),
        (torch.empty(1, device="meta"), (ValueError,), r"t: expected a tensor on cpu .* got one on meta"),
        ([1.0, 2.0], (TypeError,), "t: expected a torch.Tensor, got list"),
        (torch.eye(2).to_sparse(), (ValueError,), r"t: expected a dense tensor, .* use .to_dense\(\)"),
    ],
)
def test_what_is_refused_changes_nothing(t, errors, message) -> None:
    bucket = GradientBucket(4)
    bucket.add(numbers((2,)))
    for error in errors:
        refused(error, (lambda: bucket.add(t), message))
    assert bucket.data.tolist() == [0, 1]


@pytest.mark.parametrize(("capacity", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_needs_a_capacity(capacity, error) -> None:
    refused(error, (lambda: GradientBucket(capacity), "capacity: expected"))
