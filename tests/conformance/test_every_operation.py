"""Every operation on every dtype, reduction, shape and memory layout, blocking and asynchronous, against numpy."""

from __future__ import annotations

import pytest
import torch
from collective_checks import LAYOUTS, SHAPES, CollectiveChecks, allows, sizes_around_payload
from numpy_reference import reductions

from axonmpi.backends.reduction import DTYPES

pytestmark = [
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])


@BOTH_WAYS
def test_all_reduce(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for op in reductions(dtype):
            for shape in (*SHAPES, *sizes_around_payload(dtype)):
                checks.all_reduce(dtype, shape, op)
    checks.finish()


@BOTH_WAYS
def test_reduce(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for number, op in enumerate(reductions(dtype)):
            for shape in (*SHAPES, *sizes_around_payload(dtype)):
                checks.reduce(dtype, shape, op, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_reduce_scatter(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for op in reductions(dtype):
            for shape in (*SHAPES[1:], *sizes_around_payload(dtype)):
                for dim in range(len(shape)):
                    checks.reduce_scatter(dtype, shape, op, dim)
    checks.finish()


@BOTH_WAYS
def test_broadcast(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for number, shape in enumerate((*SHAPES, *sizes_around_payload(dtype))):
            checks.broadcast(dtype, shape, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_all_gather(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        checks.all_gather(dtype, ())
        for shape in (*SHAPES[1:], *sizes_around_payload(dtype)):
            for dim in range(len(shape)):
                checks.all_gather(dtype, shape, dim)
                checks.all_gather(dtype, shape, dim, sizes=[shape[dim], 0, 2 * shape[dim] + 1])
    checks.finish()


@BOTH_WAYS
def test_gather(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        checks.gather(dtype, ())
        for number, shape in enumerate((*SHAPES[1:], *sizes_around_payload(dtype))):
            dst = number % group.size
            checks.gather(dtype, shape, dst)
            checks.gather(dtype, shape, dst, sizes=[0, shape[0] + 2, 1])
    checks.finish()


@BOTH_WAYS
def test_scatter(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for number, shape in enumerate((*SHAPES[1:], *sizes_around_payload(dtype))):
            checks.scatter(dtype, shape, number % group.size)
    checks.finish()


@BOTH_WAYS
def test_all_to_all(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for number, dtype in enumerate(DTYPES):
        for shape in (*SHAPES, *sizes_around_payload(dtype)):
            checks.all_to_all([(dtype, shape)])
        following = DTYPES[(number + 1) % len(DTYPES)]
        checks.all_to_all([(dtype, (5, 2)), (following, ()), (dtype, (0, 3)), (following, (1,) * 12)])
    checks.finish()


@BOTH_WAYS
def test_messages(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        for tag, shape in enumerate((*SHAPES, *sizes_around_payload(dtype))):
            checks.ring(dtype, shape, tag=tag)
    checks.finish()


@pytest.mark.ranks(2, 3)
@BOTH_WAYS
def test_memory_layouts(group, asynchronous) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    for dtype in DTYPES:
        # One element, what fits into the first message for most dtypes, and what does not.
        for shape in ((1,), (3, 5), (2, 40, 3)):
            for layout in LAYOUTS:
                if allows(dtype, shape, layout):
                    checks.every_operation(dtype, shape, layout)
    checks.finish()


@pytest.mark.ranks(2, 3)
@BOTH_WAYS
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.float32, torch.complex128], ids=str
)
def test_more_than_two_pieces(group, asynchronous, dtype) -> None:
    checks = CollectiveChecks(group, asynchronous=asynchronous)
    rows = 2 * 2**20 // (7 * dtype.itemsize) + 5
    checks.every_operation(dtype, (rows, 7), "contiguous" if asynchronous else "transposed")
    checks.finish()
