"""torch.distributed beside axonmpi: its groups on gloo, on NCCL, and on axonmpi's backend of it."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
from torch import nn

from ....comm import broadcast_object
from ....groups.world import World
from ....interop.autoload import NAME, register

# torch 2.13 gives these two operations new names, and warns of the old ones at every call.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ON_GLOO, ON_AXONMPI = "torch on gloo", "torch on axonmpi"


def start_torch(world: World, backend: str = "gloo") -> None:
    """Start the default group of torch.distributed; collective. MPI carries the address of its store."""
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, yet not among the names that torch exports
    store: Any = None
    host = "127.0.0.1" if world.num_nodes == 1 else socket.gethostname()
    if world.rank == 0:
        store = make_store(host, 0, is_master=True, wait_for_workers=False)
    host, port = broadcast_object((host, store.port if store else 0))
    if store is None:
        store = make_store(host, port, is_master=False)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


def default_group() -> dist.ProcessGroup:
    """Return the default group of torch.distributed, which has been started."""
    group = dist.group.WORLD
    assert group is not None
    return group


def torch_groups() -> dict[str, dist.ProcessGroup]:
    """Return two groups of all ranks, the default one and a new one over axonmpi; collective."""
    register()
    return {ON_GLOO: default_group(), ON_AXONMPI: dist.new_group(backend=NAME)}


def torch_fsdp(model: nn.Sequential, group: dist.ProcessGroup) -> nn.Sequential:
    """Shard a model by torch's FSDP2, a unit for each child with parameters; collective over the group."""
    # These take a second to import, which the other benchmarks need not spend.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for child in model:
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
