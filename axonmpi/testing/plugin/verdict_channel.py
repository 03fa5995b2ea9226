"""Messages between the ranks of a test session, by which rank 0 merges their results into verdicts.

    rank 1 ── topic, result ─┐                        ┌─ verdict
    rank 2 ── topic, result ─┼─ rank 0 merges them ───┼─ verdict
    rank 3 ── topic, result ─┘                        └─ verdict

The channel has its own communicator, so that a test's message is never taken for a result. Its waits leave the core
to other ranks. If ranks are at different topics (one at a test, another at the end of its session), the verdict
stops all of them, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...utils.text import first_difference
from ...utils.waiting import Backoff, wait_until
from ..merged_texts import merge_texts

if TYPE_CHECKING:
    from mpi4py import MPI

_INTERNAL_ERROR, _USAGE_ERROR = 3, 4


class SessionStoppedError(Exception):
    """The verdict that ends the session, and the error that it raises.

    Args:
        reason: Text for the user.
        exit_code: Exit code of every rank's pytest.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason, exit_code)
        self.reason = reason
        self.exit_code = exit_code


@dataclass(frozen=True)
class SessionEnd:
    """A rank's result at the end of its session.

    Attributes:
        exit_code: Exit code of the rank's pytest.
        warnings: The warnings of the rank.
    """

    exit_code: int
    warnings: tuple[str, ...] = ()


class VerdictChannel:
    """The channel between all ranks of a communicator.

    Args:
        comm: The communicator, which only this channel uses.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._others = range(1, comm.Get_size())

    def agree(self, topic: str, own: Any, merge: Callable[[dict[int, Any]], Any]) -> Any:
        """Send this rank's result, and return the verdict of rank 0's `merge`; collective.

        Args:
            topic: The point of the session; where ranks differ, the verdict is to stop.
            own: This rank's result, picklable.
            merge: Makes the verdict of the results by rank, on rank 0; may return a `SessionStoppedError`.

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
        """Receive the results, merge them and send the verdict to the others."""
        received = {0: (topic, own)} | {rank: self._receive(rank) for rank in self._others}
        verdict: Any = SessionStoppedError("rank 0 failed while it merged the ranks' results", _INTERNAL_ERROR)
        try:
            topics = {rank: other for rank, (other, _) in received.items()}
            if len(set(topics.values())) == 1:
                verdict = merge({rank: result for rank, (_, result) in received.items()})
            else:
                codes = [result.exit_code for _, result in received.values() if isinstance(result, SessionEnd)]
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
    # MPI has no wait that leaves the core free, so this polls; a tenth of the waiting time is no loss.
    return Backoff(100, shortest=0.0002, longest=0.01)


def merge_collected(collected: Mapping[int, Sequence[str]]) -> SessionStoppedError | None:
    """Return an error if the ranks did not collect the same tests, else None; local.

    Args:
        collected: By rank, the errors of the collection, then the ids of the tests in their order.
    """
    difference = first_difference([collected[rank] for rank in sorted(collected)])
    if not difference:
        return None
    return SessionStoppedError(
        "the ranks did not collect the same tests in the same order, so they cannot run them together. "
        "Does something that differs from rank to rank decide what is collected (a random order, the order of a "
        f"set, the time, the rank)? The first difference is\n  {difference}",
        _USAGE_ERROR,
    )
