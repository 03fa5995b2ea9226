"""The creation of groups over MPI, for `torch.distributed.init_process_group("axonmpi")` and `new_group`.

    import torch.distributed as dist

    dist.init_process_group("axonmpi")      # under mpirun or srun: no address, no port, no variable

torch passes the group's ranks, its own number for this rank, and a time-out. The first group starts MPI, and
torch's number of this rank must be MPI's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends import Backend, LocalBackend, MpiBackend
from ..errors import LaunchError
from ..launch.start import communicator_of_world, start_mpi, start_world
from ..observe import watch
from .process_group import TorchProcessGroup
from .rendezvous import check_rank


def create_group(options: Any, backend_options: Any) -> TorchProcessGroup:
    """Make torch's default group, or a group of some of its ranks; collective over the group's ranks alone.

    Args:
        options: torch's description of the group.
        backend_options: A program's `pg_options`, of which this backend has none.

    Raises:
        LaunchError: The processes were not started as one MPI job, or torch and MPI number them differently.
        TypeError: There are `pg_options`.
    """
    if backend_options is not None:
        raise TypeError(
            f"pg_options: expected None, the axonmpi backend has none; got {type(backend_options).__name__}"
        )
    ranks = list(options.global_ranks_in_group)
    timeout = options.timeout.total_seconds()
    if ranks:
        backend = _connect_members(ranks, options.group_rank, timeout)
    else:
        backend = _connect_all(options.group_rank, options.group_size, timeout)
    return TorchProcessGroup(backend, options.store, options.timeout)


def _connect_all(rank: int, size: int, timeout: float) -> Backend:
    """Start MPI and connect all ranks of the job; collective.

    Args:
        rank: torch's number for this rank.
        size: torch's number of ranks.
        timeout: Limit of an operation, in seconds.

    Raises:
        LaunchError: The processes were not started as one MPI job, or torch and MPI number them differently.
    """
    started = start_world()
    check_rank(started, rank, size)
    watch(None)  # each of torch's groups has its own time-out
    return LocalBackend() if started.comm is None else MpiBackend(started.comm, timeout=timeout)


def _connect_members(ranks: Sequence[int], own: int, timeout: float) -> Backend:
    """Connect some ranks of the job; collective over these alone.

    Args:
        ranks: torch's numbers of the members.
        own: Index of this rank among them.
        timeout: Limit of an operation, in seconds.

    Raises:
        LaunchError: torch and MPI number this rank differently.
    """
    if len(ranks) == 1:
        return LocalBackend()
    number = communicator_of_world(start_mpi()).rank
    if ranks[own] != number:
        raise LaunchError(f"torch.distributed calls this rank {ranks[own]}, MPI calls it {number}: they must agree")
    return MpiBackend.of_members(ranks, timeout=timeout)
