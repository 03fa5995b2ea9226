"""Which ranks share the parameters out, and which hold replicas.

    HYBRID_SHARD on two nodes of two ranks      node 0: ranks 0 1     shard groups 0 1 | 2 3
                                                node 1: ranks 2 3     replica groups 0 2 | 1 3

In a step only gradients cross the network, between replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..groups.world import ProcessGroup, group_of_this_rank
from .options import ShardingStrategy

__all__ = ["ShardingGroups", "checked_groups", "sharding_groups"]


@dataclass(frozen=True)
class ShardingGroups:
    """Two groups that this rank is in.

    Attributes:
        shard: The ranks that share one replica of the parameters out.
        replicas: The ranks that hold the same shard; None if there are no others.
    """

    shard: ProcessGroup
    replicas: ProcessGroup | None

    @property
    def both(self) -> list[ProcessGroup]:
        """The groups, without those of one rank; what goes from rank 0 of each to the others reaches all ranks."""
        return [group for group in (self.shard, self.replicas) if group is not None and group.size > 1]

    @property
    def size(self) -> int:
        """Number of ranks in all."""
        return self.shard.size * (self.replicas.size if self.replicas is not None else 1)


def checked_groups(groups: object, strategy: ShardingStrategy) -> tuple[ProcessGroup, ...]:
    """Check what a user gave as groups: one of all ranks, or a pair for HYBRID_SHARD; local.

    Returns:
        The group or the two groups.

    Raises:
        TypeError: It is no group, or a pair with another strategy.
        ValueError: This rank is outside.
    """
    if isinstance(groups, tuple) and (strategy is not ShardingStrategy.HYBRID_SHARD or len(groups) != 2):
        raise TypeError("process_group: a pair of groups is for ShardingStrategy.HYBRID_SHARD alone")
    given = groups if isinstance(groups, tuple) else (groups,)
    return tuple(group_of_this_rank(group) for group in given)


def sharding_groups(given: tuple[ProcessGroup, ...], strategy: ShardingStrategy) -> ShardingGroups:
    """Derive the groups from the strategy; collective for HYBRID_SHARD.

    Args:
        given: All ranks; for HYBRID_SHARD also a pair of what shares out and what holds replicas.
        strategy: What is divided, the same on all ranks.

    Raises:
        ValueError: Nodes have different numbers of ranks.
    """
    groups = given[0]
    if len(given) > 1:
        return ShardingGroups(groups, given[1] if given[1].size > 1 else None)
    if strategy is ShardingStrategy.NO_SHARD:
        return ShardingGroups(ProcessGroup.mock(), groups if groups.size > 1 else None)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        return _hybrid(groups)
    return ShardingGroups(groups, None)


def _hybrid(group: ProcessGroup) -> ShardingGroups:
    nodes = sorted(set(group.all_gather_object(group.backend.node_ranks)))
    if len(nodes) == 1:
        return ShardingGroups(group, None)
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"HYBRID_SHARD needs as many ranks on each node, got {sizes}: start the job with the same number "
            "on each (mpirun --map-by ppr:N:node, srun --ntasks-per-node), or give a pair of groups"
        )
    own = next(node for node in nodes if group.rank in node)
    shard = replicas = None
    for node in nodes:
        made = _split(group, node)
        shard = made if node is own else shard
    for place, ranks in enumerate(zip(*nodes, strict=True)):
        made = _split(group, ranks)
        replicas = made if place == own.index(group.rank) else replicas
    assert shard is not None
    return ShardingGroups(shard, replicas)


def _split(group: ProcessGroup, ranks: tuple[int, ...]) -> ProcessGroup | None:
    backend = group.backend.split(ranks)
    return None if backend is None else ProcessGroup(backend, [group.ranks[rank] for rank in ranks])
