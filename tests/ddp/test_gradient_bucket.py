"""GradientBucket: what goes in comes out, as views of one flat tensor, and a refusal changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axonmpi.ddp.gradient import GradientBucket

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=8)


def numbers(shape: tuple[int, ...], start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=dtype).view(shape)


@given(shapes, st.integers(1, 80))
def test_tensors_come_out_as_they_went_in(shapes: list[tuple[int, ...]], capacity: int) -> None:
    bucket = GradientBucket(capacity)
    taken: list[torch.Tensor] = []
    for number, shape in enumerate(shapes):
        tensor = numbers(shape, 100 * number)
        fits = bucket.size + tensor.numel() <= capacity
        assert bucket.add(tensor) is fits
        taken += [tensor] if fits else []
    extracted = bucket.extract()
    assert [part.shape for part in extracted] == [part.shape for part in taken]
    assert all(torch.equal(*pair) for pair in zip(extracted, taken, strict=True))
    assert bucket.data.tolist() == [value for part in taken for value in part.flatten().tolist()]
    assert bucket.size == bucket.data.numel() == sum(part.numel() for part in taken)
    assert bucket.is_full is (bucket.size == capacity)
    assert bucket.is_empty is (not taken)
    assert bucket.capacity == capacity


def test_a_new_bucket_is_empty() -> None:
    bucket = GradientBucket(3)
    assert (bucket.is_empty, bucket.is_full, bucket.size, bucket.extract()) == (True, False, 0, [])
    assert bucket.data.shape == (0,)


def test_what_does_not_fit_changes_nothing() -> None:
    bucket = GradientBucket(5)
    assert bucket.add(numbers((2, 2)))
    before = bucket.data.clone()
    assert not bucket.add(numbers((2,)))
    assert torch.equal(bucket.data, before)
    assert len(bucket.extract()) == 1
    assert bucket.add(numbers((1,)))
    assert bucket.is_full
    assert bucket.add(torch.empty(0, 3))
    assert [part.shape for part in bucket.extract()] == [(2, 2), (1,), (0, 3)]


def test_a_tensor_larger_than_the_capacity_never_fits() -> None:
    bucket = GradientBucket(5)
    assert not bucket.add(numbers((6,), dtype=torch.float64))
    assert bucket.is_empty
    assert bucket.add(numbers((5,)))


def test_holds_copies() -> None:
    bucket = GradientBucket(8)
    tensor = numbers((2, 3))
    bucket.add(tensor)
    tensor.zero_()
    assert bucket.data.tolist() == [0, 1, 2, 3, 4, 5]
    bucket.data.fill_(9)
    assert tensor.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_reduction_of_data_shows_in_what_is_extracted() -> None:
    bucket = GradientBucket(10)
    bucket.add(numbers((2, 3)))
    bucket.add(torch.tensor(7.0))
    before, data = bucket.extract(), bucket.data
    assert data.is_contiguous()
    data.mul_(2)
    for parts in (before, bucket.extract()):
        assert parts[0].tolist() == [[0, 2, 4], [6, 8, 10]]
        assert parts[1].item() == 14


@pytest.mark.parametrize(
    "tensor",
    [
        numbers((3, 4)).t(),
        numbers((4, 6))[::2, 1::2],
        numbers((1, 3)).expand(4, 3),
        numbers((2, 3, 2, 2)).to(memory_format=torch.channels_last),
        torch.view_as_complex(numbers((3, 2))).conj(),
        torch.tensor(2.5),
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "conjugated", "0-d"],
)
def test_strides_do_not_matter(tensor: torch.Tensor) -> None:
    bucket = GradientBucket(100)
    bucket.add(tensor)
    assert torch.equal(bucket.extract()[0], tensor)
    assert torch.equal(bucket.data, tensor.flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.complex128])
def test_keeps_the_dtype(dtype: torch.dtype) -> None:
    bucket = GradientBucket(6)
    bucket.add(numbers((6,), dtype=torch.float64).to(dtype))
    assert bucket.data.dtype is bucket.extract()[0].dtype is dtype
    assert bucket.data.tolist() == [0, 1, 2, 3, 4, 5]


def test_autograd_does_not_follow() -> None:
    bucket = GradientBucket(6)
    bucket.add(torch.ones(3, requires_grad=True) * 2)
    assert not bucket.data.requires_grad
    bucket.data.mul_(3)
    assert bucket.extract()[0].tolist() == [6, 6, 6]


def test_clear_empties_and_leaves_what_was_extracted_alone() -> None:
    bucket = GradientBucket(4)
    bucket.add(numbers((4,)))
    extracted = bucket.extract()[0]
    bucket.clear()
    assert (bucket.is_empty, bucket.is_full, bucket.size, bucket.extract()) == (True, False, 0, [])
    assert bucket.add(numbers((2,), 50, torch.float64))
    assert bucket.data.tolist() == [50, 51]
    assert extracted.tolist() == [0, 1, 2, 3]


def test_one_dtype_per_bucket() -> None:
    bucket = GradientBucket(4)
    bucket.add(numbers((2,)))
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=r"t: expected torch.float32 .* got torch.float64; use one bucket"):
            bucket.add(numbers((1,), dtype=torch.float64))
    assert bucket.data.tolist() == [0, 1]


def test_one_device_per_bucket() -> None:
    bucket = GradientBucket(4)
    bucket.add(numbers((2,)))
    with pytest.raises(ValueError, match=r"t: expected a tensor on cpu .* got one on meta"):
        bucket.add(torch.empty(1, device="meta"))
    assert bucket.data.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("t", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "t: expected a torch.Tensor, got list"),
        (None, TypeError, "t: expected a torch.Tensor, got NoneType"),
        (torch.eye(2).to_sparse(), ValueError, r"t: expected a dense tensor, .* use .to_dense\(\)"),
    ],
)
def test_add_refuses_what_is_no_dense_tensor(t, error, message) -> None:
    bucket = GradientBucket(4)
    with pytest.raises(error, match=message):
        bucket.add(t)
    assert bucket.is_empty


@pytest.mark.parametrize(
    ("capacity", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)],
)
def test_needs_a_capacity(capacity, error) -> None:
    with pytest.raises(error, match="capacity: expected"):
        GradientBucket(capacity)
