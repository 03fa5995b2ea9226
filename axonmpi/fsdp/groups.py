"""Groups of ranks that shard the parameters, and of ranks with the same shard.

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
    """The two groups of this rank, and its device.

    Attributes:
        shard: The ranks that shard one replica of the parameters.
        replicas: The ranks with the same shard; None if there are no others.
        device: The device that the model computes on.
    """

    shard: ProcessGroup
    replicas: ProcessGroup | None
    device: torch.device

    @property
    def memory(self) -> Backend:
        """The backend of tensors on the model's device, and of memory there; on a GPU that is this rank's own."""
        return self.shard.backend.on(self.device)

    @property
    def on_one_node(self) -> bool:
        """True if all ranks that shard the parameters share memory."""
        return len(self.memory.node_ranks) == self.shard.size

    @property
    def gathers_beside_computation(self) -> bool:
        """True if gathers go over the network, and progress on a spare core or on a GPU."""
        return self.memory.gathers_ahead and not self.on_one_node

    @property
    def both(self) -> list[ProcessGroup]:
        """The groups of more than one rank. A broadcast from rank 0 of each, in turn, reaches every rank."""
        return [group for group in (self.shard, self.replicas) if group is not None and group.size > 1]

    @property
    def size(self) -> int:
        """Number of ranks that train the model."""
        return self.shard.size * (self.replicas.size if self.replicas is not None else 1)

    @property
    def in_first_replica(self) -> bool:
        """True if this rank has a shard of the first replica."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def is_first(self) -> bool:
        """True on the first of all ranks."""
        return self.shard.rank == 0 and self.in_first_replica

    def from_first(self, value: Any) -> Any:
        """Return the object of the first of all ranks; collective."""
        for group in reversed(self.both):
            value = group.broadcast_object(value)
        return value

    def replicas_in(self, group: ProcessGroup | None) -> int:
        """Return the number of ranks in a group that have the same shard; local.

        Args:
            group: A group with all ranks that shard the parameters; None: the group of these.

        Raises:
            ValueError: Some of these ranks are not in the group.
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
    """Check and return the group of all ranks, or the pair of groups for HYBRID_SHARD; local.

    Raises:
        TypeError: The argument is no group, or a pair with another strategy.
        ValueError: This rank is not in a group.
    """
    if isinstance(groups, tuple) and (strategy is not ShardingStrategy.HYBRID_SHARD or len(groups) != 2):
        raise TypeError("process_group: a pair of groups is for ShardingStrategy.HYBRID_SHARD alone")
    given = groups if isinstance(groups, tuple) else (groups,)
    return tuple(group_of_this_rank(group) for group in given)


def sharding_groups(
    given: tuple[ProcessGroup, ...], strategy: ShardingStrategy, device: torch.device
) -> ShardingGroups:
    """Derive the groups from the strategy; collective for HYBRID_SHARD.

    Args:
        given: All ranks; or for HYBRID_SHARD a pair: the ranks that shard the parameters, and the replicas.
        strategy: The strategy, the same on all ranks.
        device: The device that the model computes on, of the same type on all ranks.

    Raises:
        ValueError: Nodes have different numbers of ranks, or the ranks cannot have memory on this device.
    """
    own = given[0].backend.on(device).place
    if own != device:
        raise ValueError(
            f"module: expected parameters on {own}, where ranks of this group have memory, got them on {device}; "
            "start with init_process_group('mpi+nccl') for GPUs, and move the model to this rank's"
        )
    group = given[0]
    if len(given) > 1:
        return ShardingGroups(group, given[1] if given[1].size > 1 else None, device)
    if strategy is ShardingStrategy.NO_SHARD:
        alone = ProcessGroup(LocalBackend(memory=device))
        return ShardingGroups(alone, group if group.size > 1 else None, device)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        return _hybrid(group, device)
    return ShardingGroups(group, None, device)


def _hybrid(group: ProcessGroup, device: torch.device) -> ShardingGroups:
    nodes = parts_by_node(group.backend)
    if len(nodes) == 1:
        return ShardingGroups(group, None, device)
    sizes = [len(nodes.array(number)) for number in range(len(nodes))]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"HYBRID_SHARD needs as many ranks on each node, got {listed(sizes)}: start the job with the same "
            "number on each (mpirun --map-by ppr:N:node, srun --ntasks-per-node), or give a pair of groups"
        )
    across = nodes.ranks.reshape(len(nodes), -1).T
    return ShardingGroups(partition_group(group, nodes), partition_group(group, across), device)
