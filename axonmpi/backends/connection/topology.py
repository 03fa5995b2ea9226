"""The nodes of a group's ranks, its lanes, and the blocks of all ranks: in arrays, without an object for each rank.

    node 0: ranks 0 1 2        lane 0: ranks 0 and 3
    node 1: ranks 3 4          lane 1: ranks 1 and 4        rank 2 has no lane; lane 0 carries its blocks

A group on one node has as many lanes as ranks, of one rank each. Ranks that share no memory are one lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Items = np.ndarray[Any, np.dtype[np.void]]
"""One item for each row of a matrix of bytes."""


class Topology:
    """The node and the local rank of each rank of a group, and the rows that each lane carries.

    A lane has one rank of each node, all with the same local rank; there are as many as the smallest node has
    ranks. Lane l carries the blocks of the ranks with local ranks l, l + lanes, ... The blocks of all lanes are the
    rows of a matrix: lane by lane, then node by node, then by local rank.

    Args:
        node: [ranks] the node of each rank; nodes are numbered in the order of their lowest ranks.
        local_rank: [ranks] its number on that node.
        rank: This rank.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        nodes: Number of nodes.
        node: This rank's node.
        local_rank: Its number there.
        leaders: [nodes] the rank with local rank 0 of each node.
        node_ranks: The ranks of this node, in order.
        widest: Number of ranks of the largest node.
        lanes: Number of lanes.
        has_lane: Whether this rank is in a lane; its number is `local_rank`.
        carrier: The lane that carries this rank's block.
        row: [ranks] the row of each rank's block.
        ranks: [rows] the rank of each row's block.
        rows_of: [lanes, nodes] number of rows that a lane carries for each node.
        first_row: [lanes] the first row of each lane.
    """

    def __init__(self, node: Integers, local_rank: Integers, rank: int) -> None:
        self._node, self._local = node.astype(np.int32), local_rank.astype(np.int32)
        self.rank, self.size = rank, len(node)
        self.nodes = int(node.max()) + 1
        self.node, self.local_rank = int(node[rank]), int(local_rank[rank])
        self.leaders = np.flatnonzero(local_rank == 0)
        self.node_ranks: tuple[int, ...] = tuple(np.flatnonzero(node == self.node).tolist())
        sizes = np.bincount(node)
        self.lanes, self.widest = int(sizes.min()), int(sizes.max())
        self.has_lane = self.local_rank < self.lanes
        self.carrier = self.local_rank % self.lanes
        lane = local_rank % self.lanes
        self.row = np.empty(len(node), np.int64)
        self.ranks = np.lexsort((local_rank, node, lane))
        self.row[self.ranks] = np.arange(len(node))
        # one count over (lane, node) pairs, since there may be thousands of nodes
        self.rows_of = np.bincount(lane * self.nodes + node, minlength=self.lanes * self.nodes)
        self.rows_of = self.rows_of.reshape(self.lanes, self.nodes)
        rows = self.rows_of.sum(axis=1)
        self.first_row = np.cumsum(rows) - rows

    @classmethod
    def apart(cls, rank: int, size: int) -> Topology:
        """Return the topology of ranks that share no memory: each is a node; local."""
        return cls(np.arange(size), np.zeros(size, np.int64), rank)

    @classmethod
    def shared(cls, mpi: Any, comm: Any, node: Any) -> Topology:
        """Ask the ranks of a group for their nodes; collective.

        Args:
            mpi: The module `mpi4py.MPI`.
            comm: The group's communicator.
            node: The communicator of the ranks of this node.
        """
        lowest = np.array([comm.rank, node.rank], np.int64)
        node.Bcast([lowest, 1, mpi.INT64_T])
        places = np.empty((comm.size, 2), np.int64)
        comm.Allgather([lowest, 2, mpi.INT64_T], [places, 2, mpi.INT64_T])
        return cls(np.unique(places[:, 0], return_inverse=True)[1].reshape(-1), places[:, 1].copy(), comm.rank)

    def find(self, rank: int) -> tuple[int, int]:
        """Return the node of a rank and its local rank there; local."""
        return int(self._node[rank]), int(self._local[rank])

    def cells(self, width: int) -> Integers:
        """Return the index of each rank's cell, [ranks], with `width` cells for each node; local."""
        return self._node * width + self._local


def split_array(total: int, parts: int) -> Integers:
    """Return the sizes of `utils.partition.split_sizes` as an array, [parts]; local."""
    sizes = np.full(parts, total // parts)
    sizes[: total % parts] += 1
    return sizes


class Blocks:
    """The blocks of all ranks, end to end; neighbours of one size are one matrix.

    Args:
        edges: The first rank of each matrix, then the number of ranks.
        sizes: Size of the rows of each matrix in bytes.
        starts: The first byte of each matrix, then the number of bytes.

    Attributes:
        longest: Size of the largest.
    """

    def __init__(self, edges: list[int], sizes: list[int], starts: list[int]) -> None:
        self._edges, self._sizes, self._starts = edges, sizes, starts
        self.longest = max(sizes)

    @classmethod
    def of(cls, sizes: Sequence[int] | Integers) -> Blocks:
        """Return blocks of [ranks] sizes in bytes; local."""
        of_all = np.asarray(sizes, np.int64)
        edges = np.flatnonzero(np.diff(of_all)) + 1
        first, lengths = np.concatenate([[0], edges]), np.diff(np.concatenate([[0], edges, [len(of_all)]]))
        ends = np.cumsum(of_all[first] * lengths)
        return cls([*first.tolist(), len(of_all)], of_all[first].tolist(), [0, *ends.tolist()])

    @classmethod
    def equal(cls, ranks: int, nbytes: int) -> Blocks:
        """Return blocks of one size; local."""
        return cls([0, ranks], [nbytes], [0, ranks * nbytes])

    @property
    def are_equal(self) -> bool:
        """Whether all have the same size."""
        return len(self._sizes) == 1

    @property
    def sizes(self) -> Integers:
        """[ranks] the size of each, as a new array."""
        return np.repeat(self._sizes, np.diff(self._edges))

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first byte of a rank's block and the byte behind it; local."""
        matrix = bisect_right(self._edges, rank) - 1
        size = self._sizes[matrix]
        start = self._starts[matrix] + (rank - self._edges[matrix]) * size
        return start, start + size

    def columns(self, data: Bytes, low: int, high: int) -> Iterator[tuple[slice, Bytes]]:
        """Yield ranks, and bytes `low` to `high` of their blocks as the rows of a matrix; local."""
        for number, size in enumerate(self._sizes):
            if low < size:
                ranks = slice(self._edges[number], self._edges[number + 1])
                rows = data[self._starts[number] : self._starts[number + 1]].reshape(-1, size)
                yield ranks, rows[:, low : min(high, size)]


def items_of(matrix: Bytes, width: int) -> Items:
    """Return the first bytes of each row as one item of the same memory, which is copied quicker; local."""
    return matrix[:, :width].view(f"V{width}")[:, 0]


def rows_in(
    topology: Topology, blocks: Blocks, data: Bytes, low: int, high: int, first: int, last: int
) -> Iterator[tuple[Integers | slice, Integers, Items]]:
    """Yield row numbers counted from `first`, block numbers, and the items that these number; local.

    Args:
        topology: The order of the rows.
        blocks: The blocks in `data`.
        data: The blocks of all ranks.
        low: First byte of each block, of those that are looked at.
        high: The byte behind the last.
        first: First row of those that are looked at.
        last: The row behind the last.
    """
    for ranks, part in blocks.columns(data, low, high):
        items = items_of(part, part.shape[1])
        if len(items) == topology.size:
            yield slice(None), topology.ranks[first:last], items
            continue
        rows = topology.row[ranks]
        some = np.flatnonzero((rows >= first) & (rows < last))
        yield rows[some] - first, some, items
