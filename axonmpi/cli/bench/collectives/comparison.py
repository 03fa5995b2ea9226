"""Collectives of many sizes: ours, MPI's own and torch.distributed's, above the time of a plain copy.

    symmetric   ours, on a tensor of `symmetric_empty`
    ordinary    ours, on any other tensor
    mpi         mpi4py on numpy arrays, in place where MPI can do that; float32 only, MPI has no bfloat16;
                here at MPI_THREAD_MULTIPLE, see `mpi`
    gloo        torch.distributed
    torch       torch.distributed on NCCL, in place of mpi and gloo for tensors on GPUs
    memcpy      each rank copies as many bytes within its own memory, all at once: the floor

For each operation, dtype and size they take turns. Before that each does it once with known values, and its result
is checked: no wrong answer is timed. On GPUs a time is the GPU's, from events; what the CPU spends on a call is
measured apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....comm import broadcast, symmetric_empty
from ....groups.world import World
from ....launch import start as runtime
from ....utils.device import Device, device_at
from ..harness.timing import (
    AXONMPI,
    WALL,
    Agreement,
    Clock,
    calls_for,
    count_cores,
    device_clock,
    interleave,
    start_torch,
    telling_clock,
)
from .cases import Case, Variant, format_size, variants_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_SIZES = ("4B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB", "16MiB", "64MiB")
_BLOCK_SECONDS = 7e-3
_TOLD_CALLS = 32
"""Calls that a GPU is told in a block at most, so that the CPU never waits for room in its queue."""
_LINE_BYTES = 64
_LINES = 4096
_REPEATS = 5


def measure(
    world: World, blocks: int, operations: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int]
) -> dict[str, Any]:
    """Measure every operation with every dtype at every size; collective.

    Args:
        world: All ranks of the job; tensors are on its device.
        blocks: Number of turns of each variant.
        operations: Some of `OPERATIONS`.
        dtypes: Some of `DTYPES`.
        sizes: In bytes.

    Returns:
        The ranks, their cores, how they reach each other, the MPI library's name, and the cases, each with the
        variants' times in microseconds, and what it took meanwhile to write a cache line that another rank had
        read, in nanoseconds, None where ranks do not read each other's memory. Where MPI is among the variants,
        `mpi_microseconds` has its time by thread level. Of GPUs there is their name, and `cpu_microseconds`: the
        time of the CPU until a call returns.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    device = device_at(world.device)
    if device.is_asynchronous:
        mpi, backend = None, "nccl" if dist.is_nccl_available() else ""
    else:
        mpi, backend = runtime.start_mpi(), "gloo"
    if backend:
        start_torch(world, backend)
    cases = [
        Case(operation, DTYPES[dtype], nbytes, world.rank, world.size, world.device)
        for operation in operations
        for dtype in dtypes
        for nbytes in sizes
    ]
    probe = LineProbe(world)
    measured = [_measure_case(case, mpi, blocks, probe, device) for case in cases]
    if backend:
        dist.destroy_process_group()
    return {
        "ranks": world.size,
        "cores": count_cores(world),
        "path": "nccl" if mpi is None else getattr(world.default_group.backend, "path", "none"),
        "mpi": "" if mpi is None else library_name(mpi),
        "device": str(device),
        "blocks": blocks,
        "cases": measured,
    }


def _measure_case(case: Case, mpi: Any, blocks: int, probe: LineProbe, device: Device) -> dict[str, Any]:
    variants = variants_of(case, mpi)
    microseconds = median_times(case, variants, blocks, before=probe.sample, clock=device_clock(device))
    by_level = {runtime.thread_level(mpi): microseconds["mpi"]} if "mpi" in microseconds else {}
    return {
        "operation": case.operation,
        "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.nbytes,
        "microseconds": microseconds,
        "mpi_microseconds": by_level,
        "cpu_microseconds": _telling_times(variants, blocks, device) if device.is_asynchronous else {},
        "line_nanoseconds": probe.median(),
    }


def _telling_times(variants: Mapping[str, Variant], blocks: int, device: Device) -> dict[str, float]:
    """Return the microseconds that the CPU needs to tell a device to do a variant; collective."""
    calls = {name: variant.call for name, variant in variants.items()}
    seconds = interleave(calls, blocks=blocks, calls=_TOLD_CALLS, clock=telling_clock(device))
    return {name: value * 1e6 for name, value in seconds.items()}


def median_times(
    case: Case,
    variants: Mapping[str, Variant],
    blocks: int,
    ranks: Agreement = AXONMPI,
    before: Callable[[], object] | None = None,
    clock: Clock = WALL,
    block_seconds: float = _BLOCK_SECONDS,
) -> dict[str, float]:
    """Check the variants of a case, then time them in turns; collective. Returns microseconds a call.

    Args:
        case: The case.
        variants: Its variants, the same on all ranks.
        blocks: Number of turns of each variant.
        ranks: The operations by which the ranks agree.
        before: Called before each round of turns, untimed.
        clock: Tells the time of a block.
        block_seconds: About how long a block takes, of calls that are quicker.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    check(case, variants, ranks)
    calls = {name: variant.call for name, variant in variants.items()}
    numbers = calls_for(calls, block_seconds, ranks, clock)
    seconds = interleave(calls, blocks=blocks, calls=numbers, before=before, ranks=ranks, clock=clock)
    return {name: value * 1e6 for name, value in seconds.items()}


def check(case: Case, variants: Mapping[str, Variant], ranks: Agreement = AXONMPI) -> None:
    """Raise RuntimeError on all ranks if a variant's result is wrong on any rank; collective."""
    names = [name for name, variant in variants.items() if ranks.largest(not variant.is_right())]
    if names:
        what = f"{case.operation} of {format_size(case.nbytes)} of {case.dtype} on {case.ranks} ranks"
        raise RuntimeError(f"{what}: wrong result of {', '.join(names)}")


def library_name(mpi: Any) -> str:
    """Return the name of the MPI library in use; local."""
    # An MPI library may stand in for another one of the same binary interface, which mpi4py was built for.
    return "Intel MPI" if "Intel" in mpi.Get_library_version() else runtime.library_info().vendor


class LineProbe:
    """Measures how long rank 0 takes to write a cache line that the others have just read.

    It takes a few nanoseconds where two ranks share a cache, about ten times as much where their cores are far
    apart, and the time of everything that goes through shared memory changes with it. A system may move ranks at
    any time, so this time is measured beside each block.

    Args:
        world: The ranks; the methods are collective over all of them.

    Where there was too little memory to share (a warning says so), rank 0 writes memory that no other rank reads.
    """

    def __init__(self, world: World) -> None:
        self._nanoseconds: list[float] = []
        self._is_writer = world.rank == 0
        shares = getattr(world.default_group.backend, "path", "") == "node"
        self._memory = symmetric_empty((_LINES * _LINE_BYTES,), torch.uint8) if shares else None

    def sample(self) -> None:
        """Add a measurement; collective."""
        if self._memory is None:
            return
        taken = []
        for repeat in range(_REPEATS + 1):
            began = time.perf_counter()
            if self._is_writer:
                self._memory.fill_(repeat)
            taken.append((time.perf_counter() - began) / _LINES * 1e9)
            broadcast(self._memory)
        if self._is_writer:
            self._nanoseconds.append(statistics.median(taken[1:]))

    def median(self) -> float | None:
        """Return the median of the measurements since the last call, in nanoseconds; local.

        None on ranks other than 0, and where ranks do not read each other's memory.
        """
        taken, self._nanoseconds = self._nanoseconds, []
        return statistics.median(taken) if taken else None
