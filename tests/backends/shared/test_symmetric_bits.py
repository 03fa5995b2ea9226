"""What symmetric tensors add up to, bit by bit: rank order, one rounding of short floats, and special values."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from helpers.collective_checks import Watched
from helpers.numpy_reference import same_bits
from helpers.placements import PLACEMENTS, REAL, Places, agree_on_bits, limits, places_in
from helpers.settings import all_pairs
from torch import Tensor

from axonmpi import ReduceOp

pytestmark = [REAL, pytest.mark.ranks(2, 4)]
SHORT = (torch.bfloat16, torch.float16)
INF, NAN = math.inf, math.nan
SPECIAL = (
    (1.0, INF, -INF, INF, NAN, -0.0, -0.0, 0.0, -1.0, 3.0),
    (NAN, 1.0, 2.0, -INF, INF, -0.0, 0.0, -0.0, INF, -0.0),
    (2.0, INF, -INF, 0.0, -1.0, -0.0, -0.0, -0.0, 0.0, -0.0),
    (0.5, 1.0, -INF, 1.0, NAN, -0.0, -0.0, 0.0, -0.0, 1.0),
)
"""For each rank, ten numbers."""
COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def every_reduction(places: Places, source: Tensor, op: ReduceOp) -> dict[str, Tensor]:
    """The same reduction by every operation that can make it, on all ranks."""
    group = places.group
    last = group.size - 1
    blocking, asynchronous, rooted, scattered = (places.put(source) for _ in range(4))
    group.all_reduce(blocking.tensor, op)
    group.all_reduce(asynchronous.tensor, op, async_op=True).wait()
    group.reduce(rooted.tensor, last, op)
    group.broadcast(rooted.tensor, last)
    gathered = group.all_gather(group.reduce_scatter(scattered.tensor, op))
    assert all(map(Watched.is_intact, (blocking, asynchronous, rooted, scattered)))
    return {
        "all_reduce": blocking.tensor,
        "asynchronous all_reduce": asynchronous.tensor,
        "reduce and broadcast": rooted.tensor,
        "reduce_scatter and all_gather": gathered,
    }


def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Special values, and numbers of very different sizes, so that another order of adding gives other bits."""
    generator = np.random.default_rng([rank, count])
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)
    values[-10:] = SPECIAL[rank][:count]
    return torch.from_numpy(values).to(dtype)


def reduced(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Numpy's reduction of one after the other, of short floats in float32, rounded at the end."""
    wide = [(part.float() if part.dtype in SHORT else part).numpy() for part in parts]
    with np.errstate(all="ignore"):
        total = functools.reduce(COMBINE[op], wide)
        total = total / total.dtype.type(len(parts)) if op is ReduceOp.AVERAGE else total
    return torch.from_numpy(total).to(parts[0].dtype)


def same_numbers(result: Tensor, wanted: Tensor, op: ReduceOp) -> bool:
    """Whether bits are the same, but for payloads of what is no number, and which of two zeros is the least."""
    numbers = ~wanted.isnan()
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        result, wanted = result + 0.0, wanted + 0.0
    return torch.equal(~result.isnan(), numbers) and same_bits(result[numbers], wanted[numbers])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_sums_are_taken_in_rank_order_and_rounded_once(world) -> None:
    direct = limits(world.size).direct
    for kind in PLACEMENTS:
        with places_in(world, kind, direct + 8) as places:
            for case in all_pairs(
                dtype=(torch.float32, torch.float64, *SHORT), op=list(COMBINE), nbytes=(40, 8000, direct + 8)
            ):
                dtype, op = case["dtype"], case["op"]
                parts = [contribution(rank, case["nbytes"] // dtype.itemsize, dtype) for rank in range(world.size)]
                wanted = reduced(parts, op)
                if world.size > 2 and op is ReduceOp.SUM and len(wanted) > 1000:  # another way shows
                    other = functools.reduce(torch.add, parts) if dtype in SHORT else reduced(parts[::-1], op)
                    assert not same_numbers(other, wanted, op)
                results = every_reduction(places, parts[world.rank], op)
                for name, result in results.items():
                    assert same_numbers(result, wanted, op), (name, kind, case)
                assert agree_on_bits(places.group, results["all_reduce"]), (kind, case)


def test_copies_keep_every_bit(world) -> None:
    """Payloads of what is no number, negative zeros, numbers below the normal ones."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -1, -(1 << 31), 1, 0x007FFFFF, 0x7F800000], dtype=torch.int32)
    for kind in PLACEMENTS:
        with places_in(world, kind, 7 * 4 * 5000) as places:
            for count in (1, 5, 5000):
                sources = [(patterns.repeat(count) ^ rank).view(torch.float32) for rank in range(world.size)]
                for root in range(world.size):
                    placed = places.put(sources[world.rank])
                    places.group.broadcast(placed.tensor, root)
                    assert same_bits(placed.tensor, sources[root])
                gathered = places.group.all_gather(places.put(sources[world.rank]).tensor)
                assert same_bits(gathered, torch.cat(sources))
