"""What ranks on several nodes check about them; `pytest` on ranks that `test_nodes.py` and the command start."""

import os
import random

import pytest
import torch
from helpers.collective_checks import CollectiveChecks

import axonmpi as ax

BYTES = 64 << 20
CALLS = (
    lambda group: group.all_reduce(torch.ones(3)),
    lambda group: group.all_reduce(torch.ones(300)),
    lambda group: group.all_gather(torch.ones(3)),
    lambda group: group.broadcast(torch.ones(3, 200)),
    lambda group: group.barrier(),
)
"""No two of them match."""


@pytest.mark.ranks(3, 4)
def test_ranks_know_their_node_and_groups_the_way_to_it(world) -> None:
    names = ax.all_gather_object(os.uname().nodename)
    own = names[world.rank]
    assert (own, os.uname().nodename) == (f"n{world.node_rank + 1}",) * 2
    assert world.num_nodes == len(set(names)) > 1
    assert (world.local_size, world.local_rank) == (names.count(own), names[: world.rank].count(own))
    assert world.default_group.backend.path == ("nodes" if len(set(names)) < world.size else "plain")
    for name in sorted(set(names)):
        group = world.new_group([rank for rank in range(world.size) if names[rank] == name])
        assert not group.contains(world.rank) or group.size == 1 or group.backend.path == "node"


@pytest.mark.ranks(4)
def test_each_byte_of_an_all_reduce_crosses_the_network_once(world) -> None:
    """Two nodes cannot do with less in each direction."""
    if world.num_nodes != 2:
        pytest.skip("on more nodes than two, each sends more")
    tensor = torch.full((BYTES // 4,), float(world.rank))
    ax.all_reduce(tensor, ax.ReduceOp.AVERAGE)  # sets up connections
    ax.barrier()
    before = bytes_of_the_network()
    ax.all_reduce(tensor, ax.ReduceOp.AVERAGE)
    ax.barrier()
    assert (tensor == 1.5).all()
    for start, after in zip(before, bytes_of_the_network(), strict=True):
        assert 0.99 <= (after - start) / BYTES <= 1.08


def bytes_of_the_network() -> tuple[int, int]:
    """Return how many bytes this node has received and sent."""
    with open("/proc/net/dev") as lines:
        numbers = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(numbers[0]), int(numbers[8])


@pytest.mark.ranks(3, 4)
def test_random_calls_a_third_of_which_do_not_match(world, seed) -> None:
    """All ranks raise where they differ; calls before and after, and those under way meanwhile, are right."""
    group, chance = world.default_group, random.Random(seed)
    checks = [CollectiveChecks(group, asynchronous=asynchronous, seed=seed) for asynchronous in (False, True)]
    for _ in range(60):
        if chance.random() < 2 / 3:
            shape = (chance.choice((1, 7, 1000, 30_000)), chance.choice((1, 3)))
            dtype = chance.choice((torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8))
            chance.choice(checks).all_reduce(dtype, shape)
            chance.choice(checks).all_gather(dtype, shape)
        else:
            common, other = chance.sample(CALLS, 2)
            others = chance.sample(range(world.size), chance.randrange(1, world.size))
            with pytest.raises(ax.CollectiveMismatchError):
                (other if world.rank in others else common)(group)
    for each in checks:
        each.finish()
