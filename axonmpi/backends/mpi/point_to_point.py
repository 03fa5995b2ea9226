"""Point-to-point messages of bytes over MPI.

Messages go out on the caller's thread. One that is too large for a single MPI call goes in several pieces, which
arrive in order; the last one is shorter. A receiver looks at a piece's size before it takes it, so a message
of another size is an error that says both sizes, never a message cut short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorError
from ...types import Seconds, Work
from ...utils.arguments import seconds
from ...utils.waiting import REQUEST_YIELDS, Backoff, wait_until
from ..buffers import buffer_of
from ..connection.rounds import TAG_OF_ROUNDS
from ..tuning import POLL_SECONDS
from ..worker import Waiting, unheard

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_OF_PAIRS = TAG_OF_ROUNDS + 1
"""Tag of messages that a collective sends from one rank to another."""
FIRST_TAG_OF_USERS = TAG_OF_PAIRS + 1
"""A group has one communicator for all messages, since an MPI library has room for few of them; all libraries have
larger tags than the 32,767 that a user may choose."""

_SAME_SIZE = "the tensors of sender and receiver must have the same dtype and number of elements"


class MessagePort:
    """Sends and receives bytes between the ranks of one communicator.

    Attributes:
        mpi: The module `mpi4py.MPI`.
        comm: Communicator of the messages.
        first_tag: MPI tag of tag 0. Ports of one communicator have disjoint ranges of MPI tags.
        abandoned: Pending requests, and their memory, of a Work that nobody has waited for.
        unmatched: Receives from any rank without a message yet, in the order of their calls.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, first_tag: int) -> None:
        self.mpi = mpi
        self.comm = comm
        self.first_tag = first_tag
        self.abandoned: list[tuple[list[Any], Tensor]] = []
        self.unmatched: list[ReceiveFromAny] = []
        self._matching = threading.Lock()

    def send(self, data: Tensor, dst: int, tag: int, limit: int) -> None:
        """Send `data` (bytes) in messages of at most `limit` bytes; returns when it may be changed."""
        if self.unmatched:
            self.send_work(data, dst, tag, limit).wait()
            return
        for piece in _pieces(data, limit):
            self.comm.Send(self.spec(piece), dst, self.first_tag + tag)

    def receive(self, data: Tensor, src: int, tag: int, limit: int) -> None:
        """Receive exactly as many bytes as `data` has."""
        arrived = 0
        for piece in _pieces(data, limit):
            message, sent = self._probe(src, tag)
            if sent != piece.numel():
                raise _wrong_size(data, src, arrived + self._drop(message, sent, src, tag, limit))
            message.Recv(self.spec(piece))
            arrived += sent

    def _probe(self, src: int, tag: int) -> tuple[Any, int]:
        """Wait for a piece; return it and its size, without receiving it."""
        status = self.mpi.Status()
        message = self.comm.Mprobe(src, self.first_tag + tag, status)
        return message, status.Get_count(self.mpi.BYTE)

    def _drop(self, message: Any, sent: int, src: int, tag: int, limit: int) -> int:
        """Receive the rest of a message that is of no use, so that the next one can come; return its size."""
        total = sent
        message.Recv([bytearray(sent), sent, self.mpi.BYTE])
        while sent == limit:
            message, sent = self._probe(src, tag)
            message.Recv([bytearray(sent), sent, self.mpi.BYTE])
            total += sent
        return total

    def start_send(self, data: Tensor, dst: int, tag: int, limit: int) -> list[Any]:
        """Begin to send `data`; returns MPI requests, which hold on to it."""
        return [self.comm.Isend(self.spec(piece), dst, self.first_tag + tag) for piece in _pieces(data, limit)]

    def start_receive(self, data: Tensor, src: int, tag: int, limit: int) -> list[Any]:
        """Begin to receive into `data`; returns MPI requests."""
        return [self.comm.Irecv(self.spec(piece), src, self.first_tag + tag) for piece in _pieces(data, limit)]

    def send_work(self, data: Tensor, dst: int, tag: int, limit: int) -> RequestWork:
        """Begin to send `data`; returns the Work."""
        self._forget_ended()
        return RequestWork(self, self.start_send(data, dst, tag, limit), data, f"isend to rank {dst}")

    def receive_work(
        self, data: Tensor, src: int | None, tag: int, limit: int, finish: Callable[[], None]
    ) -> RequestWork:
        """Begin to receive into `data`, from any rank without `src`; the Work calls `finish` once it is there."""
        self._forget_ended()
        from_any = src is None
        requests = self.start_receive(data, self.mpi.ANY_SOURCE if src is None else src, tag, limit)
        sender = "any rank" if from_any else f"rank {src}"
        return RequestWork(self, requests, data, f"irecv from {sender}", finish, from_any=from_any)

    def match_later(self, data: Tensor, tag: int, finish: Callable[[], None]) -> ReceiveFromAny:
        """Receive one message from whichever rank sends first, found by a probe while this rank waits for messages.

        MPICH 5.0 never completes some requests of `Irecv(ANY_SOURCE)` whose message comes from another node.
        """
        work = ReceiveFromAny(self, data, tag, finish)
        with self._matching:
            self.unmatched.append(work)
        return work

    def match_messages(self) -> None:
        """Match pending receives from any rank with arrived messages, in the order of the receives; local."""
        with self._matching:
            # A message that arrives after the probe of an earlier receive must not go to a later one.
            waiting_tags: set[int] = set()
            for work in self.unmatched:
                if work.tag not in waiting_tags and not self._match(work):
                    waiting_tags.add(work.tag)
            self.unmatched = [work for work in self.unmatched if not work.is_matched]

    def _match(self, work: ReceiveFromAny) -> bool:
        message = self.comm.Improbe(self.mpi.ANY_SOURCE, self.first_tag + work.tag)
        if message is not None:
            work.take(message)
        return work.is_matched

    def _forget_ended(self) -> None:
        if self.abandoned:
            self.abandoned = [entry for entry in self.abandoned if not self._has_ended(entry[0])]

    def _has_ended(self, requests: list[Any]) -> bool:
        try:
            ended: bool = self.mpi.Request.Testall(requests)
        except self.mpi.Exception:  # that it failed is of no interest to anybody
            return True
        return ended

    def spec(self, piece: Tensor) -> list[Any]:
        """Return the memory of `piece` (bytes) as mpi4py takes it."""
        return [buffer_of(self.mpi, piece), piece.numel(), self.mpi.BYTE]


class RequestWork(Work):
    """Messages under way, as MPI requests.

    Attributes:
        waiting: Makes the context manager around each wait for them.
    """

    def __init__(
        self,
        port: MessagePort,
        requests: list[Any],
        data: Tensor,
        what: str,
        finish: Callable[[], None] | None = None,
        *,
        from_any: bool = False,
    ) -> None:
        self._port = port
        self._requests = requests
        self._data: Tensor | None = data  # must live until MPI is through with it
        self._what = what
        self._finish = finish
        self._from_any = from_any
        self._error: Exception | None = None
        self.waiting: Waiting = unheard
        self._source: int | None = None

    def wait(self, timeout: Seconds | None = None) -> None:
        """Block until the messages are through; see `Work.wait`."""
        limit = seconds("timeout", timeout, positive=False)
        if not self.done():
            with self.waiting(gives_up=limit is not None):
                if limit is None and not self._port.unmatched:
                    self._ask(self._port.mpi.Request.Waitall)
                # MPI progresses only while it is polled; between polls the core belongs to others.
                elif not wait_until(self.done, Backoff(REQUEST_YIELDS, 0, POLL_SECONDS), limit):
                    raise CollectiveTimeoutError(f"{self._what} was not complete after {limit:g} s")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if the messages are through or have failed, without blocking."""
        if self._port.unmatched:
            self._port.match_messages()
        return self._ask(self._port.mpi.Request.Testall)

    def result(self) -> int | None:
        """Wait, and return the rank whose message a receive from any rank got; None for other messages."""
        self.wait()
        return self._source

    def _ask(self, are_through: Callable[[list[Any], list[Any]], bool]) -> bool:
        """Return True if the messages are complete by MPI's answer, and keep their outcome."""
        if self._data is None:
            return True
        statuses = [self._port.mpi.Status() for _ in self._requests]
        try:
            if not are_through(self._requests, statuses):
                return False
            if self._finish is not None:
                source = statuses[0].Get_source()
                received = sum(status.Get_count(self._port.mpi.BYTE) for status in statuses)
                if received != self._data.numel():
                    raise _wrong_size(self._data, source, received)
                self._source = source if self._from_any else None
                self._finish()
        except self._port.mpi.Exception as error:
            self._error = self._failure(error, statuses)
        except Exception as error:
            self._error = error
        self._data = None
        return True

    def _failure(self, error: Any, statuses: list[Any]) -> Exception:
        codes = [error.Get_error_code(), *(status.Get_error() for status in statuses)]
        mpi = self._port.mpi
        if self._data is not None and any(mpi.Get_error_class(code) == mpi.ERR_TRUNCATE for code in codes):
            failure: Exception = CollectiveMismatchError(
                f"{self._what}: expected {self._data.numel()} bytes, more were sent; {_SAME_SIZE}"
            )
        else:
            failure = CommunicatorError(f"{self._what} failed: {error}")
        failure.__cause__ = error
        return failure

    def __del__(self) -> None:
        if self._data is not None:  # nobody waited, but MPI still reads or writes the memory
            self._port.abandoned.append((self._requests, self._data))


class ReceiveFromAny(RequestWork):
    """A receive from whichever rank sends first, without a request until its message has come.

    Attributes:
        tag: Of the message.
    """

    def __init__(self, port: MessagePort, data: Tensor, tag: int, finish: Callable[[], None]) -> None:
        super().__init__(port, [], data, "irecv from any rank", finish, from_any=True)
        self.tag = tag

    @property
    def is_matched(self) -> bool:
        """Whether a message is matched with this receive; its data may still be arriving."""
        return bool(self._requests)

    def take(self, message: Any) -> None:
        """Begin to receive a message that a probe has found."""
        assert self._data is not None
        self._requests = [message.Irecv(self._port.spec(self._data))]

    def _ask(self, are_through: Callable[[list[Any], list[Any]], bool]) -> bool:
        return self.is_matched and super()._ask(are_through)

    def __del__(self) -> None:
        if self.is_matched:
            super().__del__()


def _pieces(data: Tensor, limit: int) -> tuple[Tensor, ...]:
    """Cut a message; the last piece is shorter than `limit`, which tells the receiver that it is the last."""
    pieces = data.split(limit)
    return pieces if data.numel() % limit or not data.numel() else (*pieces, data[:0])


def _wrong_size(data: Tensor, src: int, sent: int) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"recv: expected {data.numel()} bytes from rank {src}, which sent {sent}; {_SAME_SIZE}"
    )
