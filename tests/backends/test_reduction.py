"""reduce_in_rank_order against numpy, for every dtype, and what it does not allow."""

import functools

import numpy as np
import pytest
import torch
from helpers import numpy_reference
from helpers.compare import refused
from helpers.numpy_reference import UFUNCS, reductions
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi import ReduceOp
from axonmpi.backends.reduction import (
    DTYPES,
    check_reducible,
    choose_reduction,
    finish,
    fold_rows,
    is_plain_sum,
    reduce_in_rank_order,
    reduce_wide_into,
    wide_dtype,
)
from axonmpi.errors import DtypeError

INTEGERS = [dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)]
NARROW = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize < 4]
EXAMPLES = settings(max_examples=20, derandomize=True, database=None)


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
    assert sorted(map(str, DTYPES)) == sorted(map(str, numpy_reference.DTYPES))


@EXAMPLES
@given(data=st.data(), count=st.integers(1, 4))
def test_integers_wrap_around_as_in_numpy(data, count) -> None:
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        numbers = st.sampled_from([limits.min, limits.max, 0, 1]) | st.integers(limits.min, limits.max)
        kind = str(dtype).removeprefix("torch.")
        arrays = [np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), kind) for _ in range(count)]
        for op in reductions(dtype):
            result = reduced([torch.from_numpy(array) for array in arrays], op)
            np.testing.assert_array_equal(result.numpy(), functools.reduce(UFUNCS[op], arrays))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.MIN], ids=lambda op: op.name)
def test_bool_is_logic(op) -> None:
    parts = [torch.tensor(row) for row in ([False, False, True, True], [False, True, False, True])]
    expected = [False, True, True, True] if op in (ReduceOp.SUM, ReduceOp.MAX) else [False, False, False, True]
    assert [reduced(parts, op).tolist(), reduced(parts[:1], op).tolist()] == [expected, parts[0].tolist()]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
def test_of_nothing_is_the_identity(op) -> None:
    """It leaves every value as it is, the largest and the smallest of the dtype, too."""
    for dtype in DTYPES:
        if op not in reductions(dtype):
            continue
        identity = torch.empty(4, dtype=dtype)
        reduce_in_rank_order([], op, identity)
        values = torch.tensor([0, 1, 3, 100]).to(dtype)
        if dtype.is_floating_point:
            values[2:] = torch.tensor([torch.finfo(dtype).min, torch.finfo(dtype).max]).to(dtype)
        elif dtype is not torch.bool and not dtype.is_complex:
            values[2:] = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
        assert raw(reduced([identity, values], op)) == raw(values), dtype


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
    refused(
        DtypeError,
        (
            lambda: check_reducible(torch.qint8, ReduceOp.SUM),
            r"cannot reduce .* dtype torch\.qint8; convert them first",
        ),
        (
            lambda: check_reducible(torch.int32, ReduceOp.AVERAGE),
            r"got torch\.int32; .* \.float\(\) or use ReduceOp\.SUM",
        ),
        (
            lambda: check_reducible(torch.complex64, ReduceOp.MIN),
            r"MIN needs an ordered dtype, got torch\.complex64",
        ),
    )
    wrong = r"op: expected an axonmpi\.ReduceOp, SUM, .*, got 0"
    refused(TypeError, (lambda: check_reducible(torch.float32, 0), wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (100, 5), (100, 1)], ids=str)
def test_many_rows_are_reduced_as_few(shape, dtype) -> None:
    """In the order of the rows, where numpy alone would add a single column in pairs."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 3, shape, generator=generator)
    rows = (values > 0) if dtype is torch.bool else values.abs().to(dtype)
    for op in reductions(dtype):
        out, expected = torch.empty(2, shape[1], dtype=dtype)
        total = torch.empty(shape[1], dtype=wide_dtype(dtype))
        fold_rows(rows, op, total)
        finish(total, op, len(rows), out)
        reduce_in_rank_order(list(rows), op, expected)
        assert raw(out) == raw(expected), op


def test_two_ranks_reduce_where_one_of_them_has_its_part() -> None:
    """All but what is done in other memory: a wider dtype, another sign."""
    for dtype in DTYPES:
        elsewhere = dtype in (*NARROW, torch.complex32, torch.uint16, torch.uint32, torch.uint64)
        in_place = not elsewhere or dtype in (torch.float16, torch.bfloat16)
        assert [choose_reduction(dtype, ReduceOp.SUM, count).in_place for count in (2, 3)] == [in_place, False], (
            dtype
        )
    averages = [choose_reduction(dtype, ReduceOp.AVERAGE, 2).in_place for dtype in (torch.float32, torch.bfloat16)]
    assert averages == [True, False]


def test_plain_sums() -> None:
    plain = (torch.float32, torch.float64, torch.int64)
    for dtype in (*plain, torch.bfloat16, torch.uint16, torch.bool, torch.complex64):
        assert is_plain_sum(dtype, ReduceOp.SUM) == (dtype in plain)
        assert not is_plain_sum(dtype, ReduceOp.MAX)
