"""How chunks of data take their turns in scratch memory that the ranks of a node share (layer 2).

Every chunk goes through the same steps, one a turn, with a barrier between turns. What one turn writes the next one
reads, so two places of scratch memory, used in turn, would do. That is the quickest where ranks share a cache: the
memory stays in it. Where they do not, a rank that writes what another one has just read waits until that one's
cache has let go of it, cache line by cache line, which takes several times longer than the copy (Molka, Hackenberg,
Schöne and Nagel 2015 measured such costs). With so many places that the caches have long forgotten the
oldest, it does not wait:

    two places      | a | b | a | b | a | b | ...       the other rank's cache still holds a and b
    many places     | a | b | c | d | e | f | ...       it holds the last few at most

Which is quicker is not known beforehand, and changes where a system moves ranks from core to core. So ranks
measure: every so often a few chunks go the other way, ranks exchange what their copies took, and all choose
the same. The order of additions is that of ranks either way, and so are the bits of the result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from .node_barrier import NodeBarrier
from .node_scratch import Scratch

if TYPE_CHECKING:
    from .shared_memory import Arena

__all__ = ["PACE", "Pace", "PlaceChoice", "Stage", "Turns", "Votes", "many_places"]

Stage = Callable[[int, int, int], object]
"""Called with a chunk's number, the place that this turn writes, and the one that the turn before wrote. The first
one returns how many bytes of scratch memory this rank wrote."""

_PLACES_OF_ALL = 32
_FEWEST = 2
_KEPT = 8


@dataclass(frozen=True)
class Pace:
    """How often the other number of places is tried, and what for.

    Attributes:
        first: Chunks before the first trial.
        shortest: Chunks between a change and the next trial; twice as many after each trial that changed nothing.
        longest: The most.
        trial: Chunks of a trial.
        unsettled: How many of these do not count, since what went before still shows.
        least_bytes: Smaller copies are not measured.
        gain: What a copy has to take in a trial, relative to what it usually takes, for a change.
    """

    first: int = 16
    shortest: int = 96
    longest: int = 384
    trial: int = 6
    unsettled: int = 2
    least_bytes: int = 64 << 10
    gain: float = 0.87


PACE = Pace()


def many_places(ranks: int) -> int:
    """Return how many places of about 1 MiB twice for each rank are more than caches hold; local.

    All together they are 64 MiB for up to 8 ranks, and 8 MiB a rank for more, which share more caches.
    """
    return max(4, _PLACES_OF_ALL // ranks // 2 * 2)


class Votes(Protocol):
    """Words that the ranks of a node show each other."""

    def vote(self, few: int, many: int) -> None:
        """Show two numbers to the other ranks after the next barrier; local."""

    def votes(self) -> list[tuple[int, int]]:
        """Return what all ranks have shown before the last barrier; local."""


class PlaceChoice:
    """Chooses between two places and many; the same on all ranks, if all call `begin` and `note` in the same turns.

    Args:
        votes: How ranks learn of each other's measurements.
        pace: When to try the other number; `PACE` if not given.

    Attributes:
        many: Whether many places are used now.
        is_due: Whether it is time to try the other number.
        chosen: Whether many places are used but for trials.
    """

    def __init__(self, votes: Votes, pace: Pace | None = None) -> None:
        self._votes = votes
        self._pace = pace or PACE
        self.chosen = False
        self.many = False
        self.is_due = False
        self._until_trial = self._interval = self._pace.first
        self._left = 0
        self._asked = -1
        self._usual: deque[float] = deque(maxlen=_KEPT)
        self._trial: list[float] = []

    def begin(self, count: int) -> None:
        """Begin a turn, after `count` barriers: act on what the ranks have voted for; local."""
        if self._asked < 0 or count <= self._asked:
            return
        self._asked = -1
        votes = self._votes.votes()
        usual, other = (sum(vote[which] for vote in votes) for which in (0, 1))
        if other < self._pace.gain * usual:
            self.chosen = self.many = not self.chosen
            self._interval = self._pace.shortest
            self._usual.clear()
        else:
            self._interval = min(max(2 * self._interval, self._pace.shortest), self._pace.longest)
        self._until_trial = self._interval

    def note(self, count: int, nbytes: int, seconds: float) -> None:
        """End the turn of a chunk, after `count` barriers, in which this rank has written `nbytes` bytes; local."""
        enough = nbytes >= self._pace.least_bytes
        if self._left:
            self._left -= 1
            if enough and self._left < self._pace.trial - self._pace.unsettled:
                self._trial.append(seconds / nbytes)
            if not self._left:
                self.many = self.chosen
                self._ask(count)
            return
        if enough:
            self._usual.append(seconds / nbytes)
        if self._asked >= 0:
            return
        self._until_trial -= 1
        self.is_due = self._until_trial <= 0

    def start_trial(self) -> None:
        """Use the other number of places for the next few chunks; local, on all ranks in the same turn."""
        self.is_due = False
        self._left = self._pace.trial
        self._trial.clear()
        self.many = not self.chosen

    def _ask(self, count: int) -> None:
        picoseconds = [0, 0]
        if min(len(self._usual), len(self._trial)) >= _FEWEST:
            picoseconds = [round(median(times) * 1e12) for times in (self._usual, self._trial)]
        self._votes.vote(*picoseconds)
        self._asked = count


class Turns:
    """Gives chunks their turns, and each turn its place in scratch memory.

    Args:
        barrier: The barrier between turns.
        scratch: The scratch memory.
        choice: Chooses the number of places; None for two.
        arena: Where more places come from.
    """

    def __init__(
        self, barrier: NodeBarrier, scratch: Scratch, choice: PlaceChoice | None = None, arena: Arena | None = None
    ) -> None:
        self._barrier = barrier
        self._scratch = scratch
        self._choice = choice
        self._arena = arena
        self._at = -1
        self._place = 0
        self._before = 0
        self._first = (0, 0.0)

    def put_first(self, stage: Stage) -> None:
        """Let the first chunk take its first step before the ranks have agreed on the call; local."""
        self._enter()
        self._first = self._timed(stage, 0)

    def run(self, what: object, chunks: int, stages: Sequence[Stage], first: int = 0) -> None:
        """Run each chunk through the stages, one a turn, with a barrier between turns; collective on the node.

        Args:
            what: What waiting ranks name.
            chunks: Number of chunks.
            stages: The steps.
            first: The turn to begin with: 1 after `put_first`, if all ranks have done that.
        """
        barrier, last = self._barrier, chunks + len(stages) - 2
        if first and self._choice is not None:
            self._choice.note(barrier.count, *self._first)
        for turn in range(first, last + 1):
            self._choose()
            self._enter()
            for stage in range(min(turn, len(stages) - 1), max(0, turn - chunks + 1) - 1, -1):
                if stage:
                    stages[stage](turn - stage, self._place, self._before)
                else:
                    written = self._timed(stages[0], turn)
                    if self._choice is not None:
                        self._choice.note(barrier.count, *written)
            if turn < last:
                barrier.wait(what)

    def _timed(self, stage: Stage, chunk: int) -> tuple[int, float]:
        began = time.perf_counter()
        written = stage(chunk, self._place, self._before)
        return written if isinstance(written, int) else 0, time.perf_counter() - began

    def _enter(self) -> None:
        """Find this turn's place; neither that of the turn before, nor one of which that turn may still read."""
        count = self._barrier.count
        if count == self._at:
            return
        many = self._choice is not None and self._choice.many
        # The numbers of places are even, so that a turn and the next differ whichever of them each goes by.
        place = count % self._scratch.places if many else count & 1
        self._before, self._place, self._at = self._place, place, count

    def _choose(self) -> None:
        """Choose how many places this turn has; collective when more than two are first wanted."""
        choice, scratch = self._choice, self._scratch
        if choice is None:
            return
        choice.begin(self._barrier.count)
        if not choice.is_due:
            return
        places = many_places(len(scratch.inputs[0]))
        if scratch.places > 2 or (self._arena is not None and scratch.widen(self._arena, places)):
            choice.start_trial()
        else:
            self._choice = None
