"""Clocks, and variants that are timed in turns.

All variants of a comparison run in short blocks, one after the other, so that a busy machine slows all of them
alike. A block takes as long as on its slowest rank, and the figure of a variant is the median of its blocks. A
clock measures a block: on the CPU by the time that passes, on a GPU by events or by the CPU's time for the calls.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ....comm import all_reduce_max, barrier
from ....utils.device import Device, device_at

MOST_CALLS = 16384
MILLISECONDS, MICROSECONDS = 1e3, 1e6
"""Units of results, a second."""


@dataclass(frozen=True)
class RankOperations:
    """The operations by which ranks begin a block together and learn the time of the slowest; both are collective.

    Attributes:
        barrier: Waits for all ranks.
        maximum: Returns the largest of the ranks' values.
    """

    barrier: Callable[[], object]
    maximum: Callable[[float], float]


def _maximum(value: float) -> float:
    values = torch.tensor(value, dtype=torch.float64)
    all_reduce_max(values)
    return float(values)


OVER_AXONMPI = RankOperations(barrier, _maximum)

Clock = Callable[[Callable[[], object], int], float]
"""Runs a call this many times, and returns the seconds of one."""


def device_clock(device: Device) -> Clock:
    """Return the clock of the time that a device takes for calls, one behind the other."""

    def seconds(call: Callable[[], object], calls: int) -> float:
        first = device.mark()
        for _ in range(calls):
            call()
        return device.seconds_between(first, device.mark()) / calls

    return seconds


def enqueue_clock(device: Device) -> Clock:
    """Return the clock of the CPU's time until calls return, when the device may still be computing."""

    def seconds(call: Callable[[], object], calls: int) -> float:
        taken = WALL(call, calls)
        device.synchronize()
        return taken

    return seconds


WALL = device_clock(device_at(torch.device("cpu")))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    blocks: int,
    calls: int | Mapping[str, int],
    unit: float = 1.0,
    before: Callable[[], object] | None = None,
    ranks: RankOperations = OVER_AXONMPI,
    clock: Clock = WALL,
) -> dict[str, float]:
    """Time each variant in `blocks` short blocks, in turns; collective.

    Each variant has one more block at first, which warms up and is not counted.

    Args:
        variants: The calls, in the same order on all ranks.
        blocks: Number of turns of each variant.
        calls: Calls a block, of all variants or of each; the same on all ranks.
        unit: Units of the result, a second.
        before: Called before each round of turns, untimed.
        ranks: The ranks' operations.
        clock: Measures a block.

    Returns:
        The median of each variant's blocks, a call.
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
    return {name: statistics.median(values) * unit for name, values in seconds.items()}


def calls_for(
    call: Callable[[], object], seconds: float, ranks: RankOperations = OVER_AXONMPI, clock: Clock = WALL
) -> int:
    """Return the number of calls that take about `seconds`; collective, the same on all ranks."""
    call()
    calls = 1
    while True:
        # The quicker of two, since the first calls may prepare buffers for the next.
        each = min(_seconds_per_call(call, calls, ranks, clock) for _ in range(2))
        if each * calls >= seconds / 4 or calls >= MOST_CALLS:
            return max(1, min(MOST_CALLS, round(seconds / each)))
        calls *= 4


def _seconds_per_call(call: Callable[[], object], calls: int, ranks: RankOperations, clock: Clock) -> float:
    """Time `calls` calls, begun together; collective. Returns the slowest rank's time of one."""
    ranks.barrier()
    return ranks.maximum(clock(call, calls))


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time of one call, begun together; collective, each rank's own time."""
    barrier()
    return WALL(call, 1)


def release_memory() -> None:
    """Return freed memory to the system on every rank; collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    barrier()
