"""Where ranks and their blocks are between nodes, against plain loops over the ranks."""

import numpy as np
import pytest

from axonmpi.backends.connection.topology import Blocks, Topology, split_array
from axonmpi.utils.partition import split_sizes

PLACEMENTS = ([0, 0, 1, 1], [0, 1, 0, 1, 0], [0, 1, 2], [0, 1, 1, 1, 2, 2], [0] * 5 + [1] * 2 + [0, 2, 2])


@pytest.mark.parametrize("node", PLACEMENTS, ids=str)
def test_lanes_carry_each_block_once(node) -> None:
    local = [node[:rank].count(each) for rank, each in enumerate(node)]
    lanes = min(map(node.count, node))
    for rank in range(len(node)):
        topology = Topology(np.array(node), np.array(local), rank)
        assert (topology.node, topology.local_rank, topology.nodes, topology.lanes) == (
            node[rank],
            local[rank],
            max(node) + 1,
            lanes,
        )
        assert topology.node_ranks == tuple(other for other, each in enumerate(node) if each == node[rank])
        assert topology.leaders.tolist() == [node.index(each) for each in range(topology.nodes)]
        rows = [
            other
            for lane in range(lanes)
            for each in range(topology.nodes)
            for other in range(len(node))
            if node[other] == each and local[other] % lanes == lane
        ]
        assert (topology.ranks.tolist(), [rows[row] for row in topology.row]) == (rows, list(range(len(node))))
        for lane in range(lanes):
            first = int(topology.first_row[lane])
            carried = rows[first : first + int(topology.rows_of[lane].sum())]
            assert all(local[other] % lanes == lane for other in carried)
            assert [node[other] for other in carried] == np.repeat(
                range(topology.nodes), topology.rows_of[lane]
            ).tolist()


@pytest.mark.parametrize("sizes", [[3, 3, 3], [4, 4, 3, 3], [0, 5, 5, 0], [1, 2, 3], [0, 0]], ids=str)
def test_columns_of_blocks_are_those_of_each_rank(sizes) -> None:
    data = np.arange(sum(sizes), dtype=np.uint8)
    blocks = Blocks.of(sizes)
    are_equal = len(set(sizes)) == 1
    assert (blocks.longest, blocks.sizes.tolist(), blocks.are_equal) == (max(sizes), sizes, are_equal)
    for low in range(0, blocks.longest, 2):
        found = [[] for _ in sizes]
        for ranks, part in blocks.columns(data, low, low + 2):
            for rank, row in zip(range(len(sizes))[ranks], part, strict=True):
                found[rank] = row.tolist()
        assert found == [data[slice(*blocks.bounds(rank))][low : low + 2].tolist() for rank in range(len(sizes))]
    equal = Blocks.equal(len(sizes), 3)
    assert [equal.bounds(rank) for rank in range(len(sizes))] == [
        (3 * rank, 3 * rank + 3) for rank in range(len(sizes))
    ]
    assert split_array(sum(sizes), len(sizes)).tolist() == list(split_sizes(sum(sizes), len(sizes)))
