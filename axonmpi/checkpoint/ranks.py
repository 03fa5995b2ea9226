"""The ranks that write and read a checkpoint together, and communicators for that alone.

A background thread writes while the program trains, so its messages must not meet those of the program. One save
is under way at a time; it is waited for by the next, and when the world is closed.
"""

from __future__ import annotations

import weakref

from ..backends import parts_by_node
from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..groups.world import partition_group
from .background import Background
from .global_plan import GlobalPlan


class CheckpointRanks:
    """Two groups that this rank is in; for one thread at a time.

    Args:
        everyone: All ranks.
        node: Those of this node.
        nodes: Number of nodes.

    Attributes:
        all: All ranks.
        node: Those of this node.
        nodes: Number of nodes.
        plan_of_all: What the ranks agreed on last.
    """

    plan_of_all: GlobalPlan | None = None

    def __init__(self, everyone: ProcessGroup, node: ProcessGroup, nodes: int) -> None:
        self.all = everyone
        self.node = node
        self.nodes = nodes
        self._under_way: Background | None = None
        everyone.before_close(self._end)

    def begin(self, work: Background) -> None:
        """Take note of a save in the background; local."""
        self._under_way = work

    def settle(self) -> None:
        """Wait for the save in the background, if there is one; collective.

        Raises:
            CheckpointError: It has failed, and a rank was not told; on all ranks.
        """
        work, self._under_way = self._under_way, None
        if work is not None:
            told = self.all.all_gather_object(work.untold())
            if text := next(filter(None, told), ""):
                raise CheckpointError(text)

    def _end(self) -> None:
        if self._under_way is not None:
            self._under_way.settle()


_made: weakref.WeakKeyDictionary[ProcessGroup, CheckpointRanks] = weakref.WeakKeyDictionary()


def ranks_of(group: ProcessGroup) -> CheckpointRanks:
    """Return the groups of a group's checkpoints, which are made once; collective the first time.

    Args:
        group: The ranks that have shards of the model.
    """
    found = _made.get(group)
    if found is not None and found.all.is_open:
        return found
    control = ProcessGroup(group.backend.control, group.members)
    nodes = parts_by_node(control.backend)
    node = partition_group(control, nodes)
    everyone = partition_group(control, [range(control.size)])  # closed first: it is newer
    for made in (node, everyone):
        made.backend.timeout = None  # a disk may take longer than ranks may
    ranks = _made[group] = CheckpointRanks(everyone, node, len(nodes))
    return ranks
