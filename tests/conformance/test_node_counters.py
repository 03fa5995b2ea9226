"""Counters that the ranks of a node share: what is written before is seen after, and waiting ends."""

import time

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax
from axonmpi.errors import CollectiveTimeoutError, RankFailedError
from axonmpi.testing import run_ranks

pytestmark = pytest.mark.not_over_double("is about memory that the CPUs of a node share")

ROUNDS = 100


@pytest.mark.ranks(1, 2, 4)
def test_data_is_handed_round_and_is_there(world) -> None:
    """Each rank writes to its successor, again and again, in one slot: neither can be ahead of the other."""
    backend = world.default_group.backend
    if len(backend.node_ranks) < world.size:
        pytest.skip("for ranks of one node")
    counters = backend.node_counters(2 * world.size)
    slots = backend.node_empty((world.size, 64), torch.int64)
    after, before = (world.rank + 1) % world.size, world.rank
    for number in range(1, ROUNDS):
        counters.wait(world.size + after, number - 1, "the slot to be free")
        slots[after] = number * 10 + world.rank
        counters.post(after, number)
        counters.wait(before, number, "the slot to be filled")
        assert slots[before].tolist() == [number * 10 + (world.rank - 1) % world.size] * 64
        assert (counters.reached(before, number), counters.reached(before, number + 2)) == (True, False)
        counters.post(world.size + before, number)
    ax.barrier()


@pytest.mark.ranks(2, 4)
def test_each_node_has_its_own(world, monkeypatch) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    group = world.new_group(range(world.size))
    counters = group.backend.node_counters(1)
    assert not counters.reached(0, 1)
    ax.barrier()
    if world.rank == 0:
        counters.post(0, 7)
    ax.barrier()
    assert counters.reached(0, 7) == (0 in group.backend.node_ranks)
    ax.barrier()


@pytest.mark.ranks(2)
def test_numbers_that_there_are_not(world) -> None:
    backend = world.default_group.backend
    refused(ValueError, (lambda: backend.node_counters(-1), "-1"))
    refused(TypeError, (lambda: backend.node_counters("1"), "expected integers, got"))
    assert ax.all_gather_object(1) == [1, 1]


def test_waiting_ends_when_a_mock_rank_fails() -> None:
    def body(world):
        counters = world.default_group.backend.node_counters(1)
        if world.rank:
            raise OSError("no such file")
        with pytest.raises(RankFailedError, match="rank 1 failed while a gift waited for it: OSError"):
            counters.wait(0, 1, "a gift")
        return "released"

    with pytest.raises(OSError, match="no such file"):
        run_ranks(2, body)


def test_waiting_ends_in_time() -> None:
    counters = ax.MockBackend.create_world(1, timeout=0.05)[0].node_counters(1)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"a gift waited 0.05 s"):
        counters.wait(0, 1, "a gift")
    assert time.monotonic() - began >= 0.05
