"""Results are the same bits on every rank, those of a sum taken in rank order, and the same in every run."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from numpy_reference import same_bits
from torch import Tensor

import axonmpi as ax
from axonmpi import ReduceOp, World

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
SIZES = (1, 5, 28, 29, 1000, 300_001)
"""Elements; among them what fits into the first message, just not, and what is more than a piece."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    generator = np.random.default_rng([rank, count])
    numbers = generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)
    if dtype.is_complex:
        numbers = numbers + 1j * generator.standard_normal(count)
    return torch.from_numpy(numbers).to(dtype)


def one_after_the_other(parts: list[Tensor]) -> np.ndarray:
    """Numpy's sum in rank order, in the dtype that the library says it adds in."""
    if parts[0].dtype in (torch.float16, torch.bfloat16):
        parts = [part.float() for part in parts]
    return functools.reduce(np.add, [part.numpy() for part in parts])


def all_results(world: World, count: int, dtype: torch.dtype, op: ReduceOp) -> dict[str, Tensor]:
    """The same reduction by every operation that can make it."""
    group = world.default_group
    blocking, asynchronous, rooted = (contribution(world.rank, count, dtype) for _ in range(3))
    group.all_reduce(blocking, op)
    group.all_reduce(asynchronous, op, async_op=True).wait()
    group.reduce(rooted, world.size - 1, op)
    group.broadcast(rooted, world.size - 1)
    scattered = group.all_gather(group.reduce_scatter(contribution(world.rank, count, dtype), op))
    strided = torch.zeros(count, 2, dtype=dtype)
    strided[:, 1] = contribution(world.rank, count, dtype)
    group.all_reduce(strided[:, 1], op)
    return {
        "all_reduce": blocking,
        "asynchronous all_reduce": asynchronous,
        "reduce and broadcast": rooted,
        "reduce_scatter and all_gather": scattered,
        "all_reduce of a strided tensor": strided[:, 1],
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_taken_in_rank_order(world, dtype) -> None:
    for count in SIZES:
        total = one_after_the_other([contribution(rank, count, dtype) for rank in range(world.size)])
        for op, expected in ((ReduceOp.SUM, total), (ReduceOp.AVERAGE, total / total.dtype.type(world.size))):
            rounded = torch.from_numpy(np.asarray(expected)).to(dtype)
            for name, result in all_results(world, count, dtype, op).items():
                assert same_bits(result, rounded), f"{name} of {count} elements, {op.name}"


def test_the_order_of_adding_shows(world) -> None:
    """What the test above relies on: another order gives other bits."""
    parts = [contribution(rank, 1000, torch.float32) for rank in range(4)]
    assert not np.array_equal(one_after_the_other(parts), one_after_the_other(parts[::-1]))


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_all_ranks_get_the_same_bits_in_every_run(world, op) -> None:
    for count in SIZES:
        runs = [all_results(world, count, torch.float32, op) for _ in range(2)]
        first = runs[0]["all_reduce"]
        for run in runs:
            for name, result in run.items():
                assert same_bits(result, first), f"{name} of {count} elements"
        elsewhere = ax.all_gather(first.view(torch.int32)[None])
        assert (elsewhere == elsewhere[0]).all(), f"{count} elements differ between ranks"


def test_special_values(world) -> None:
    """Not-a-number wins, infinities add up, the sign of zero is that of the sum in rank order."""
    nan, inf = float("nan"), float("inf")
    table = torch.tensor([[nan, 1, inf, inf, -0.0, 0.0], [2, nan, inf, -inf, -0.0, -0.0]])
    for op, expected in (
        (ReduceOp.SUM, [nan, nan, inf, nan, -0.0, 0.0]),
        (ReduceOp.MIN, [nan, nan, inf, -inf, -0.0, 0.0]),
        (ReduceOp.MAX, [nan, nan, inf, inf, -0.0, 0.0]),
    ):
        if world.size != 2:
            continue
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for repeat in (1, 100):
                tensor = table[world.rank].to(dtype).repeat(repeat)
                ax.all_reduce(tensor, op)
                wanted = torch.tensor(expected).repeat(repeat)
                assert torch.equal(tensor.isnan(), wanted.isnan()), (op, dtype)
                assert torch.equal(tensor.float().nan_to_num(), wanted.nan_to_num()), (op, dtype)
                if op is ReduceOp.SUM:
                    assert torch.equal(tensor.signbit()[4:6], wanted.signbit()[4:6]), dtype
