"""Where all ranks of a test session agree on what happened.

    rank 1 ── topic, own part ─┐                        ┌─ verdict
    rank 2 ── topic, own part ─┼─ rank 0 merges them ───┼─ verdict
    rank 3 ── topic, own part ─┘                        └─ verdict

The ranks use a communicator of their own, so that nothing a test leaves behind is mistaken for an answer, and they
wait without using their core, since another rank may be at work on it. Ranks that come to different topics (one is
at a test, another has ended its session) are all told to stop, and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..rank_text import merge_texts

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Meeting", "SessionEnd", "SessionStoppedError", "Stop", "wait_politely"]

T = TypeVar("T")

_INTERNAL_ERROR = 3
_YIELDS = 100
_SHORTEST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.01


def wait_politely(ready: Callable[[], T | None]) -> T:
    """Poll until `ready` returns something, in ever longer pauses that leave the core to others; local."""
    for _ in range(_YIELDS):
        if (answer := ready()) is not None:
            return answer
        os.sched_yield()
    started = time.monotonic()
    while (answer := ready()) is None:
        # MPI offers no way to wait without polling that leaves the core free; what comes a tenth late is no loss.
        waited = time.monotonic() - started
        time.sleep(min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE))
    return answer


@dataclass(frozen=True)
class Stop:
    """The verdict that ends the session on all ranks.

    Attributes:
        reason: What to tell the user.
        exit_code: What every rank's pytest ends with.
    """

    reason: str
    exit_code: int


@dataclass(frozen=True)
class SessionEnd:
    """What a rank gives to a meeting when its session is over.

    Attributes:
        exit_code: What its pytest ends with.
        warnings: The warnings that it has seen.
    """

    exit_code: int
    warnings: tuple[str, ...] = ()


class SessionStoppedError(Exception):
    """The ranks agreed to end the session."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.reason)
        self.stop = stop


class Meeting:
    """Agreement between all ranks of a communicator.

    Args:
        comm: Used by nobody else; rank 0 merges.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def agree(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Give this rank's part, return what rank 0's `merge` made of the parts by rank; collective.

        Args:
            topic: What this is about; the same on all ranks, or all are told to stop.
            own: This rank's part, picklable.
            merge: Called on rank 0 only; may return a `Stop`.

        Raises:
            SessionStoppedError: The verdict is to stop.
        """
        if self.rank:
            self.send((topic, own), 0)
            verdict = self.receive(0)
        else:
            verdict = self._lead(topic, own, merge)
        if isinstance(verdict, Stop):
            raise SessionStoppedError(verdict)
        return verdict

    def _lead(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Collect the parts, merge them and tell the others."""
        given = {0: (topic, own)} | {rank: self.receive(rank) for rank in range(1, self.size)}
        verdict: Any = Stop("rank 0 failed while it merged what the ranks said", _INTERNAL_ERROR)
        try:
            topics = {rank: said for rank, (said, _) in given.items()}
            if len(set(topics.values())) == 1:
                verdict = merge({rank: part for rank, (_, part) in given.items()})
            else:
                codes = [part.exit_code for _, part in given.values() if isinstance(part, SessionEnd)]
                reason = "the ranks are at different places of the session\n" + merge_texts(topics)
                verdict = Stop(reason, next(filter(None, codes), _INTERNAL_ERROR))
        finally:
            for rank in range(1, self.size):
                self.send(verdict, rank)
        return verdict

    def send(self, thing: Any, dst: int) -> None:
        """Send something picklable to another rank of the meeting."""
        request = self.comm.isend(thing, dst)
        wait_politely(lambda: request.Test() or None)

    def receive(self, src: int) -> Any:
        """Return what rank `src` sent next."""
        return wait_politely(lambda: self.comm.improbe(src)).recv()
