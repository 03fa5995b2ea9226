"""The variables that torchrun sets, for programs that insist on them.

`torch.distributed.init_process_group("axonmpi")` needs none of them, but a program does that reads `LOCAL_RANK`, or
that makes a group of gloo.
"""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from ..launch.launcher_variables import set_variables
from ..launch.start import Started, start_world

CPU_BACKENDS = ("axonmpi", "gloo")
_LOOPBACK = "127.0.0.1"


def launch_env(backend: str | None = None) -> dict[str, str]:
    """Set the variables that torchrun sets, in this process, and return them; collective over all ranks of the job.

    They are `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK` (the node's number),
    `GROUP_WORLD_SIZE` (the number of nodes), `MASTER_ADDR`, `MASTER_PORT`, a port on rank 0's node that was free a
    moment ago, `TORCHELASTIC_RUN_ID`, by which frameworks recognise torchrun, and those of its roles and restarts.

    Args:
        backend: Backend of `torch.distributed` on the CPU where a program names none, as in `init_process_group()`
            and `init_device_mesh("cpu", ...)`: `"axonmpi"` or `"gloo"`. None changes nothing: gloo, unless chosen.

    Raises:
        LaunchError: The processes were not started as one MPI job.
        ValueError: `backend` is another name.
    """
    if backend not in (None, *CPU_BACKENDS):
        raise ValueError(f"backend: expected {' or '.join(map(repr, CPU_BACKENDS))}, or None, got {backend!r}")
    started = start_world()
    topology = started.topology
    port = _free_port() if topology.rank == 0 else None
    host = host_of_first(started)
    if started.comm is not None:
        port = started.comm.bcast(port)
    variables = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
        "GROUP_RANK": str(topology.node_rank),
        "GROUP_WORLD_SIZE": str(topology.num_nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"axonmpi-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(topology.rank),
        "ROLE_WORLD_SIZE": str(topology.size),
    }
    set_variables(variables)
    if backend is not None:
        distributed: Any = import_module("torch.distributed")
        distributed.Backend.default_device_backend_map["cpu"] = backend
    return variables


def host_of_first(started: Started) -> str:
    """Return the host name by which this rank reaches rank 0's node; collective over all ranks of the job."""
    name = _LOOPBACK
    if started.topology.num_nodes > 1:
        assert started.comm is not None
        name = started.comm.bcast(socket.gethostname())
    return _LOOPBACK if started.topology.node_rank == 0 else name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
