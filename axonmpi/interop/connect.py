"""The backend that carries one of torch's groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends import Backend, LocalBackend, MpiBackend
from ..errors import LaunchError
from ..launch.start import start_mpi, start_world
from ..observe import watch
from .rendezvous import check_place


def backend_of_all(rank: int, size: int, timeout: float) -> Backend:
    """Start MPI and connect all ranks of the job; collective.

    Args:
        rank: torch's number for this rank.
        size: How many ranks torch counts.
        timeout: Seconds that an operation may take.

    Raises:
        LaunchError: The processes were not started as one MPI job, or torch and MPI number them differently.
    """
    started = start_world()
    check_place(started, rank, size)
    watch(None)  # each group of torch has a time-out of its own
    return LocalBackend() if started.comm is None else MpiBackend(started.comm, timeout=timeout)


def backend_of_some(ranks: Sequence[int], own: int, timeout: float) -> Backend:
    """Connect some ranks of the job; collective over these alone.

    Args:
        ranks: torch's numbers of the members.
        own: Where this rank is among them.
        timeout: Seconds that an operation may take.

    Raises:
        LaunchError: torch and MPI number this rank differently.
    """
    if len(ranks) == 1:
        return LocalBackend()
    number = start_mpi().COMM_WORLD.rank
    if ranks[own] != number:
        raise LaunchError(f"torch.distributed calls this rank {ranks[own]}, MPI calls it {number}: they must agree")
    return MpiBackend.of_members(ranks, timeout=timeout)
