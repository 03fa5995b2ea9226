"""Where all ranks of a test session agree on what happened.

    rank 1 ── topic, own part ─┐                        ┌─ verdict
    rank 2 ── topic, own part ─┼─ rank 0 merges them ───┼─ verdict
    rank 3 ── topic, own part ─┘                        └─ verdict

The ranks use a communicator of their own, so that no message of a test is mistaken for an answer, and they wait
without using their core, since another rank may be at work on it. Ranks that come to different topics (one is at a
test, another has ended its session) are all told to stop, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...utils.waiting import Backoff, wait_until
from ..merged_texts import merge_texts

if TYPE_CHECKING:
    from mpi4py import MPI

_INTERNAL_ERROR = 3


class SessionStoppedError(Exception):
    """The ranks agreed to end the session: also the verdict that says so.

    Args:
        reason: What to tell the user.
        exit_code: What the pytest of every rank ends with.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason, exit_code)
        self.reason = reason
        self.exit_code = exit_code


@dataclass(frozen=True)
class SessionEnd:
    """What a rank gives to a meeting when its session is over.

    Attributes:
        exit_code: What its pytest ends with.
        warnings: The warnings that it has seen.
    """

    exit_code: int
    warnings: tuple[str, ...] = ()


class VerdictChannel:
    """Agreement between all ranks of a communicator.

    Args:
        comm: Used by nobody else; rank 0 merges.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._others = range(1, comm.Get_size())

    def agree(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Give this rank's part, return what rank 0's `merge` made of the parts by rank; collective.

        Args:
            topic: What this is about; the same on all ranks, or all are told to stop.
            own: This rank's part, picklable.
            merge: Called on rank 0 only; may return a `SessionStoppedError`.

        Raises:
            SessionStoppedError: The verdict is to stop.
        """
        if self.comm.Get_rank() == 0:
            verdict = self._lead(topic, own, merge)
        else:
            self._send((topic, own), 0)
            verdict = self._receive(0)
        if isinstance(verdict, SessionStoppedError):
            raise verdict
        return verdict

    def _lead(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Collect the parts, merge them and tell the others."""
        given = {0: (topic, own)} | {rank: self._receive(rank) for rank in self._others}
        verdict: Any = SessionStoppedError("rank 0 failed while it merged what the ranks said", _INTERNAL_ERROR)
        try:
            topics = {rank: said for rank, (said, _) in given.items()}
            if len(set(topics.values())) == 1:
                verdict = merge({rank: part for rank, (_, part) in given.items()})
            else:
                codes = [part.exit_code for _, part in given.values() if isinstance(part, SessionEnd)]
                reason = "the ranks are at different places of the session\n" + merge_texts(topics)
                verdict = SessionStoppedError(reason, next(filter(None, codes), _INTERNAL_ERROR))
        finally:
            for rank in self._others:
                self._send(verdict, rank)
        return verdict

    def _send(self, thing: Any, dst: int) -> None:
        wait_until(self.comm.isend(thing, dst).Test, _backoff())

    def _receive(self, src: int) -> Any:
        wait_until(lambda: self.comm.iprobe(src), _backoff())
        return self.comm.recv(source=src)


def _backoff() -> Backoff:
    # MPI offers no way to wait without polling that leaves the core free; what comes a tenth late is no loss.
    return Backoff(100, shortest=0.0002, longest=0.01)
