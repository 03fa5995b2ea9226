"""`Topology`: the node and the local rank of each rank of a world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Topology:
    """Node and local rank of one rank.

    Attributes:
        rank: World rank.
        size: Number of ranks of the job.
        local_rank: Number on the node.
        local_size: Number of ranks on the node.
        node_rank: Number of the node; nodes are ordered by their lowest rank.
        num_nodes: Number of nodes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    @classmethod
    def of(cls, nodes: Sequence[int] | NDArray[np.int32], rank: int) -> Topology:
        """Return the topology of `rank` from a node identifier for each rank, in rank order; local."""
        of_all = np.asarray(nodes)
        here = of_all == of_all[rank]
        first_ranks = np.unique(of_all, return_index=True)[1]
        return cls(
            rank=rank,
            size=len(nodes),
            local_rank=int(here[:rank].sum()),
            local_size=int(here.sum()),
            node_rank=int((first_ranks < here.argmax()).sum()),
            num_nodes=len(first_ranks),
        )

    @classmethod
    def detect(cls, mpi: Any, comm: Any, node: Any) -> Topology:
        """Return this rank's topology, from a count of the nodes' lowest ranks; collective.

        Args:
            mpi: The module `mpi4py.MPI`.
            comm: Communicator of all ranks.
            node: Communicator of the ranks on this node, in the same order.
        """
        is_first = np.array([node.rank == 0], np.int32)
        num_nodes, node_rank = np.empty_like(is_first), np.zeros_like(is_first)
        comm.Allreduce(is_first, num_nodes, mpi.SUM)
        comm.Exscan(is_first, node_rank, mpi.SUM)  # leaves rank 0's number as it is
        node.Bcast(node_rank)
        return cls(comm.rank, comm.size, node.rank, node.size, int(node_rank[0]), int(num_nodes[0]))
