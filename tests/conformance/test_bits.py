"""Results have the bits of a reduction in rank order: so they are the same on every rank and in every run.

On several nodes that is the order on each node, and then that of the nodes, where AXONMPI_SUMS=ordered asks for it.
"""

import functools
import itertools
import math
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.numpy_reference import UFUNCS, reductions, same_bits
from helpers.placements import PLACEMENTS, REAL, Places, agree_on_bits, limits, places_in
from helpers.settings import all_pairs
from torch import Tensor

import axonmpi as ax
from axonmpi import ReduceOp

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.not_over_double("NCCL has an order of its own, rounds at each step, and MIN and MAX drop NaN"),
]
KINDS = ("ordinary", *PLACEMENTS)
SIZES = (1, 5, 28, 29, 1000)
"""Elements; among them what fits into the first message, and just not."""
LARGE = 300_001
"""More than two of the pieces that large tensors are reduced in."""
SHORT = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, torch.complex64, *SHORT)
INF, NAN = math.inf, math.nan
SPECIAL = (
    (1.0, INF, -INF, INF, NAN, -0.0, -0.0, 0.0, -1.0, 3.0),
    (NAN, 1.0, 2.0, -INF, INF, -0.0, 0.0, -0.0, INF, -0.0),
    (2.0, INF, -INF, 0.0, -1.0, -0.0, -0.0, -0.0, 0.0, -0.0),
    (0.5, 1.0, -INF, 1.0, NAN, -0.0, -0.0, 0.0, -0.0, 1.0),
)
"""For each rank, ten numbers: not-a-number wins, infinities add up, zeros have the sign of their sum."""


@functools.lru_cache(maxsize=32)
def contribution(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits, and special values."""
    generator = np.random.default_rng([rank, count])
    numbers = generator.standard_normal(count) * 10.0 ** generator.integers(-2, 3, count)
    if dtype.is_complex:
        numbers = numbers + 1j * generator.standard_normal(count)
    elif count > 10:
        numbers[-10:] = SPECIAL[rank]
    return torch.from_numpy(numbers).to(dtype)


def one_after_the_other(parts: Sequence[Tensor], op: ReduceOp, nodes: Sequence[Sequence[int]]) -> Tensor:
    """Numpy's reduction in rank order; short floats in float32, rounded at the end."""
    wide = [(part.float() if part.dtype in SHORT else part).numpy() for part in parts]
    with np.errstate(all="ignore"):
        sums = [functools.reduce(UFUNCS[op], [wide[rank] for rank in ranks]) for ranks in nodes]
        total = functools.reduce(UFUNCS[op], sums)
        total = total / total.dtype.type(len(parts)) if op is ReduceOp.AVERAGE else total
    return torch.from_numpy(np.asarray(total)).to(parts[0].dtype)


def all_results(places: Places, own: Tensor, op: ReduceOp) -> dict[str, Tensor]:
    """The same reduction by every operation that can make it."""
    group, last = places.group, places.group.size - 1
    blocking, asynchronous, rooted, scattered = placed = [places.put(own) for _ in range(4)]
    group.all_reduce(blocking.tensor, op)
    group.all_reduce(asynchronous.tensor, op, async_op=True).wait()
    group.reduce(rooted.tensor, last, op)
    group.broadcast(rooted.tensor, last)
    gathered = group.all_gather(group.reduce_scatter(scattered.tensor, op))
    group.all_reduce(strided := torch.zeros(len(own), 2, dtype=own.dtype)[:, 1].copy_(own), op)
    again = own.clone()
    group.all_reduce(again, op)
    assert all(each.is_intact() for each in placed)
    return {
        "all_reduce": blocking.tensor,
        "asynchronous all_reduce": asynchronous.tensor,
        "reduce and broadcast": rooted.tensor,
        "reduce_scatter and all_gather": gathered,
        "all_reduce of a strided tensor": strided,
        "all_reduce of ordinary memory": again,
    }


def same_numbers(result: Tensor, wanted: Tensor, op: ReduceOp) -> bool:
    """Compare bits, but for payloads of what is no number, and which of two zeros is the least."""
    numbers = ~wanted.isnan()
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        result, wanted = result + 0.0, wanted + 0.0
    return torch.equal(~result.isnan(), numbers) and same_bits(result[numbers], wanted[numbers])


def check(
    places: Places, count: int, dtype: torch.dtype, op: ReduceOp, nodes: Sequence[Sequence[int]] | None
) -> None:
    """Compare the results with numpy's in the order of the nodes; None: those of `all_reduce` with each other."""
    case = (places.kind, count, dtype, op.name)
    parts = [contribution(rank, count, dtype) for rank in range(places.group.size)]
    results = all_results(places, parts[places.group.rank], op)
    expected = results["all_reduce"] if nodes is None else one_after_the_other(parts, op, nodes)
    for name, result in results.items():
        if nodes is not None or "all_reduce" in name:
            assert same_numbers(result, expected, op), (name, *case)
    assert agree_on_bits(places.group, results["all_reduce"]), case


@pytest.mark.ranks(2, 3)
def test_reductions_are_made_in_rank_order(world) -> None:
    nodes = sorted(set(ax.all_gather_object(world.default_group.backend.node_ranks)))
    if len(nodes) > 1 and os.environ.get("AXONMPI_SUMS") != "ordered":
        pytest.skip("the order between nodes is the MPI library's")
    beyond = limits(world.size).direct // 4 + 2
    rows = all_pairs(kind=KINDS, count=(*SIZES, beyond), dtype=FLOATS, op=reductions(torch.float32))
    rows += [
        {"kind": "ordinary", "count": LARGE, "dtype": torch.float64, "op": ReduceOp.SUM},
        {"kind": "ordinary", "count": LARGE, "dtype": torch.bfloat16, "op": ReduceOp.AVERAGE},
        {"kind": "whole", "count": LARGE, "dtype": torch.float32, "op": ReduceOp.SUM},
    ]
    for kind in KINDS:
        with places_in(world, kind, 8 * beyond) as places:
            for _, count, dtype, named in (row.values() for row in rows if row["kind"] == kind):
                op = ReduceOp.SUM if dtype.is_complex and named is not ReduceOp.AVERAGE else named
                check(places, count, dtype, op, nodes)


@REAL
@pytest.mark.ranks(4)
@pytest.mark.parametrize("order", ["auto", "ordered"])
@pytest.mark.parametrize("on_a_node", [1, 2, 3])
def test_bits_on_several_nodes_depend_neither_on_memory_nor_on_time(world, monkeypatch, on_a_node, order) -> None:
    if world.num_nodes > 1:
        pytest.skip("the ranks of one node are taken for several")
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(on_a_node))
    monkeypatch.setenv("AXONMPI_SUMS", order)
    with places_in(world, "whole", 0) as places:
        nodes = sorted(set(ax.all_gather_object(places.group.backend.node_ranks)))
        assert len(nodes) == -(-world.size // on_a_node)
        for count, dtype in ((7, torch.float32), (90_001, torch.bfloat16), (1_300_000, torch.float32)):
            check(places, count, dtype, ReduceOp.SUM, nodes if order == "ordered" else None)


def test_another_order_would_show() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64):
        parts = [contribution(rank, 1000, dtype) for rank in range(4)]
        wanted, *others = (
            one_after_the_other(parts, ReduceOp.SUM, order)
            for order in ([range(4)], [[3, 2, 1, 0]], [[0, 1], [2, 3]])
        )
        assert not any(same_numbers(other, wanted, ReduceOp.SUM) for other in others)


def special_values(dtype: torch.dtype) -> Tensor:
    """Zeros, ones, infinities, the largest and the smallest, and NaN of both signs with several payloads."""
    real = dtype.to_real()
    limits = torch.finfo(real)
    numbers = [
        sign * value for sign in (1, -1) for value in (0.0, 1.0, INF, limits.max, limits.smallest_normal / 2)
    ]
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    quiet = torch.tensor([NAN], dtype=real).view(integer)
    nans = torch.cat([quiet | 1, quiet | 5, (quiet | 3) ^ torch.iinfo(integer).min]).view(real)
    found = torch.cat([torch.tensor(numbers, dtype=real), nans])
    return torch.view_as_complex(torch.cartesian_prod(found, found)) if dtype.is_complex else found


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex128], ids=str)
def test_ranks_agree_on_every_bit_of_special_values(world, dtype) -> None:
    """Each value of a rank meets each of the others': NaN has the same payload and sign on all ranks, too."""
    if world.num_nodes > 1 and os.environ.get("AXONMPI_SUMS") != "ordered":
        pytest.skip("MPI libraries add NaN of two nodes in either order")
    values = special_values(dtype)
    own = values.repeat(len(values)) if world.rank % 2 else values.repeat_interleave(len(values))
    pieces = [own, *own[:135].split(27), *own[:: len(own) // 20].split(1)]
    with places_in(world, "ordinary", 0) as places:
        for piece, op in itertools.product(pieces, reductions(dtype)):
            for name, result in all_results(places, piece, op).items():
                assert agree_on_bits(places.group, result), (name, len(piece), op)


@pytest.mark.ranks(2)
def test_complex_infinities_add_up(group) -> None:
    """As in numpy; torch's own sum depends on the order."""
    values = special_values(torch.complex64)
    left, right = values.repeat_interleave(len(values)), values.repeat(len(values))
    tensor = right.clone() if group.rank else left.clone()
    group.all_reduce(tensor, ReduceOp.SUM)
    with np.errstate(invalid="ignore"):
        expected = np.add(left.numpy(), right.numpy())
    assert np.array_equal(tensor.real.numpy(), expected.real, equal_nan=True)
    assert np.array_equal(tensor.imag.numpy(), expected.imag, equal_nan=True)


@pytest.mark.ranks(2, 4)
def test_copies_keep_every_bit(world) -> None:
    """Payloads of what is no number, negative zeros, numbers below the normal ones."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -1, -(1 << 31), 1, 0x007FFFFF, 0x7F800000], dtype=torch.int32)
    for kind in KINDS:
        with places_in(world, kind, 7 * 4 * 5000) as places:
            for count in (1, 5, 5000):
                sources = [(patterns.repeat(count) ^ rank).view(torch.float32) for rank in range(world.size)]
                placed = places.put(sources[world.rank])
                places.group.broadcast(placed.tensor, count % world.size)
                assert same_bits(placed.tensor, sources[count % world.size])
                gathered = places.group.all_gather(places.put(sources[world.rank]).tensor)
                assert same_bits(gathered, torch.cat(sources))
