"""`torch.distributed.init_process_group("axonmpi")`: what is called when a program asks for a group over MPI.

    import torch.distributed as dist

    dist.init_process_group("axonmpi")      # under mpirun or srun: no address, no port, no variable

torch gives the group's ranks, its own number for this rank, and a time-out. MPI is started here, and what torch
thinks this rank is must be what MPI says.
"""

from __future__ import annotations

from typing import Any

from .connect import backend_of_all, backend_of_some
from .process_group import TorchProcessGroup


def create_group(options: Any, backend_options: Any) -> TorchProcessGroup:
    """Make torch's default group, or one of some of its ranks; collective over these alone.

    Args:
        options: torch's description of the group.
        backend_options: What a program has given as `pg_options`: there are none for this backend.

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
        backend = backend_of_some(ranks, options.group_rank, timeout)
    else:
        backend = backend_of_all(options.group_rank, options.group_size, timeout)
    return TorchProcessGroup(backend, ranks or range(backend.size), options.store, options.timeout)
