"""The common parts of the benchmarks: variants that take turns, clocks, torch.distributed, the number of cores.

A clock tells how long calls take: on the CPU by its own time, on a GPU by events before and after them, or by what
the CPU spends on telling it.
"""

from __future__ import annotations

import ctypes
import gc
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....comm import all_gather_object, all_reduce_max, barrier, broadcast_object
from ....groups.world import World
from ....interop.autoload import NAME, register
from ....launch.cpu import usable_cores
from ....utils.device import Device, device_at

MOST_CALLS = 16384

# torch 2.13 gives these two operations new names, and warns of the old ones at every call.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Agreement:
    """The operations by which ranks begin together and learn the time of the slowest; both are collective.

    Attributes:
        barrier: Waits for all ranks.
        largest: Returns the largest of the ranks' values.
    """

    barrier: Callable[[], object]
    largest: Callable[[float], float]


def _largest(value: float) -> float:
    values = torch.tensor(value, dtype=torch.float64)
    all_reduce_max(values)
    return float(values)


AXONMPI = Agreement(barrier, _largest)

Clock = Callable[[Callable[[], object], int], float]
"""Makes a call so many times, and returns the seconds of one."""


def device_clock(device: Device) -> Clock:
    """Return what tells the time that a device takes for calls, one behind the other; local."""

    def seconds(call: Callable[[], object], calls: int) -> float:
        first = device.mark()
        for _ in range(calls):
            call()
        return device.seconds_between(first, device.mark()) / calls

    return seconds


def telling_clock(device: Device) -> Clock:
    """Return what tells the time of the CPU until calls return, whatever the device has still to do; local."""

    def seconds(call: Callable[[], object], calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - begin
        device.synchronize()
        return taken / calls

    return seconds


WALL = device_clock(device_at(torch.device("cpu")))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    blocks: int,
    calls: int | Mapping[str, int],
    before: Callable[[], object] | None = None,
    ranks: Agreement = AXONMPI,
    clock: Clock = WALL,
) -> dict[str, float]:
    """Time each variant in `blocks` short blocks, taking turns; collective.

    The first block of each warms up and is not counted. A block takes as long as on its slowest rank.

    Args:
        variants: What to call, in the same order on all ranks.
        blocks: Number of turns of each variant.
        calls: Calls a block, of all variants or of each; the same on all ranks.
        before: Called before each round of turns, untimed.
        ranks: The operations by which the ranks agree.
        clock: Tells the time of a block.

    Returns:
        The median of each variant's blocks, in seconds a call.
    """
    numbers = calls if isinstance(calls, Mapping) else dict.fromkeys(variants, calls)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(blocks + 1):
        if before is not None and block:
            before()
        for name, call in variants.items():
            taken = _seconds_per_call(call, numbers[name], ranks, clock)
            if block:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def calls_for(
    variants: Mapping[str, Callable[[], object]], seconds: float, ranks: Agreement = AXONMPI, clock: Clock = WALL
) -> dict[str, int]:
    """Find how many calls of each variant take about `seconds`; collective, the same on all ranks."""
    return {name: _calls_for(call, seconds, ranks, clock) for name, call in variants.items()}


def _calls_for(call: Callable[[], object], seconds: float, ranks: Agreement, clock: Clock) -> int:
    call()  # the first one may prepare what the others find
    calls = 1
    # The quicker of two: one of them may have prepared what the others find.
    while (
        each := min(_seconds_per_call(call, calls, ranks, clock) for _ in range(2))
    ) * calls < seconds / 4 and calls < MOST_CALLS:
        calls *= 4
    return max(1, min(MOST_CALLS, round(seconds / each)))


def _seconds_per_call(call: Callable[[], object], calls: int, ranks: Agreement, clock: Clock) -> float:
    """Time `calls` calls, begun together; collective. Returns the slowest rank's time of one."""
    ranks.barrier()
    return ranks.largest(clock(call, calls))


def start_gloo(world: World) -> None:
    """Start the default group of torch.distributed on gloo; collective. MPI carries the address of its store."""
    start_torch(world, "gloo")


def start_torch(world: World, backend: str) -> None:
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


def add_torch_group() -> dist.ProcessGroup:
    """Return a second group of torch.distributed, of all ranks of the default one, over axonmpi; collective."""
    register()
    group: dist.ProcessGroup = dist.new_group(backend=NAME)
    return group


def stock_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups of torch's own variants, the default one on gloo and one over axonmpi; collective."""
    default = dist.group.WORLD
    assert default is not None
    return {"torch on gloo": default, "torch on axonmpi": add_torch_group()}


def count_cores(world: World) -> int:
    """Return how many logical CPUs all ranks may run on together, each counted once; collective."""
    places = all_gather_object((world.node_rank, usable_cores()))
    return len({(node, core) for node, cores in places for core in cores})


def give_back() -> None:
    """Return freed memory to the system on every rank; collective."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    barrier()
