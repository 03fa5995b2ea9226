"""Results have the bits of a reduction in rank order: so they are the same on every rank and in every run.

On several nodes that is the order on each node, and then that of the nodes, where AXONMPI_SUMS=ordered asks for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.numpy_reference import reductions, same_bits
from helpers.settings import all_pairs
from torch import Tensor

import axonmpi as ax
from axonmpi import ReduceOp, World

pytestmark = pytest.mark.not_over_double(
    "NCCL has an order of its own, rounds at each step, and MIN and MAX drop NaN"
)

SIZES = (1, 5, 28, 29, 1000)
"""Elements; among them what fits into the first message, and just not."""
LARGE = 300_001
"""More than two of the pieces that large tensors are reduced in."""
FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64)
IN_NUMPY = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


@functools.lru_cache(maxsize=32)
def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    generator = np.random.default_rng([rank, count])
    numbers = generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)
    if dtype.is_complex:
        numbers = numbers + 1j * generator.standard_normal(count)
    return torch.from_numpy(numbers).to(dtype)


def one_after_the_other(
    parts: list[Tensor], op: ReduceOp = ReduceOp.SUM, nodes: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """Numpy's reduction in rank order, in the dtype that the library says it takes."""
    if parts[0].dtype in (torch.float16, torch.bfloat16):
        parts = [part.float() for part in parts]
    nodes = [range(len(parts))] if nodes is None else nodes
    sums = [functools.reduce(IN_NUMPY[op], [parts[rank].numpy() for rank in ranks]) for ranks in nodes]
    total = functools.reduce(IN_NUMPY[op], sums)
    return total / total.dtype.type(len(parts)) if op is ReduceOp.AVERAGE else total


def all_results(world: World, count: int, dtype: torch.dtype, op: ReduceOp) -> dict[str, Tensor]:
    """The same reduction by every operation that can make it."""
    group, own = world.default_group, contribution(world.rank, count, dtype)
    blocking, again, asynchronous, rooted = (own.clone() for _ in range(4))
    group.all_reduce(blocking, op)
    group.all_reduce(again, op)
    group.all_reduce(asynchronous, op, async_op=True).wait()
    group.reduce(rooted, world.size - 1, op)
    group.broadcast(rooted, world.size - 1)
    strided = torch.zeros(count, 2, dtype=dtype)
    strided[:, 1] = own
    group.all_reduce(strided[:, 1], op)
    return {
        "all_reduce": blocking,
        "repeated all_reduce": again,
        "asynchronous all_reduce": asynchronous,
        "reduce and broadcast": rooted,
        "reduce_scatter and all_gather": group.all_gather(group.reduce_scatter(own, op)),
        "all_reduce of a strided tensor": strided[:, 1],
    }


@pytest.mark.ranks(2, 3, 4)
def test_reductions_are_made_in_rank_order(world) -> None:
    table = all_pairs(count=SIZES, dtype=FLOATS, op=reductions(torch.float32))
    cases = [(row["count"], row["dtype"], row["op"]) for row in table]
    cases += [(LARGE, torch.float64, ReduceOp.SUM), (LARGE, torch.bfloat16, ReduceOp.AVERAGE)]
    nodes = sorted(set(ax.all_gather_object(world.default_group.backend.node_ranks)))
    if len(nodes) > 1 and os.environ.get("AXONMPI_SUMS") != "ordered":
        pytest.skip("the order between nodes is the MPI library's")
    for count, dtype, named in cases:
        op = ReduceOp.SUM if dtype.is_complex and named is not ReduceOp.AVERAGE else named
        parts = [contribution(rank, count, dtype) for rank in range(world.size)]
        expected = torch.from_numpy(np.asarray(one_after_the_other(parts, op, nodes))).to(dtype)
        for name, result in all_results(world, count, dtype, op).items():
            assert same_bits(result, expected), f"{name} of {count} elements of {dtype}, {op.name}"
    backwards = [contribution(rank, 1000, torch.float32) for rank in reversed(range(4))]
    assert not np.array_equal(one_after_the_other(backwards), one_after_the_other(backwards[::-1])), "it must show"


@pytest.mark.ranks(2)
def test_special_values(world) -> None:
    """Not-a-number wins, infinities add up, the sign of zero is that of the sum in rank order."""
    nan, inf = float("nan"), float("inf")
    table = torch.tensor([[nan, 1, inf, inf, -0.0, 0.0], [2, nan, inf, -inf, -0.0, -0.0]])
    for op, expected in (
        (ReduceOp.SUM, [nan, nan, inf, nan, -0.0, 0.0]),
        (ReduceOp.MIN, [nan, nan, inf, -inf, -0.0, 0.0]),
        (ReduceOp.MAX, [nan, nan, inf, inf, -0.0, 0.0]),
    ):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for repeat in (1, 100):
                tensor = table[world.rank].to(dtype).repeat(repeat)
                ax.all_reduce(tensor, op)
                wanted = torch.tensor(expected).repeat(repeat)
                assert torch.equal(tensor.isnan(), wanted.isnan()), (op, dtype)
                assert torch.equal(tensor.float().nan_to_num(), wanted.nan_to_num()), (op, dtype)
                if op is ReduceOp.SUM:
                    assert torch.equal(tensor.signbit()[4:6], wanted.signbit()[4:6]), dtype
