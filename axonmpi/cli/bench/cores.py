"""How many cores the ranks of a job run on."""

from __future__ import annotations

from ...comm import all_gather_object
from ...groups.world import World
from ...launch.cpu import usable_cores

__all__ = ["count_cores"]


def count_cores(world: World) -> int:
    """Return how many logical CPUs all ranks may run on together, each counted once; collective."""
    places = all_gather_object((world.node_rank, usable_cores()))
    return len({(node, core) for node, cores in places for core in cores})
