"""Every operation on every dtype, reduction, shape and memory layout, blocking and asynchronous, against numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from collective_checks import LAYOUTS, SHAPES, CollectiveChecks, allows, sizes_around_payload
from numpy_reference import Shape, reductions

from axonmpi import ReduceOp
from axonmpi.backends.reduction import DTYPES

pytestmark = [
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
LAID_DTYPES = (
    *(torch.bool, torch.int8, torch.uint16, torch.int64, torch.bfloat16, torch.float8_e5m2),
    *(torch.float32, torch.float64, torch.complex64),
)
BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])


def cases(*, dims: int = 0) -> Iterator[tuple[torch.dtype, ReduceOp, Shape]]:
    """Each dtype with each shape of at least so many dimensions; the reductions take turns."""
    for dtype in DTYPES:
        ops = itertools.cycle(reductions(dtype))
        for shape in (*SHAPES, *sizes_around_payload(dtype)):
            if len(shape) >= dims:
                yield dtype, next(ops), shape


def test_all_reduce(group) -> None:
    checks = CollectiveChecks(group)
    for dtype, _, shape in cases():
        for op in reductions(dtype):
            checks.all_reduce(dtype, shape, op)
    checks.finish()


def test_all_reduce_async(group) -> None:
    checks = CollectiveChecks(group, asynchronous=True)
    for dtype, op, shape in cases():
        checks.all_reduce(dtype, shape, op)
    checks.finish()


@BOTH_WAYS
def test_reduce(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, op, shape) in enumerate(cases()):
        checks.reduce(dtype, shape, op, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_reduce_scatter(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype, op, shape in cases(dims=1):
        for dim in range(len(shape)):
            checks.reduce_scatter(dtype, shape, op, dim)
    checks.finish()


@BOTH_WAYS
def test_broadcast(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases()):
        checks.broadcast(dtype, shape, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_all_gather(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases()):
        checks.all_gather(dtype, shape, -1 if shape else 0)
        if shape:
            dim = number % len(shape)
            checks.all_gather(dtype, shape, dim, sizes=[shape[dim], 0, 2 * shape[dim] + 1])
    checks.finish()


@BOTH_WAYS
def test_gather(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases()):
        checks.gather(
            dtype, shape, number % group.size, sizes=[0, shape[0] + 2, 1] if shape and number % 2 else None
        )
    checks.finish()


@BOTH_WAYS
def test_scatter(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases(dims=1)):
        checks.scatter(dtype, shape, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_all_to_all(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases()):
        following = DTYPES[number % len(DTYPES)]
        checks.all_to_all([(dtype, shape), (following, (5, 2)), (dtype, (0, 3)), (following, (1,) * 12)])
    checks.finish()


@BOTH_WAYS
def test_messages(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, (dtype, _, shape) in enumerate(cases()):
        checks.ring(dtype, shape, tag=number % 5)
    checks.finish()


@pytest.mark.ranks(2, 3)
@BOTH_WAYS
def test_memory_layouts(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in LAID_DTYPES:
        # One element, what fits into the first message for most dtypes, and what does not.
        for shape in ((1,), (3, 5), (2, 40, 3)):
            for layout in LAYOUTS:
                if allows(dtype, shape, layout):
                    checks.every_operation(dtype, shape, layout)
    checks.finish()


@pytest.mark.ranks(2, 3)
@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_more_than_two_pieces(group, asynchronous, dtype) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    rows = 2 * 2**20 // (7 * dtype.itemsize) + 5
    checks.every_operation(dtype, (rows, 7), "contiguous" if asynchronous else "transposed")
    checks.finish()
