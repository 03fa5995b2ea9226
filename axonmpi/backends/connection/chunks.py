"""Chunks of large transfers: the staging buffers that they pass through, and the loop in which they overlap.

Each rank of a node has a few buffers and uses them in turn, another one after each barrier. A buffer is written
again only after all ranks have read it. Two buffers stay in a cache that ranks share. Without a shared cache, a
rank that writes a cache line waits for the cache of its last reader (Molka, Hackenberg, Schöne and Nagel 2015).
With many buffers it does not wait, since the caches have evicted the oldest. `line_seconds` measures the wait.

Every chunk passes the same stages, one a tick, with a barrier of the node between ticks; at any tick several chunks
are at different stages. Each chunk is copied into another buffer than the one before:

    tick 0    copy in 0
    tick 1    copy in 1    sum 0, start its lane
    tick 2    copy in 2    sum 1, start its lane    finish the lane of 0
    tick 3    copy in 3    sum 2, start its lane    finish the lane of 1    copy out 0

Within a tick a rank goes from left to right, so that the lane carries the next chunk while the rank waits for the
last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ..tuning import MAX_VIEWS, PROBE_BYTES
from .barrier import NodeBarrier
from .topology import Bytes

ALIGNMENT = 64
_LINE_BYTES = 64
_PROBES = 3


class Staging:
    """The buffers of all ranks of a node.

    Args:
        regions: [local ranks] the memory of each rank, of the same size.
        count: How many buffers each rank has, at least two.

    Attributes:
        count: The same.
        buffers: [count][local ranks] the buffers.
        buffer_bytes: Size of each.
    """

    def __init__(self, regions: Sequence[Bytes], count: int = 2) -> None:
        self.count = count
        self.buffer_bytes = regions[0].nbytes // count // ALIGNMENT * ALIGNMENT
        starts = [number * self.buffer_bytes for number in range(count)]
        self.buffers = [[region[at : at + self.buffer_bytes] for region in regions] for at in starts]
        self._views: BoundedCache[Any, list[list[Tensor]]] = BoundedCache(MAX_VIEWS)

    def views(self, index: int, start: int, stop: int, dtype: torch.dtype) -> list[Tensor]:
        """Return bytes `start` to `stop` of all ranks' buffers of one index as tensors; local."""
        key = (start, stop, dtype)
        views = self._views.get(key)
        if views is None:
            # Of all buffers at once: views made later would cut up the memory that large tensors have left.
            views = [views_of(buffers, start, stop, dtype) for buffers in self.buffers]
            self._views.add(key, views, self.count * len(views[0]))
        return views[index]


def line_seconds(regions: Sequence[Bytes], own: int, barrier: NodeBarrier) -> float:
    """Measure how long this rank takes to write a cache line that the others have just read; collective.

    Args:
        regions: [local ranks] shared memory, at least `PROBE_BYTES` each; its values are lost.
        own: This rank's index.
        barrier: The barrier of the ranks.
    """
    data = np.zeros(PROBE_BYTES, np.uint8)
    taken = []
    for _ in range(_PROBES + 1):
        began = time.perf_counter()
        regions[own][:PROBE_BYTES] = data
        taken.append(time.perf_counter() - began)
        barrier.wait("making a group")
        for region in regions:
            data[...] = region[:PROBE_BYTES]
        barrier.wait("making a group")
    return min(taken[1:]) / (PROBE_BYTES / _LINE_BYTES)


def views_of(buffers: Sequence[Bytes], start: int, stop: int, dtype: torch.dtype) -> list[Tensor]:
    """Return bytes `start` to `stop` of buffers as tensors, no inference tensors; local."""
    with torch.inference_mode(False):
        return [torch.from_numpy(buffer[start:stop]).view(dtype) for buffer in buffers]


def slices_of(nbytes: int, ranks: int, unit: int) -> list[tuple[int, int]]:
    """Cut bytes into one slice a rank, of whole units but for the last one that is not empty; local."""
    each = -(-nbytes // (ranks * unit)) * unit
    return [(min(rank * each, nbytes), min((rank + 1) * each, nbytes)) for rank in range(ranks)]


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and the stop of each block, of blocks that lie end to end; local."""
    stops = np.cumsum(sizes).tolist()
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def round_down(size: int, unit: int) -> int:
    """Return the largest multiple of `unit` up to `size`, but at least one unit; local."""
    return max(size // unit * unit, unit)


# ---- the loop --------------------------------------------------------------------------------------------------

Stage = Callable[[int, int, int], object]
"""Called with a chunk's number, the index of the buffer into which it is copied, and the index of the buffer into
which this tick copies another chunk: results that the next tick reads go there, too."""


def run_chunks(
    barrier: NodeBarrier | None, buffers: int, what: object, chunks: int, stages: Sequence[Stage], first: int = 0
) -> None:
    """Run each chunk through the stages, one a tick, with a barrier between ticks; collective on the node.

    Args:
        barrier: The barrier of the node; None if the ranks do not pass chunks to each other there.
        buffers: Number of buffers of each rank, no fewer than the ticks in which a chunk stays in its buffer.
        what: The operation, for messages of ranks that wait.
        chunks: Number of chunks, the same on all ranks.
        stages: The stages.
        first: The tick to begin with: 1 if the first chunk's first stage and a barrier are over.
    """
    begin = 0 if barrier is None else barrier.count - first
    last = chunks + len(stages) - 2
    for tick in range(first, last + 1):
        for stage in range(max(0, tick - chunks + 1), min(tick, len(stages) - 1) + 1):
            stages[stage](tick - stage, (begin + tick - stage) % buffers, (begin + tick) % buffers)
        if barrier is not None and tick < last:
            barrier.wait(what)


def stages_of(chunks: int, start: Stage, *others: Stage) -> list[Stage]:
    """Return stages that need no barrier between them, as one stage if there is a single chunk; local."""

    def at_once(number: int, index: int, now: int) -> None:
        for stage in (start, *others):
            stage(number, index, now)

    return [start, *others] if chunks > 1 else [at_once]
