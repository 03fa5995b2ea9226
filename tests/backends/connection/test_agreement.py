"""The agreement on a call, a number and an address: on one node, between nodes, and of ranks that are apart."""

from collections.abc import Callable

import pytest
import torch
from helpers.placements import REAL

from axonmpi import CollectiveMismatchError, MpiBackend, ReduceOp, World
from axonmpi.backends.call import Call
from axonmpi.backends.connection.connection import ChunkSizes, Connection, connect
from axonmpi.launch.start import start_mpi

pytestmark = [REAL, pytest.mark.ranks(2, 4)]
SUM = Call("all_reduce", torch.float32, (3,), ReduceOp.SUM)
OTHER = Call("all_reduce", torch.float32, (4,), ReduceOp.SUM)


@pytest.fixture(params=[8, 1, 2, 3], ids=["one_node", "apart", "two_a_node", "three_a_node"])
def make(request, monkeypatch) -> Callable[[World], Connection]:
    """Connects all ranks, with so many on each node, as they believe."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(request.param))

    def connected(world: World) -> Connection:
        backend = world.default_group.backend
        assert isinstance(backend, MpiBackend)
        return connect(start_mpi(), backend.mpi_comm, ChunkSizes(), oversubscribed=True, timeout=None)

    return connected


def test_numbers_of_all_ranks(world, make) -> None:
    ranks = make(world)
    agreement = ranks.agreement
    for _ in range(3):  # the cells are used in turn
        assert agreement.agree(SUM, 5)[:2] == (5, 5)
        assert agreement.agree(SUM, 10 * world.rank)[:2] == (10 * (world.size - 1), 0)
        assert list(agreement.numbers(10 * world.rank)) == [10 * rank for rank in range(world.size)]
        assert list(ranks.numbers(OTHER, -world.rank)) == [-rank for rank in range(world.size)]
    ranks.free()


def test_addresses(world, make) -> None:
    """Ordinary tensors have address 0; one alone on a node has that node's only one."""
    ranks = make(world)
    last = world.rank == world.size - 1
    together = len(ranks.topology.node_ranks) > 1
    assert ranks.agreement.agree(SUM)[2]
    assert ranks.agreement.agree(SUM, 0, 7)[2] or ranks.is_apart
    agreed = ranks.agreement.agree(SUM, 0, 8 if last else 7)[2]
    others = [rank for rank in ranks.topology.node_ranks if rank != world.rank]
    if together and (last or world.size - 1 in others):
        assert not agreed
    ranks.free()


def test_another_call_is_an_error_on_every_rank_and_the_next_is_right(world, make) -> None:
    ranks = make(world)
    for odd in range(world.size):
        with pytest.raises(CollectiveMismatchError, match=rf"rank {odd}: all_reduce\(float32 \[4\], SUM\)"):
            ranks.agreement.agree(OTHER if world.rank == odd else SUM, world.rank)
        assert ranks.agreement.agree(SUM, world.rank)[:2] == (world.size - 1, 0)
    ranks.free()
