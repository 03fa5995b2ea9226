"""Which ranks share the parameters out, and which hold replicas.

    HYBRID_SHARD on two nodes of two ranks      node 0: ranks 0 1     shard groups 0 1 | 2 3
                                                node 1: ranks 2 3     replica groups 0 2 | 1 3

In a step only gradients cross the network, between replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..backends import Backend, LocalBackend, parts_by_node
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group, group_of_this_rank, partition_group
from ..utils.text import listed
from .options import ShardingStrategy


@dataclass(frozen=True)
class ShardingGroups:
    """Two groups that this rank is in, and where it computes.

    Attributes:
        shard: The ranks that share one replica of the parameters out.
        replicas: The ranks that hold the same shard; None if there are no others.
        place: The device that the model computes on.
    """

    shard: ProcessGroup
    replicas: ProcessGroup | None
    place: torch.device

    @property
    def memory(self) -> Backend:
        """What carries the parameters and has memory where the model computes: on a GPU this rank's own."""
        return self.shard.backend.on(self.place)

    @property
    def on_one_node(self) -> bool:
        """Whether all that share the parameters out have memory in common."""
        return len(self.memory.node_ranks) == self.shard.size

    @property
    def gathers_beside_computation(self) -> bool:
        """Whether what ranks gather comes over the network, with a core to spare meanwhile, or by a GPU."""
        return self.memory.gathers_ahead and not self.on_one_node

    @property
    def both(self) -> list[ProcessGroup]:
        """The groups, without those of one rank; what goes from rank 0 of each to the others reaches all ranks."""
        return [group for group in (self.shard, self.replicas) if group is not None and group.size > 1]

    @property
    def size(self) -> int:
        """Number of ranks in all."""
        return self.shard.size * (self.replicas.size if self.replicas is not None else 1)

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank holds a part of the first replica."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks."""
        return self.shard.rank == 0 and self.in_first_replica

    def from_first(self, value: Any) -> Any:
        """Return the object that the first of all ranks has; collective."""
        for group in reversed(self.both):
            value = group.broadcast_object(value)
        return value

    def replicas_in(self, group: ProcessGroup | None) -> int:
        """Return how many ranks of a group hold the same shard; local.

        Args:
            group: One with all ranks that share the parameters out; None: these.

        Raises:
            ValueError: Some of them are not in the group.
        """
        if group is None:
            return 1
        chosen_group(group)
        if self.shard.size > 1 and not np.isin(self.shard.members, group.members).all():
            raise ValueError(
                f"group: expected one with all ranks that share the parameters out, {list(self.shard.ranks)}, got "
                f"{list(group.ranks)}; join the axes, as in mesh.group('dp', 'tp')"
            )
        return 1 if self.replicas is None else max(1, int(np.isin(self.replicas.members, group.members).sum()))


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


def sharding_groups(
    given: tuple[ProcessGroup, ...], strategy: ShardingStrategy, place: torch.device
) -> ShardingGroups:
    """Derive the groups from the strategy; collective for HYBRID_SHARD.

    Args:
        given: All ranks; for HYBRID_SHARD also a pair: the ranks that share the parameters out, and the replicas.
        strategy: What is divided, the same on all ranks.
        place: The device that the model computes on, of the same type on all ranks.

    Raises:
        ValueError: Nodes have different numbers of ranks, or the ranks cannot have memory on this device.
    """
    own = given[0].backend.on(place).place
    if own != place:
        raise ValueError(
            f"module: expected parameters on {own}, where ranks of this group have memory, got them on {place}; "
            "start with init_process_group('mpi+nccl') for GPUs, and move the model to this rank's"
        )
    group = given[0]
    if len(given) > 1:
        return ShardingGroups(group, given[1] if given[1].size > 1 else None, place)
    if strategy is ShardingStrategy.NO_SHARD:
        alone = ProcessGroup(LocalBackend(memory=place))
        return ShardingGroups(alone, group if group.size > 1 else None, place)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        return _hybrid(group, place)
    return ShardingGroups(group, None, place)


def _hybrid(group: ProcessGroup, place: torch.device) -> ShardingGroups:
    nodes = parts_by_node(group.backend)
    if len(nodes) == 1:
        return ShardingGroups(group, None, place)
    sizes = [len(nodes.array(number)) for number in range(len(nodes))]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"HYBRID_SHARD needs as many ranks on each node, got {listed(sizes)}: start the job with the same "
            "number on each (mpirun --map-by ppr:N:node, srun --ntasks-per-node), or give a pair of groups"
        )
    across = nodes.ranks.reshape(len(nodes), -1).T
    return ShardingGroups(partition_group(group, nodes), partition_group(group, across), place)
