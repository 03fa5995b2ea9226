"""Point-to-point messages of bytes over MPI (layer 2).

Messages go out on the caller's thread. One larger than what a single MPI call may carry goes in several, which
arrive in order. A receiver looks at a message's size before it takes it, so one of another size is an error
that says both sizes, never a message cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorError
from ..types import Work

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MessagePort", "RequestWork", "buffer_of"]

_POLL_SECONDS = 0.0005


def buffer_of(mpi: Any, tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor as a buffer for MPI; the tensor must outlive it."""
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class MessagePort:
    """Sends and receives bytes between the ranks of one communicator."""

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._mpi = mpi
        self.comm = comm

    def send(self, data: Tensor, dst: int, tag: int, limit: int) -> None:
        """Send `data` (bytes) in messages of at most `limit` bytes; returns when it may be changed."""
        for piece in _pieces(data, limit):
            self.comm.Send(self._spec(piece), dst, tag)

    def receive(self, data: Tensor, src: int, tag: int, limit: int) -> None:
        """Receive exactly as many bytes as `data` has."""
        for piece in _pieces(data, limit):
            status = self._mpi.Status()
            message = self.comm.Mprobe(src, tag, status)
            sent = status.Get_count(self._mpi.BYTE)
            if sent != piece.numel():
                message.Recv([bytearray(sent), sent, self._mpi.BYTE])
                raise _wrong_size(data, src, sent)
            message.Recv(self._spec(piece))

    def start_send(self, data: Tensor, dst: int, tag: int, limit: int) -> list[Any]:
        """Begin to send `data`; returns MPI requests, which hold on to it."""
        return [self.comm.Isend(self._spec(piece), dst, tag) for piece in _pieces(data, limit)]

    def start_receive(self, data: Tensor, src: int, tag: int, limit: int) -> list[Any]:
        """Begin to receive into `data`; returns MPI requests."""
        return [self.comm.Irecv(self._spec(piece), src, tag) for piece in _pieces(data, limit)]

    def send_work(self, data: Tensor, dst: int, tag: int, limit: int) -> Work:
        """Begin to send `data`; returns the Work."""
        return RequestWork(self._mpi, self.start_send(data, dst, tag, limit), data, f"isend to rank {dst}")

    def receive_work(self, data: Tensor, src: int, tag: int, limit: int, finish: Callable[[], None]) -> Work:
        """Begin to receive into `data`; the Work calls `finish` once it is there."""
        requests = self.start_receive(data, src, tag, limit)

        def check(received: int) -> None:
            if received != data.numel():
                raise _wrong_size(data, src, received)
            finish()

        return RequestWork(self._mpi, requests, data, f"irecv from rank {src}", check)

    def _spec(self, piece: Tensor) -> list[Any]:
        return [buffer_of(self._mpi, piece), piece.numel(), self._mpi.BYTE]


class RequestWork(Work):
    """Messages under way, as MPI requests."""

    def __init__(
        self,
        mpi: Any,
        requests: list[Any],
        data: Tensor,
        what: str,
        complete: Callable[[int], None] | None = None,
    ) -> None:
        self._mpi = mpi
        self._requests = requests
        self._data: Tensor | None = data  # must live until MPI is through with it
        self._what = what
        self._complete = complete

    def wait(self, timeout: float | None = None) -> None:
        """Block until the messages are through; see `Work.wait`."""
        if self._data is None:
            return
        if timeout is None:
            self._finish(self._wait_all)
            return
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what} was not complete after {timeout:g} s")
            # Polling is what makes MPI progress; between polls the core belongs to others.
            time.sleep(_POLL_SECONDS)

    def done(self) -> bool:
        """Say whether the messages are through, without blocking."""
        if self._data is None:
            return True
        statuses = [self._mpi.Status() for _ in self._requests]
        if not self._mpi.Request.Testall(self._requests, statuses):
            return False
        self._finish(lambda: statuses)
        return True

    def result(self) -> None:
        """Wait; messages have no value of their own."""
        self.wait()

    def _wait_all(self) -> list[Any]:
        statuses = [self._mpi.Status() for _ in self._requests]
        self._mpi.Request.Waitall(self._requests, statuses)
        return statuses

    def _finish(self, statuses: Callable[[], list[Any]]) -> None:
        try:
            ended = statuses()
        except self._mpi.Exception as error:
            raise CommunicatorError(f"{self._what}: {error}; is the message of the size expected?") from error
        finally:
            self._data = None
        if self._complete is not None:
            self._complete(sum(status.Get_count(self._mpi.BYTE) for status in ended))


def _pieces(data: Tensor, limit: int) -> tuple[Tensor, ...]:
    return data.split(limit) if data.numel() else (data,)


def _wrong_size(data: Tensor, src: int, sent: int) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"recv: expected {data.numel()} bytes from rank {src}, which sent {sent}; "
        "the tensors of sender and receiver must have the same dtype and number of elements"
    )
