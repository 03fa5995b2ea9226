"""torch.distributed on gloo, beside MPI on the same ranks."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from ...comm import broadcast_object
from ...groups.world import World

__all__ = ["all_gather_flat", "reduce_scatter_flat", "start_gloo"]


Store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, yet not among the names that torch exports


def start_gloo(world: World) -> None:
    """Start torch.distributed's default group; collective. The address of its store travels over MPI."""
    store: Any = None
    host = "127.0.0.1" if world.num_nodes == 1 else socket.gethostname()
    if world.rank == 0:
        store = Store(host, 0, is_master=True, wait_for_workers=False)
    host, port = broadcast_object((host, store.port if store else 0))
    if store is None:
        store = Store(host, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


# torch 2.13 gives these two operations new names, and warns of the old ones at every call.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
