"""The collectives of a lane, several of them under way at a time, against torch in float64."""

from typing import Any

import pytest
import torch
from helpers.placements import REAL

from axonmpi import ReduceOp
from axonmpi.backends.connection.lane import Lane
from axonmpi.backends.connection.topology import Blocks, split_array
from axonmpi.launch.start import start_mpi
from axonmpi.utils.waiting import RequestWaiter

pytestmark = [REAL, pytest.mark.ranks(2, 3)]
SIZES = (1, 2, 7, 1000, 70_001)


@pytest.fixture
def lane(world) -> Lane:
    mpi = start_mpi()
    comm = world.default_group.backend.mpi_comm
    return Lane(mpi, comm, 1 << 20, RequestWaiter(mpi.Request, oversubscribed=True))


def values(number: int, rank: int, size: int) -> torch.Tensor:
    return torch.randint(-9, 9, (size,), generator=torch.Generator().manual_seed(100 * number + rank))


@pytest.mark.parametrize("sliced", [False, True])
def test_sums_that_are_under_way_together(lane, sliced) -> None:
    for op, combine in ((ReduceOp.SUM, torch.sum), (ReduceOp.AVERAGE, torch.mean), (ReduceOp.PRODUCT, torch.prod)):
        tensors = [values(number, lane.index, size).double() for number, size in enumerate(SIZES)]
        flights: list[Any] = []
        for tensor in tensors:
            if len(flights) == 3:
                flights.pop(0).finish()
            flights.append(lane.start(lane.all_reduce(tensor, op, lane.size, sliced=sliced)))
            for flight in flights[:-1]:
                flight.go_on()
        for flight in flights:
            flight.finish()
        for number, (size, tensor) in enumerate(zip(SIZES, tensors, strict=True)):
            parts = torch.stack([values(number, rank, size).double() for rank in range(lane.size)])
            torch.testing.assert_close(tensor, combine(parts, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float16])
def test_slices_of_what_mpi_does_not_add(lane, dtype) -> None:
    for number, size in enumerate(SIZES):
        tensor = values(number, lane.index, size).to(dtype)
        lane.complete(lane.all_reduce(tensor, ReduceOp.MAX, lane.size, sliced=True))
        parts = torch.stack([values(number, rank, size).to(dtype) for rank in range(lane.size)])
        assert torch.equal(tensor, parts.amax(0))


@pytest.mark.parametrize("size", [6, 70_001, 300_000])
def test_copies_in_one_message_and_in_several(lane, size) -> None:
    sizes = split_array(size, lane.size).tolist()
    whole = torch.cat([values(0, rank, each) for rank, each in enumerate(sizes)])
    own = values(0, lane.index, sizes[lane.index])
    for there in (None, own):
        result = torch.zeros_like(whole)
        result.split(sizes)[lane.index].copy_(own)
        lane.complete(lane.all_gather(result, 8 * split_array(size, lane.size), there))
        assert torch.equal(result, whole)
    copy = whole.clone() if lane.index == 1 else torch.zeros_like(whole)
    lane.complete(lane.broadcast(copy, 1))
    assert torch.equal(copy, whole)


def test_blocks_of_a_sum(lane) -> None:
    for size in (6, 700, 1800):
        parts = [values(0, rank, size).double() for rank in range(lane.size)]
        sizes = split_array(size, lane.size)
        wanted = torch.stack(parts).mean(0).split(sizes.tolist())[lane.index]
        own, output = parts[lane.index], torch.zeros_like(wanted)
        lane.complete(lane.reduce_scatter(own.clone(), Blocks.of(8 * sizes), output, ReduceOp.AVERAGE))
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
        if size % lane.size == 0:
            lane.complete(lane.exchange_and_reduce(own, ReduceOp.AVERAGE, lane.size, output.zero_()))
            torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
