"""Where ranks are: on which node, and which number they have there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """One rank's place.

    Attributes:
        rank: Its number in the job.
        size: Number of ranks of the job.
        local_rank: Its number on its node.
        local_size: Number of ranks on its node.
        node_rank: Its node's number; nodes are ordered by their lowest rank.
        num_nodes: Number of nodes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    @classmethod
    def of(cls, nodes: Sequence[int], rank: int) -> Topology:
        """Derive the place of `rank` from a node identifier for each rank, in rank order."""
        own = nodes[rank]
        return cls(
            rank=rank,
            size=len(nodes),
            local_rank=sum(node == own for node in nodes[:rank]),
            local_size=sum(node == own for node in nodes),
            node_rank=list(dict.fromkeys(nodes)).index(own),
            num_nodes=len(set(nodes)),
        )
