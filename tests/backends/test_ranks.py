"""Ordered sets of ranks as arrays, sizes that are checked once, and how messages show many numbers."""

import re

import numpy as np
import pytest
import torch
from helpers.compare import refused

import axonmpi as ax
from axonmpi.backends.checks import check_sizes
from axonmpi.backends.ranks import check_parts, check_ranks
from axonmpi.launch.topology import Topology
from axonmpi.utils.text import listed, name_ranks


@pytest.mark.parametrize("ranks", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), iter([3, 1, 2]), range(3, 0, -1)])
def test_ranks_come_as_any_integers_in_order(ranks) -> None:
    expected = [3, 2, 1] if isinstance(ranks, range) else [3, 1, 2]
    chosen = check_ranks(ranks, 4)
    assert (chosen.dtype, chosen.tolist()) == (np.int32, expected)


@pytest.mark.parametrize(
    ("check", "numbers", "error", "message"),
    [
        (check_ranks, [0, True], TypeError, "expected a rank of the group as an int, got True"),
        (check_ranks, [0, 1.0], TypeError, "as an int, got 1.0"),
        (check_ranks, np.array([0.0]), TypeError, "as an int, got 0.0"),
        (check_ranks, [[0]], TypeError, r"as an int, got \[0\]"),
        (check_ranks, np.array([[0]]), TypeError, r"as an int, got \[0\]"),
        (check_ranks, [0, -1], ValueError, "0 to 3, got -1"),
        (check_ranks, [0, 4], ValueError, "0 to 3, got 4"),
        (check_ranks, [2**70], ValueError, f"0 to 3, got {2**70}"),
        (check_ranks, [0, 1, 0], ValueError, r"different ranks, got \[0, 1, 0\]"),
        (check_ranks, [], ValueError, "at least one rank, got none"),
        (check_ranks, 7, TypeError, "expected a list of ranks, got 7"),
        (check_sizes, [1, True, 1, 1], TypeError, "expected integers"),
        (check_sizes, [1, 1.0, 1, 1], TypeError, "expected integers"),
        (check_sizes, [1, -1, 1, 1], ValueError, "sizes of at least 0"),
        (check_sizes, [1, 1, 1], ValueError, "expected 4 sizes, one for each rank of the group, got 3"),
        (check_sizes, "abcd", TypeError, "a sequence of integers"),
    ],
)
def test_bad_ranks_and_sizes_are_refused(check, numbers, error, message) -> None:
    with pytest.raises(error, match=message):
        check(numbers, 4)


@pytest.mark.parametrize("parts", [[[2, 0], [3], [1]], [(2, 0), np.array([3]), range(1, 2)]])
def test_parts_know_where_each_rank_is(parts) -> None:
    chosen = check_parts(parts, 4)
    assert list(chosen) == [tuple(chosen.array(number)) for number in range(3)] == [(2, 0), (3,), (1,)]
    assert [chosen.find(rank) for rank in range(5)] == [(0, 1), (2, 0), (0, 0), (1, 0), None]
    assert check_parts(chosen, 4) is chosen


def test_parts_of_a_grid_are_its_rows() -> None:
    grid = np.arange(6).reshape(3, 2).T
    assert check_parts(grid, 6) == check_parts(grid.tolist(), 6)
    refused(
        ValueError,
        (lambda: check_parts(grid + 1, 6), "0 to 5, got 6"),
        (lambda: check_parts(grid[:1], 6), "got rank 1 in 0"),
        (lambda: check_parts(grid[:, :0], 6), "got none"),
        (lambda: check_parts([[0], [1, 1]], 2), r"ranks: expected different ranks, got \[1, 1\]"),
        (lambda: check_parts([[0, 1], [1]], 2), "in one of them, got rank 1 in 2"),
    )


def test_sizes_are_looked_through_once() -> None:
    sizes = check_sizes([2, 3], 2)
    assert check_sizes(sizes, 2) is sizes is check_sizes((2, 3), 2)
    assert (sizes, sizes.total, hash(sizes)) == ((2, 3), 5, hash((2, 3)))
    assert [part.numel() for part in torch.zeros(5).split(sizes)] == [2, 3]


def test_a_group_keeps_an_array() -> None:
    group = ax.ProcessGroup(None, np.arange(2, 20_000, 2), own_rank=1)
    contained = [rank for rank in (2, 3, 19_998, 20_000) if group.contains(rank)]
    assert (group.ranks, contained) == (tuple(range(2, 20_000, 2)), [2, 19_998])
    assert repr(group) == (
        "ProcessGroup(ranks=[2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, ..., 19998], rank=-1)"
    )
    refused(ValueError, (group.barrier, re.escape(", 28, ..., 19998]; check group.contains(rank)")))


def test_many_ranks_are_named_in_ranges() -> None:
    names = [name_ranks(ranks) for ranks in ([3], [3, 1], [*range(512), 520])]
    assert names == ["rank 3", "ranks 1, 3", "ranks 0-511, 520"]
    assert len(name_ranks(range(0, 16_384, 2))) < 120
    assert listed(range(16)) == str(list(range(16)))


@pytest.mark.parametrize("nodes", [[0, 0, 0], [5, 3, 5, 3, 9], [1, 0, 0, 1], ["b", "a", "b"]])
def test_places_on_nodes_are_counted(nodes) -> None:
    order = list(dict.fromkeys(nodes))
    for rank, node in enumerate(nodes):
        own = Topology.of(nodes, rank)
        assert (own.rank, own.size, own.num_nodes, own.node_rank) == (
            rank,
            len(nodes),
            len(order),
            order.index(node),
        )
        assert (own.local_rank, own.local_size) == (nodes[:rank].count(node), nodes.count(node))
