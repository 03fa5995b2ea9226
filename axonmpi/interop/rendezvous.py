"""The rendezvous of `torch.distributed` over MPI, which has each rank's number and needs no address.

Groups over MPI need no store. Programs use the store for other purposes, so rank 0 serves torch's own, at a port
that the system chooses. Its address goes to all ranks by MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch import distributed
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store

from ..errors import LaunchError
from ..launch.start import Started, start_world
from .environment import host_of_first

dist: Any = distributed
"""`torch.distributed` with its stores, which are public, yet not among the names that torch exports."""


def meet(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield a store, this rank's number and the number of ranks, as torch's own handlers do; collective.

    Args:
        url: "env://" or "mpi://", with the program's own numbers, if any: "?rank=0&world_size=2".
        timeout: Of the store's operations.

    Raises:
        LaunchError: The processes were not started as one MPI job, or the program's numbers are not MPI's.
    """
    started = start_world()
    query = dict(parse_qsl(urlsplit(url).query))
    check_rank(started, int(query.get("rank", -1)), int(query.get("world_size", -1)))
    yield _open_store(started, timeout), started.topology.rank, started.topology.size


def check_rank(started: Started, rank: int, size: int) -> None:
    """Check the numbers that a program passes, -1 for none, against MPI's; local.

    Raises:
        LaunchError: They differ from MPI's.
    """
    own = (started.topology.rank, started.topology.size)
    if rank in (-1, own[0]) and size in (-1, own[1]):
        return
    passed = [f"{name}={value}" for name, value in (("rank", rank), ("world_size", size)) if value != -1]
    raise LaunchError(
        f"init_process_group({', '.join(passed)}): by MPI this is rank {own[0]} of {own[1]}. Leave both out, MPI "
        f"knows them; or start as many ranks: mpirun -n {max(size, rank + 1)} python SCRIPT"
    )


def _open_store(started: Started, timeout: timedelta) -> Any:
    comm = started.comm
    if comm is None or comm.size == 1:
        return dist.HashStore()
    host = host_of_first(started)
    server = (
        dist.TCPStore(host, 0, wait_for_workers=False, is_master=True, timeout=timeout) if not comm.rank else None
    )
    port = comm.bcast(None if server is None else server.port)
    return server or dist.TCPStore(host, port, is_master=False, timeout=timeout)
