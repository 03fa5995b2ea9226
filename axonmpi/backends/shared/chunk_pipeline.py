"""How chunks of data take their turns in scratch memory that the ranks of a node share.

Every chunk goes through the same steps, one a turn, with a barrier between turns. What one turn writes, the next
one reads: each writes another place than the one before. `choice` says whether there are two places or many.
The order of additions is that of ranks either way, and so are the bits of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .barrier import NodeBarrier
from .choice import PlaceChoice
from .staging import Scratch

__all__ = ["Stage", "Turns"]

Stage = Callable[[int, int, int], None]
"""Called with a chunk's number, the place that this turn writes, and the one that the turn before wrote."""


class Turns:
    """Gives chunks their turns, and each turn its place in scratch memory.

    Args:
        barrier: The barrier between turns.
        scratch: The scratch memory.
        choice: Chooses the number of places; None for two.
    """

    def __init__(self, barrier: NodeBarrier, scratch: Scratch, choice: PlaceChoice | None = None) -> None:
        self._barrier = barrier
        self._scratch = scratch
        self._choice = choice
        self._at = -1
        self._place = 0
        self._before = 0
        self._seconds = 0.0

    @property
    def any_place(self) -> int:
        """One of the places between which turns change now."""
        return self._scratch.place(0, many=self._choice is not None and self._choice.many)

    def put_first(self, stage: Stage) -> None:
        """Let the first chunk take its first step before the ranks have agreed on the call; local."""
        self._enter()
        began = time.perf_counter()
        stage(0, self._place, self._before)
        self._seconds += time.perf_counter() - began

    def run(self, what: object, chunks: int, stages: Sequence[Stage], first: int = 0, chunk_bytes: int = 0) -> None:
        """Run each chunk through the stages, one a turn, with a barrier between turns; collective on the node.

        Args:
            what: What waiting ranks name.
            chunks: Number of chunks.
            stages: The steps, at least two.
            first: The turn to begin with: 1 after `put_first`, if all ranks have done that.
            chunk_bytes: How large most chunks are; the same on all ranks.
        """
        last, barrier, choice = chunks + len(stages) - 2, self._barrier, self._choice
        if choice is not None and chunk_bytes < choice.pace.least_chunk:
            choice = None
        # Only now, when all ranks are known to have had the same copy.
        if first and choice is not None:
            self._note(choice, chunk_bytes)
        for turn in range(first, last + 1):
            self._enter()
            began = time.perf_counter()
            for stage in range(min(turn, len(stages) - 1), max(0, turn - chunks + 1) - 1, -1):
                stages[stage](turn - stage, self._place, self._before)
            self._seconds += time.perf_counter() - began
            if turn < chunks and choice is not None:
                self._note(choice, chunk_bytes)
            if turn < last:
                barrier.wait(what)
        if choice is None:
            self._seconds = 0.0

    def _note(self, choice: PlaceChoice, chunk_bytes: int) -> None:
        """Count a chunk, with the steps since the one before: as many as a chunk takes, if of several."""
        choice.note(self._barrier.count, chunk_bytes, self._seconds)
        self._seconds = 0.0

    def _enter(self) -> None:
        """Find this turn's place: not that of the turn before, of which this one reads."""
        count = self._barrier.count
        if count == self._at:
            return
        many = self._choice is not None and self._choice.many
        self._before, self._place, self._at = self._place, self._scratch.place(count, many=many), count
