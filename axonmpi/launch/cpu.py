"""How many cores a rank has to itself.

It decides how to wait and whether to overlap. A rank that waits inside MPI polls, which costs nothing on a core of
its own and takes the core from the ranks it waits for where there are fewer cores than ranks. A thread that
communicates beside the computation helps where a rank has a core to spare, and hinders where it has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import variables as environment

__all__ = ["CoreShare", "core_share"]

_OVERLAP_FROM = 2.0


@dataclass(frozen=True)
class CoreShare:
    """Cores for each rank; the values are the same on all ranks of a job.

    Attributes:
        least: Cores a rank has for itself, where it has fewest; a core shared by two ranks is a half.
    """

    least: float

    @property
    def crowded(self) -> bool:
        """Whether ranks outnumber the cores anywhere."""
        return self.least < 0.999

    @property
    def spare(self) -> bool:
        """Whether every rank has a core for a thread that communicates beside the computation."""
        return self.least > _OVERLAP_FROM - 0.001


def core_share(mpi: Any, comm: Any) -> CoreShare:
    """Compare the affinity masks of the ranks of each node; collective."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    masks = node.allgather(environment.usable_cores())
    node.Free()
    own = sum(1.0 / sum(core in mask for mask in masks) for core in environment.usable_cores())
    return CoreShare(comm.allreduce(own, mpi.MIN))
