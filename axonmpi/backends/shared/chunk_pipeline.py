"""Chunks of data on their way through the staging of a node.

Every chunk goes through the same stages, one a tick, with a barrier between ticks; at any tick several chunks are
at different stages. What one tick writes the next one reads, so each writes to another buffer than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .barrier import NodeBarrier

__all__ = ["Stage", "run_stages"]

Stage = Callable[[int, int, int], None]
"""Called with a chunk's number, the index of the buffer that this tick writes, and of the one that the last
wrote."""


def run_stages(
    barrier: NodeBarrier, buffers: int, what: object, chunks: int, stages: Sequence[Stage], first: int = 0
) -> None:
    """Run each chunk through the stages, one a tick, with a barrier between ticks; collective on the node.

    Args:
        barrier: The barrier.
        buffers: How many buffers each rank has.
        what: What waiting ranks name.
        chunks: Number of chunks, the same on all ranks.
        stages: The stages, at least two.
        first: The tick to begin with: 1 where the first stage of the first chunk and a barrier are over.
    """
    last = chunks + len(stages) - 2
    for tick in range(first, last + 1):
        index = barrier.count % buffers
        before = (barrier.count - 1) % buffers
        for stage in range(min(tick, len(stages) - 1), max(0, tick - chunks + 1) - 1, -1):
            stages[stage](tick - stage, index, before)
        if tick < last:
            barrier.wait(what)
