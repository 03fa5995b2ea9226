"""The ranks that write and read a checkpoint together, with communicators of their own.

A background thread writes while the program trains, so its messages must not mix with the program's. There is one
save at a time; the next save waits for it, and so does closing the world.
"""

from __future__ import annotations

import weakref
from pathlib import Path

from ..backends import parts_by_node
from ..groups.process_group import ProcessGroup
from ..groups.world import partition_group
from .background import Background
from .global_plan import GlobalPlan
from .rank_errors import RankErrors


class CheckpointRanks:
    """All ranks and the ranks of this node, as groups; for one thread at a time.

    Args:
        everyone: All ranks.
        node: The ranks of this node.
        nodes: Number of nodes.

    Attributes:
        all: All ranks.
        node: The ranks of this node.
        nodes: Number of nodes.
        plan: Of the last save.
    """

    plan: GlobalPlan | None = None

    def __init__(self, everyone: ProcessGroup, node: ProcessGroup, nodes: int) -> None:
        self.all = everyone
        self.node = node
        self.nodes = nodes
        self._under_way: Background | None = None
        everyone.before_close(self._end)

    def begin(self, work: Background) -> None:
        """Set the save in the background; local."""
        self._under_way = work

    def settle(self) -> None:
        """Wait for the save in the background, if there is one; collective.

        Raises:
            CheckpointError: It has failed, and a rank has not raised its error yet; on all ranks.
        """
        work, self._under_way = self._under_way, None
        if work is not None:
            errors = RankErrors(Path())
            errors.texts = [text for text in [work.unraised()] if text]
            errors.raise_on_all(self.all, None)

    def _end(self) -> None:
        if self._under_way is not None:
            self._under_way.settle()


_made: weakref.WeakKeyDictionary[ProcessGroup, CheckpointRanks] = weakref.WeakKeyDictionary()


def ranks_of(group: ProcessGroup) -> CheckpointRanks:
    """Return the communicators for checkpoints of a group; collective the first time.

    Args:
        group: The ranks with shards of the model.
    """
    found = _made.get(group)
    if found is not None and found.all.is_open:
        return found
    control = ProcessGroup(group.backend.control, group.members)
    nodes = parts_by_node(control.backend)
    node = partition_group(control, nodes)
    everyone = partition_group(control, [range(control.size)])  # closed first: it is newer
    for each in (node, everyone):
        each.backend.timeout = None  # a disk may take longer than the program's collectives
    ranks = _made[group] = CheckpointRanks(everyone, node, len(nodes))
    return ranks
