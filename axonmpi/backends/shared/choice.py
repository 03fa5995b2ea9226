"""Few places in memory that the ranks of a node share, or many: whichever is quicker to write.

What a rank writes for the others to read, it could write to two places in turn. That is the quickest where ranks
share a cache: the memory stays in it. Where they do not, a rank that writes what another one has just read waits
until that one's cache has let go of it, cache line by cache line, which takes several times longer than the copy
(Molka, Hackenberg, Schöne and Nagel 2015 measured such costs). With so many places that the caches have long
forgotten the oldest, it does not wait:

    two places      | a | b | a | b | a | b | ...       the other rank's cache still holds a and b
    many places     | a | b | c | d | e | f | ...       it holds the last few at most

Which is quicker is not known beforehand, and changes where a system moves ranks from core to core. So ranks
measure: every so often a few copies go the other way, ranks exchange what writing and reading took, and all choose
the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

__all__ = ["PACE", "Pace", "PlaceChoice", "Votes"]


@dataclass(frozen=True)
class Pace:
    """How often the other way is tried, and what for.

    Attributes:
        first: Copies before the first ones that are measured.
        shortest: Copies between a change and the next ones that are measured; twice as many after each trial that
            changed nothing.
        longest: The most.
        trial: How many are measured one way, and then the other.
        unsettled: How many of a trial do not count, since what went before still shows.
        least_chunk: Chunks of less do not count.
        gain: What a copy has to take in a trial, relative to what it usually takes, for a change.
    """

    first: int = 8
    shortest: int = 96
    longest: int = 384
    trial: int = 9
    unsettled: int = 3
    least_chunk: int = 256 << 10
    gain: float = 0.93


PACE = Pace()


class Votes(Protocol):
    """Words that the ranks of a node show each other."""

    def vote(self, usual: int, other: int) -> None:
        """Show two numbers to the other ranks after the next barrier; local."""

    def votes(self) -> list[tuple[int, int]]:
        """Return what all ranks have shown before the last barrier; local."""


class PlaceChoice:
    """Chooses between two places and many, the same on all ranks.

    All ranks call `note` for the same copies, in the same order.

    Args:
        votes: How ranks learn of each other's measurements.
        prepare: Makes many places; collective. False if that cannot be; then it is not asked again.
        pace: When to try the other way; `PACE` if not given.

    Attributes:
        pace: The same.
        many: Whether the next copy goes to one of many places.
        quiet: How many copies are neither measured nor part of a trial; whoever has one of them may count down
            instead of calling `note`.
    """

    def __init__(self, votes: Votes, prepare: Callable[[], bool], pace: Pace | None = None) -> None:
        self._votes = votes
        self._prepare = prepare
        self.pace = pace or PACE
        self._chosen = False
        self.many = False
        self.quiet = self._interval = self.pace.first
        self._left = self.pace.trial
        self._asked = -1
        self._taken: list[float] = []
        self._usual: list[float] | None = None

    def note(self, turn: int, nbytes: int, seconds: float) -> None:
        """Take note of a copy; local, but for making many places, which is collective.

        Args:
            turn: How many barriers all ranks have passed.
            nbytes: How large it was; the same on all ranks, above 0.
            seconds: What writing it and reading that of the others took, waiting left out; of no account while all
                is quiet.
        """
        if self.quiet:
            self.quiet -= 1
            return
        if self._asked >= 0:
            if turn > self._asked:  # a barrier later, when all have voted
                self._decide()
            return
        pace = self.pace
        settled = self._usual is None or self._left <= pace.trial - pace.unsettled
        if settled:
            self._taken.append(seconds / nbytes)
        self._left -= 1
        if self._left:
            return
        if self._usual is None:
            if self._prepare():
                self._usual, self._taken, self._left = self._taken, [], pace.trial
                self.many = not self._chosen
            else:
                self.quiet = sys.maxsize
            return
        usual, other = (round(median(times or [0.0]) * 1e15) for times in (self._usual, self._taken))
        self._votes.vote(usual, other)
        self._asked = turn
        self.many = self._chosen

    def _decide(self) -> None:
        votes, pace = self._votes.votes(), self.pace
        usual, other = (sum(vote[which] for vote in votes) for which in (0, 1))
        if other < pace.gain * usual:
            self._chosen = self.many = not self._chosen
            self._interval = pace.shortest
        else:
            self._interval = min(max(2 * self._interval, pace.shortest), pace.longest)
        self.quiet, self._left, self._asked = self._interval, pace.trial, -1
        self._usual, self._taken = None, []
