"""Several disjoint groups made by one call: on a backend and on a world."""

import re
from functools import partial

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax


def partitions_of(size: int) -> list[list[list[int]]]:
    """One part, single ranks, halves backwards, every other rank, uneven parts in no order."""
    ranks, half = list(range(size)), (size + 1) // 2
    return [
        [ranks],
        [[rank] for rank in ranks],
        [ranks[half:][::-1], ranks[:half][::-1]],
        [ranks[::2], ranks[1::2]],
        [*filter(None, [ranks[1:-1]]), [ranks[-1], ranks[0]]],
    ]


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_every_rank_gets_the_group_it_is_in(world) -> None:
    for parts in partitions_of(world.size):
        own = next(part for part in parts if world.rank in part)
        known = world.groups
        group = world.partition(parts)
        assert (list(group.ranks), group.rank) == (own, own.index(world.rank))
        assert (world.groups, group.all_gather_object(world.rank)) == ((*known, group), own)
        tensor = torch.full((100_000,), float(world.rank))
        group.all_reduce(tensor)
        assert tensor.unique().tolist() == [sum(own)]
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        message = torch.zeros(2)
        for work in (group.isend(torch.full((2,), float(group.rank)), after), group.irecv(message, before)):
            work.wait()
        assert message.tolist() == [before] * 2
        world.close_groups(keep=known)
        assert world.groups == known


@pytest.mark.ranks(4)
def test_parts_of_parts(world) -> None:
    half = world.default_group.backend.partition([[0, 1], [3, 2]])
    single, both = half.partition([[1], [0]]), half.split([1, 0])
    assert (half.rank, single.rank, single.size, both.rank) == ([0, 1, 1, 0][world.rank], 0, 1, 1 - half.rank)
    assert half.all_gather(torch.tensor([world.rank])).tolist() == [[0, 1], [3, 2]][world.rank // 2]
    for backend in (both, single, half):
        backend.close()


@pytest.mark.ranks(2, 4)
def test_other_parts_on_one_rank_are_an_error_on_all(world) -> None:
    ranks = list(range(world.size))
    for own, others in (
        ([ranks], [ranks[::-1]]),
        ([ranks[:1], ranks[1:]], [ranks[1:], ranks[:1]]),
        ([ranks], [[rank] for rank in ranks]),
    ):
        with pytest.raises(ax.CollectiveMismatchError) as caught:
            world.partition(own if world.rank == 0 else others)
        for parts in (own, others):
            assert f"partition({', '.join(map(str, parts))})" in str(caught.value)
    with pytest.raises(ax.CollectiveMismatchError, match=r"rank 0: split\(ranks="):
        world.new_group(ranks) if world.rank == 0 else world.partition([ranks])
    assert world.default_group.all_gather_object(world.rank) == ranks


@pytest.mark.ranks(3)
def test_parts_that_are_no_partition_are_refused(world) -> None:
    ranks = list(range(world.size))
    for parts, error, message in (
        ([ranks, [0]], ValueError, "parts: expected every rank of the group in one of them, got rank 0 in 2"),
        ([], ValueError, "got rank 0 in 0"),
        ([ranks, []], ValueError, "at least one rank, got none"),
        ([[*ranks, world.size]], ValueError, f"ranks: expected a rank of the group, 0 to {world.size - 1}"),
        ([0], TypeError, "ranks: expected a list of ranks, got 0"),
        (0, TypeError, "parts: expected a list of lists of ranks, got 0"),
    ):
        refused(error, (partial(world.partition, parts), message))
    world.default_group.barrier()


def test_many_parts_are_shortened_and_still_told_apart() -> None:
    def told(world: ax.World) -> str:
        order = [*range(8), 9, 8] if world.rank == 0 else range(10)
        with pytest.raises(ax.CollectiveMismatchError) as caught:
            world.partition([[rank] for rank in order])
        return str(caught.value)

    digests = re.findall(r"partition\(\[0\], \[1\], \[2\], .*?\.\.\. #(\w+)", ax.testing.run_ranks(10, told)[3])
    assert len(set(digests)) == 2
