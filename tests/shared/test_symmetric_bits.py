"""What symmetric tensors add up to, bit by bit: rank order, one rounding of short floats, and special values."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from collective_checks import Watched
from numpy_reference import same_bits
from placements import PLACEMENTS, Places, agree_on_bits, places_in
from torch import Tensor

from axonmpi import ReduceOp
from axonmpi.backends.node_plans import direct_bytes

pytestmark = pytest.mark.ranks(2, 4)
EVERYWHERE = pytest.mark.parametrize("kind", PLACEMENTS)
SHORT = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *SHORT)


def counts(size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Elements: in one message, in the memory of the direct way, just beyond it."""
    return 5, 1000, direct_bytes(size) // dtype.itemsize + 1


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


# ---- rank order -----------------------------------------------------------------------------------------------


def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    generator = np.random.default_rng([rank, count])
    return torch.from_numpy(generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)).to(dtype)


def added(parts: list[Tensor]) -> np.ndarray:
    """Numpy's sum one after the other, of short floats in float32."""
    wide = [part.float() if part.dtype in SHORT else part for part in parts]
    return functools.reduce(np.add, [part.numpy() for part in wide])


@EVERYWHERE
def test_sums_are_taken_in_rank_order(world, kind) -> None:
    cases = [(dtype, count) for dtype in FLOATS for count in counts(world.size, dtype)]
    with places_in(world, kind, direct_bytes(world.size) + 8) as places:
        for dtype, count in cases:
            parts = [contribution(rank, count, dtype) for rank in range(world.size)]
            total = added(parts)
            for op, expected in ((ReduceOp.SUM, total), (ReduceOp.AVERAGE, total / total.dtype.type(world.size))):
                rounded = torch.from_numpy(np.asarray(expected)).to(dtype)
                for name, result in every_reduction(places, parts[world.rank], op).items():
                    assert same_bits(result, rounded), f"{name} of {count} elements, {dtype}, {op.name}"


def test_the_order_of_adding_shows() -> None:
    """What the test above relies on: another order gives other bits."""
    parts = [contribution(rank, 1000, torch.float32) for rank in range(3)]
    assert not np.array_equal(added(parts), added(parts[::-1]))


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_all_ranks_get_the_same_bits_wherever_the_tensors_lie(world, op) -> None:
    count = counts(world.size, torch.float32)[-1]
    own = contribution(world.rank, count, torch.float32)
    first = None
    for kind in PLACEMENTS:
        with places_in(world, kind, own.nbytes) as places:
            results = every_reduction(places, own, op)
            first = results["all_reduce"].clone() if first is None else first
            for name, result in results.items():
                assert same_bits(result, first), f"{name} of tensors that lie {kind}"
    assert agree_on_bits(world.default_group, first)


# ---- one rounding ---------------------------------------------------------------------------------------------


def steps_of(dtype: torch.dtype, size: int) -> list[Tensor]:
    """For each rank: numbers whose exact sum fits into float32, and needs rounding in the dtype only at the end.

    The first is 1; what each further rank adds is less than half a unit in its last place.
    """
    little = torch.finfo(dtype).eps * (0.25 + 0.5 / 8)
    first = torch.linspace(1, 1.5, 129, dtype=torch.float64).to(dtype)
    return [first] + [torch.full((129,), little, dtype=torch.float64).to(dtype)] * (size - 1)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_short_floats_are_rounded_once(world, dtype) -> None:
    parts = steps_of(dtype, world.size)
    exact = functools.reduce(torch.add, [part.double() for part in parts])
    assert torch.equal(functools.reduce(torch.add, [part.float() for part in parts]).double(), exact)
    at_each_step = functools.reduce(torch.add, parts)
    assert not same_bits(at_each_step, exact.to(dtype))  # or this test could not fail
    repeats = direct_bytes(world.size) // dtype.itemsize // 129 + 1
    for kind in PLACEMENTS:
        with places_in(world, kind, parts[0].nbytes * repeats) as places:
            for times in (1, repeats):
                results = every_reduction(places, parts[world.rank].repeat(times), ReduceOp.SUM)
                for name, result in results.items():
                    assert same_bits(result, exact.to(dtype).repeat(times)), (kind, name, times)


# ---- special values -------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
ROWS = (
    (1.0, INF, -INF, INF, NAN, -0.0, -0.0, 0.0, -1.0, 3.0),
    (NAN, 1.0, 2.0, -INF, INF, -0.0, 0.0, -0.0, INF, -0.0),
    (2.0, INF, -INF, 0.0, -1.0, -0.0, -0.0, -0.0, 0.0, -0.0),
    (0.5, 1.0, -INF, 1.0, NAN, -0.0, -0.0, 0.0, -0.0, 1.0),
)
"""For each rank, ten numbers."""
COMBINE = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}


@EVERYWHERE
def test_infinities_zeros_and_what_is_no_number(world, kind) -> None:
    with places_in(world, kind, direct_bytes(world.size) + 80) as places:
        for op, dtype in itertools.product(COMBINE, FLOATS):
            with np.errstate(invalid="ignore"):
                expected = functools.reduce(COMBINE[op], [np.array(row) for row in ROWS[: world.size]])
            for repeat in (1, direct_bytes(world.size) // 10 // dtype.itemsize + 1):
                own = torch.tensor(ROWS[world.rank], dtype=torch.float64).to(dtype).repeat(repeat)
                wanted = torch.from_numpy(expected).repeat(repeat)
                for name, result in every_reduction(places, own, op).items():
                    assert_same_numbers(result, wanted, (op, dtype, repeat, name))


def assert_same_numbers(result: Tensor, wanted: Tensor, case: tuple[object, ...]) -> None:
    """Equal, infinities and the places of what is no number included, and for sums and products signs of zeros."""
    assert torch.equal(result.isnan(), wanted.isnan()), case
    assert torch.equal(result.double().nan_to_num(7.0), wanted.nan_to_num(7.0)), case
    if case[0] in (ReduceOp.SUM, ReduceOp.PRODUCT):  # of zeros of both signs any may be the least
        numbers = ~wanted.isnan()
        assert torch.equal(result.signbit()[numbers], wanted.signbit()[numbers]), case


@EVERYWHERE
def test_copies_keep_every_bit(world, kind) -> None:
    """Payloads of what is no number, negative zeros, numbers below the normal ones."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -1, -(1 << 31), 1, 0x007FFFFF, 0x7F800000], dtype=torch.int32)
    with places_in(world, kind, 7 * 4 * 5000) as places:
        for count in (1, 5, 5000):
            sources = [(patterns.repeat(count) ^ rank).view(torch.float32) for rank in range(world.size)]
            for root in range(world.size):
                placed = places.put(sources[world.rank])
                places.group.broadcast(placed.tensor, root)
                assert torch.equal(placed.tensor.view(torch.int32), sources[root].view(torch.int32))
            gathered = places.group.all_gather(places.put(sources[world.rank]).tensor)
            assert torch.equal(gathered.view(torch.int32), torch.cat([part.view(torch.int32) for part in sources]))
