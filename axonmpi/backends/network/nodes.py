"""Where the ranks of a group are, and the sizes of their blocks: in arrays, without an object for each rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..shared.staging import Bytes

__all__ = ["Blocks", "Integers", "Nodes", "nodes_of", "split_array"]

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Nodes:
    """Where the ranks of a group are.

    A lane is made of the ranks with the same place on all nodes; there are as many as the smallest node has ranks.
    It carries the blocks of the ranks at places l, l + lanes, ... of each node.

    Args:
        node: [ranks] the node of each rank; nodes are numbered in the order of their lowest ranks.
        place: [ranks] its place there.
        rank: This rank.

    Attributes:
        rank: The same.
        size: How many ranks there are.
        count: How many nodes there are.
        own: This rank's node.
        place: This rank's place on it.
        leaders: [nodes] the rank with place 0 of each node.
        here: The ranks of this node, in order.
        lanes: How many lanes there are.
        row: [ranks] the rows of all lanes one below the other, by node and place: which of them a rank's block is.
        ranks: [ranks] the other way round: whose block each row is.
        rows_of: [lanes, nodes] how many rows a lane carries for each node.
        first_row: [lanes] the first of its rows.
        most: How many ranks the largest node has.
    """

    def __init__(self, node: Integers, place: Integers, rank: int) -> None:
        self._node, self._place = node.astype(np.int32), place.astype(np.int32)
        self.rank, self.size = rank, len(node)
        self.count = int(node.max()) + 1
        self.own, self.place = int(node[rank]), int(place[rank])
        self.leaders = np.flatnonzero(place == 0)
        self.here: tuple[int, ...] = tuple(np.flatnonzero(node == self.own).tolist())
        sizes = np.bincount(node)
        self.lanes = int(sizes.min())
        self.most = int(sizes.max())
        lane = place % self.lanes
        self.row = np.empty(len(node), np.int64)
        self.ranks = np.lexsort((place, node, lane))
        self.row[self.ranks] = np.arange(len(node))
        lanes = [np.bincount(node[lane == each], minlength=self.count) for each in range(self.lanes)]
        self.rows_of = np.stack(lanes)
        rows = self.rows_of.sum(axis=1)
        self.first_row = np.cumsum(rows) - rows

    def find(self, rank: int) -> tuple[int, int]:
        """Return the node of a rank and its place there."""
        return int(self._node[rank]), int(self._place[rank])

    def cell(self, width: int) -> Integers:
        """Return the index of each rank's cell, [ranks], where each node has `width` of them."""
        return self._node * width + self._place


def nodes_of(mpi: Any, comm: Any, node: Any) -> Nodes:
    """Find out where the ranks of a group are; collective.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        node: That of the ranks of this node.
    """
    lowest = np.array([comm.rank, node.rank], np.int64)
    node.Bcast([lowest, 1, mpi.INT64_T])
    places = np.empty((comm.size, 2), np.int64)
    comm.Allgather([lowest, 2, mpi.INT64_T], [places, 2, mpi.INT64_T])
    return Nodes(np.unique(places[:, 0], return_inverse=True)[1].reshape(-1), places[:, 1].copy(), comm.rank)


def split_array(total: int, parts: int) -> Integers:
    """Return what `split_sizes` does, [parts]; local."""
    sizes = np.full(parts, total // parts)
    sizes[: total % parts] += 1
    return sizes


class Blocks:
    """Blocks of all ranks, end to end; ranks that follow each other with blocks of one size are seen as one matrix.

    Args:
        sizes: [ranks] size of each block in bytes.

    Attributes:
        longest: Size of the largest.
    """

    def __init__(self, sizes: Sequence[int] | Integers) -> None:
        of_all = np.asarray(sizes, np.int64)
        edges = np.flatnonzero(np.diff(of_all)) + 1
        first, lengths = np.concatenate([[0], edges]), np.diff(np.concatenate([[0], edges, [len(of_all)]]))
        ends = np.cumsum(of_all[first] * lengths)
        self._keep([*first.tolist(), len(of_all)], of_all[first].tolist(), [0, *ends.tolist()])

    @classmethod
    def equal(cls, ranks: int, nbytes: int) -> Blocks:
        """Make blocks of one size; local."""
        made = cls.__new__(cls)
        made._keep([0, ranks], [nbytes], [0, ranks * nbytes])
        return made

    def _keep(self, edges: list[int], sizes: list[int], starts: list[int]) -> None:
        """Keep where runs of equal blocks begin and the last one ends, in ranks and in bytes, and their sizes."""
        self._edges, self._sizes, self._starts = edges, sizes, starts
        self.longest = max(sizes)

    @property
    def are_equal(self) -> bool:
        """Whether all have the same size."""
        return len(self._sizes) == 1

    @property
    def sizes(self) -> Integers:
        """[ranks] the size of each, as a new array."""
        return np.repeat(self._sizes, np.diff(self._edges))

    @property
    def edges(self) -> Integers:
        """[ranks + 1] bytes before each block, and in all, as a new array."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's block begins and ends."""
        run = bisect_right(self._edges, rank) - 1
        size = self._sizes[run]
        start = self._starts[run] + (rank - self._edges[run]) * size
        return start, start + size

    def columns(self, data: Bytes, low: int, high: int) -> Iterator[tuple[slice, Bytes]]:
        """Give bytes `low` to `high` of each block: ranks, and their part of the data as a row a rank."""
        for number, size in enumerate(self._sizes):
            if low < size:
                ranks = slice(self._edges[number], self._edges[number + 1])
                rows = data[self._starts[number] : self._starts[number + 1]].reshape(-1, size)
                yield ranks, rows[:, low : min(high, size)]
