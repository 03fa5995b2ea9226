"""The cores that a rank may run on, and its share of them.

The share decides how ranks wait and whether they overlap. A rank that waits inside MPI polls: free on a core of its
own, but with fewer cores than ranks it takes the core from the ranks that it waits for. A thread that communicates
beside the computation helps a rank with a spare core, and hinders a rank without.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .user_variables import may_bind

_OVERLAP_FROM = 2.0
_unbound: frozenset[int] | None = None


def usable_cores(pid: int = 0) -> frozenset[int]:
    """Return the logical CPUs that a process may run on, by default this one; empty if unknown; local."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux; or the process has ended or is another user's
        return frozenset(range(os.cpu_count() or 1)) if pid == 0 else frozenset()


def count_of_node() -> int:
    """Return the number of logical CPUs that the ranks of this node share, as far as visible; local."""
    # A rank may be bound to one core; its launcher's daemon has all that the ranks share.
    return max(len(usable_cores()), len(usable_cores(os.getppid())))


def share_of_cores(own: Iterable[int], masks: Sequence[frozenset[int]]) -> int:
    """Return the number of threads for a rank: its share of each core that it may run on, at least 1; local.

    Args:
        own: This rank's logical CPUs.
        masks: The logical CPUs of all ranks of the node, this rank included.
    """
    # In units of the ranks' common multiple the sum would be exact; a small allowance does as well.
    return max(1, int(_share(own, masks) + 1e-9))


def _share(own: Iterable[int], masks: Sequence[frozenset[int]]) -> float:
    """Return the number of cores of a rank; a core of two ranks is a half for each."""
    return sum(1.0 / sum(cpu in mask for mask in masks) for cpu in own)


def core_to_keep_to(own_rank: int, masks: Sequence[frozenset[int]]) -> int | None:
    """Return the core for a rank to stay on, if ranks outnumber the cores and are not bound; else None; local.

    The system moves ranks that wait for each other and outnumber the cores, often two waiting ranks to one core and
    two computing ranks to another. Ranks bound in turn to the cores are not moved.

    Args:
        own_rank: This rank's number on its node.
        masks: The logical CPUs that each rank of the node may run on.
    """
    own = masks[own_rank]
    shared_by_all = len(own) > 1 and all(mask == own for mask in masks)
    if not shared_by_all or len(masks) <= len(own) or not may_bind():
        return None
    return sorted(own)[own_rank % len(own)]


def keep_to_core(core: int) -> None:
    """Bind this process to one core, but not its forks; local."""
    global _unbound
    if _unbound is None:
        _unbound = usable_cores()
        os.register_at_fork(after_in_child=release_core)
    os.sched_setaffinity(0, {core})


def release_core(pid: int = 0) -> None:
    """Bind a process to the cores that this process had before `keep_to_core`, if that was called; local.

    Args:
        pid: The process, by default this one.
    """
    if _unbound is not None:
        os.sched_setaffinity(pid, _unbound)


@dataclass(frozen=True)
class CoreShare:
    """Cores for each rank; the values are the same on all ranks of a job.

    Attributes:
        least: Number of cores of the rank with the fewest; a core shared by two ranks is a half.
    """

    least: float

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks outnumber the cores anywhere."""
        return self.least < 0.999

    @property
    def spare(self) -> bool:
        """Whether every rank has a core for a thread that communicates beside the computation."""
        return self.least > _OVERLAP_FROM - 0.001


def core_share(mpi: Any, comm: Any) -> CoreShare:
    """Compare the affinity masks of the ranks of each node; collective."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    masks = node.allgather(usable_cores())
    node.Free()
    return CoreShare(comm.allreduce(_share(usable_cores(), masks), mpi.MIN))
