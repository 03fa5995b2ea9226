"""reduce_in_rank_order against numpy, for every dtype, and what it does not allow."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi import ReduceOp
from axonmpi.backends.reduction import (
    DTYPES,
    check_reducible,
    choose_reduction,
    plain_binary,
    reduce_in_rank_order,
    reduce_wide_into,
)
from axonmpi.errors import DtypeError

INTEGERS = [dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)]
NARROW = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize < 4]
EXAMPLES = settings(max_examples=20, derandomize=True, database=None)
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce in every way there is, and see that all give the same bits."""
    out = torch.empty_like(parts[0])
    before = [part.clone() for part in parts]
    reduce_in_rank_order(parts, op, out)
    reduction = choose_reduction(out.dtype, op, len(parts))
    again = torch.empty_like(out)
    reduction.run(parts, again)
    assert raw(again) == raw(out)
    assert list(map(raw, parts)) == list(map(raw, before))
    for place in range(len(parts) if reduction.in_place else 0):
        copies = [part.clone() for part in parts]
        reduction.run(copies, copies[place])
        assert raw(copies[place]) == raw(out)
    return out


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_each_dtype_is_listed_once_and_all_of_torch_are() -> None:
    assert len(set(DTYPES)) == len(DTYPES)
    usual = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    assert {getattr(torch, name) for name in usual.split()} <= set(DTYPES)


@EXAMPLES
@given(data=st.data(), count=st.integers(1, 4))
def test_integers_wrap_around_as_in_numpy(data, count) -> None:
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        numbers = st.sampled_from([limits.min, limits.max, 0, 1]) | st.integers(limits.min, limits.max)
        kind = str(dtype).removeprefix("torch.")
        arrays = [np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), kind) for _ in range(count)]
        for op, ufunc in UFUNCS.items():
            result = reduced([torch.from_numpy(array) for array in arrays], op)
            np.testing.assert_array_equal(result.numpy(), functools.reduce(ufunc, arrays))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.MIN], ids=lambda op: op.name)
def test_bool_is_logic(op) -> None:
    parts = [torch.tensor(row) for row in ([False, False, True, True], [False, True, False, True])]
    expected = [False, True, True, True] if op in (ReduceOp.SUM, ReduceOp.MAX) else [False, False, False, True]
    assert reduced(parts, op).tolist() == expected
    assert reduced(parts[:1], op).tolist() == parts[0].tolist()


@EXAMPLES
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_sums_are_taken_in_order(numbers) -> None:
    parts = [torch.tensor([number], dtype=torch.float32) for number in numbers]
    with np.errstate(over="ignore"):
        total = functools.reduce(np.add, [np.float32(number) for number in numbers])
        average = total / np.float32(len(numbers))
    assert np.float32(reduced(parts, ReduceOp.SUM).item()).tobytes() == np.float32(total).tobytes()
    assert np.float32(reduced(parts, ReduceOp.AVERAGE).item()).tobytes() == np.float32(average).tobytes()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_are_rounded_once(dtype) -> None:
    """1 and small parts: added one by one in the narrow type, each small part would be lost.

    There are as many elements as are converted at a time, and more.
    """
    steps = [2.0**-bits for bits in range(24)]
    step = min(step for step in steps if torch.tensor(1 + step).to(dtype).float() == 1 + step)  # from 1 to the next
    small, shape = 0.3125 * step, (3, 50_000)
    for count in (3, 9):
        parts = [torch.ones(shape).to(dtype), *[torch.full(shape, small).to(dtype)] * (count - 1)]
        total = torch.full(shape, 1 + (count - 1) * small)
        assert not torch.equal(total.to(dtype).float(), torch.ones(shape))
        for op, expected in ((ReduceOp.SUM, total), (ReduceOp.AVERAGE, total / count)):
            assert torch.equal(reduced(parts, op).float(), expected.to(dtype).float())
            wide = torch.empty(shape)
            reduce_wide_into(parts, op, wide)  # left in the dtype of the sums
            assert torch.equal(wide, expected)
    most = torch.full((2,), torch.finfo(dtype).max, dtype=dtype)
    if dtype is torch.float16:  # an average does not overflow on the way
        assert torch.equal(reduced([most] * 4, ReduceOp.AVERAGE), most)
        assert reduced([most] * 4, ReduceOp.SUM).isinf().all()


def test_results_may_have_any_strides() -> None:
    parts = [torch.arange(6.0).view(2, 3) * factor for factor in (1, 2, 3)]
    for dtype in (torch.float32, torch.bfloat16, torch.uint16, torch.int64):
        memory = torch.zeros(3, 4).to(dtype)
        out = memory.t()[::2, :]
        reduce_in_rank_order([part.to(dtype) for part in parts], ReduceOp.SUM, out)
        assert out.float().tolist() == (6 * torch.arange(6.0).view(2, 3)).tolist()
        assert not memory[:, 1::2].float().any()


def test_what_is_allowed() -> None:
    for dtype in DTYPES:
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            check_reducible(dtype, op)
    with pytest.raises(DtypeError, match=r"cannot reduce tensors of dtype torch\.qint8; convert them first"):
        check_reducible(torch.qint8, ReduceOp.SUM)
    with pytest.raises(DtypeError, match=r"got torch\.int32; convert it with \.float\(\) or use ReduceOp\.SUM"):
        check_reducible(torch.int32, ReduceOp.AVERAGE)
    with pytest.raises(DtypeError, match=r"ReduceOp\.MIN needs an ordered dtype, got torch\.complex64"):
        check_reducible(torch.complex64, ReduceOp.MIN)
    with pytest.raises(TypeError, match=r"op: expected an axonmpi\.ReduceOp, SUM, .*, got 0"):
        check_reducible(torch.float32, 0)


def test_two_ranks_reduce_where_one_of_them_has_its_part() -> None:
    """All but what is done in other memory: a wider dtype, another sign."""
    for dtype in DTYPES:
        elsewhere = dtype in (*NARROW, torch.complex32, torch.uint16, torch.uint32, torch.uint64)
        in_place = not elsewhere or dtype in (torch.float16, torch.bfloat16)
        assert choose_reduction(dtype, ReduceOp.SUM, 2).in_place is in_place, dtype
        assert not choose_reduction(dtype, ReduceOp.SUM, 3).in_place
    assert choose_reduction(torch.float32, ReduceOp.AVERAGE, 2).in_place
    assert not choose_reduction(torch.bfloat16, ReduceOp.AVERAGE, 2).in_place


def test_plain_reductions_are_one_function_of_two() -> None:
    assert plain_binary(torch.float32, ReduceOp.SUM) is torch.add
    assert plain_binary(torch.int64, ReduceOp.MAX) is torch.maximum
    for dtype, op in (
        (torch.bfloat16, ReduceOp.SUM),
        (torch.uint16, ReduceOp.MIN),
        (torch.bool, ReduceOp.SUM),
        (torch.float32, ReduceOp.AVERAGE),
    ):
        assert plain_binary(dtype, op) is None
