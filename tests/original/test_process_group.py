"""What `process_group.rs` checks: groups and worlds, of one mock rank and of several."""

from __future__ import annotations

import copy

import pytest
import torch

import axonmpi as ax
from axonmpi import MockBackend, ProcessGroup, World


def test_a_mock_group() -> None:
    group = ProcessGroup.mock()
    assert (group.rank, group.world_size, group.size) == (0, 1, 1)
    assert group.contains(0)
    assert not group.contains(1)


def test_a_mock_world() -> None:
    world = World.mock()
    assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
    assert (world.default_group.rank, world.default_group.world_size) == (0, 1)
    world.barrier()
    assert world.new_group([0]).size == 1


def test_a_group_of_a_backend() -> None:
    backends = MockBackend.create_world(2)
    groups = [ProcessGroup(backend) for backend in backends]
    assert [(group.rank, group.size, len(group.ranks)) for group in groups] == [(0, 2, 2), (1, 2, 2)]
    assert groups[1].backend is backends[1]


@pytest.mark.ranks(1, 2)
def test_operations_are_methods(group) -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    group.all_reduce(tensor, ax.ReduceOp.SUM)
    assert tensor.tolist() == [group.size * each for each in (1.0, 2.0, 3.0)]
    tensor = torch.tensor([1.0, 2.0]) + group.rank
    group.broadcast(tensor, 0)
    assert tensor.tolist() == [1.0, 2.0]
    assert group.all_gather(tensor.view(1, 2)).shape == (group.size, 2)
    group.barrier()


@pytest.mark.ranks(1, 2)
def test_the_world_of_ranks(world) -> None:
    assert world.world_size == world.size == world.default_group.size
    assert world.is_main == (world.rank == 0)
    world.barrier()


@pytest.mark.ranks(2)
def test_a_group_of_some_ranks(world) -> None:
    both, last = world.new_group([0, 1]), world.new_group([1])
    assert both.size == 2
    assert both.contains(0)
    assert (last.size, last.contains(0), last.rank) == (1, False, world.rank - 1)


def test_a_copied_group_is_the_group() -> None:
    """The original clones groups to give them away; here a group is given as it is."""
    group = ProcessGroup.mock()
    assert copy.deepcopy(group) is group
