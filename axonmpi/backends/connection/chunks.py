"""The loop over the chunks of a large transfer: copies, sums and the lane overlap.

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

from collections.abc import Callable, Sequence

from .barrier import NodeBarrier

__all__ = ["Stage", "run_chunks", "stages_of"]

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
