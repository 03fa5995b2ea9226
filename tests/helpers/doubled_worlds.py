"""Worlds of mock ranks whose tensors are on pretended GPUs, and move by NCCL's double.

`doubled()` makes every mock world such a world: the tensors are ordinary ones on the CPU, `KINDS["cpu"]` gives the
pretended GPU of the rank whose thread asks, and nccl4py is replaced by `nccl_double`.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from axonmpi import World
from axonmpi.backends import MockBackend, NcclBackend
from axonmpi.backends.nccl import library
from axonmpi.launch.topology import Topology
from axonmpi.types import Seconds
from axonmpi.utils.device import KINDS
from helpers import nccl_double
from helpers.device_double import CPU, Gpu, pretended_device

_activate = World.activate


@contextmanager
def doubled(seed: int = 0) -> Iterator[None]:
    """Give every mock world that is made in a `with` block pretended GPUs; local.

    Args:
        seed: Of the order between streams.
    """
    seeds = itertools.count(seed)
    with (
        patch.dict(KINDS, {"cpu": pretended_device}),
        patch.object(library, "load", lambda: nccl_double.LIBRARY),
        patch.object(World, "mock", lambda *args, **options: _make_world(next(seeds), *args, **options)),
        patch.object(World, "activate", _activate_with_gpu),
    ):
        yield


def _make_world(seed: int, world_size: int = 1, *, timeout: Seconds | None = None) -> World:
    """Make a world of ranks with pretended GPUs and return rank 0's view of it; local. See `World.mock`."""
    hosts = MockBackend.create_world(world_size, timeout=timeout)
    gpus = [Gpu(host, seed) for host in hosts]
    worlds = []
    for host, gpu, communicator in zip(hosts, gpus, nccl_double.connected(gpus), strict=True):
        with gpu.current():
            backend = NcclBackend._of(communicator, host.rank, world_size, CPU, None, host)
        worlds.append(World(backend, Topology.of([0] * world_size, host.rank)))
    for world in worlds:
        world.peers = tuple(worlds)
    return worlds[0]


@contextmanager
def _activate_with_gpu(world: World) -> Iterator[World]:
    """Activate a world on its GPU, if it has one."""
    gpu = getattr(world.default_group.backend, "_device", None)
    with _activate(world), gpu.current() if isinstance(gpu, Gpu) else nullcontext():
        yield world
