"""Handles of operations for torch: `torch.distributed.Work` over this library's `Work`.

An asynchronous collective runs on its group's thread, which completes the future at its end. A message runs without
a thread, and gets a future only when a program asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.futures import Future

from ..backends import WorkerWork
from ..types import Work


class TorchWork(dist.Work):
    """The handle of an operation.

    Args:
        work: The operation.
        tensors: Its results, or the tensors that it sends.
        timeout: Default limit of `wait` in seconds; None waits as long as it takes.
        future: A future that the operation itself completes; None for messages.
        may_wait_beside: Whether another thread may wait for the operation.
    """

    def __init__(
        self,
        work: Work,
        tensors: Sequence[Tensor] = (),
        timeout: float | None = None,
        future: Future[Any] | None = None,
        *,
        may_wait_beside: bool = True,
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = list(tensors)
        self._timeout = timeout
        self._future = future
        self._may_wait_beside = may_wait_beside

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is complete; torch's "no time-out" is one of zero.

        Raises:
            CollectiveTimeoutError: Not complete in time.
            Exception: The operation's own error.
        """
        if self._is_in_callback():
            self.get_future().wait()
        else:
            self._work.wait(timeout.total_seconds() if timeout else self._timeout)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future whose value is the list of tensors.

        Raises:
            RuntimeError: The message is not complete, and MPI may be called by one thread at a time only.
        """
        if self._future is None:
            if not (self._may_wait_beside or self._work.done()):
                raise RuntimeError(
                    "get_future: a thread would wait for the message, but MPI was started for one thread at a "
                    "time; use wait(), or start MPI at MPI_THREAD_MULTIPLE"
                )
            self._future = Future()
            if self._work.done():
                self._complete()
            else:  # a message makes progress only while a thread waits for it
                threading.Thread(target=self._complete, name="axonmpi-future", daemon=True).start()
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        complete_with(self._future, lambda: self._work.wait(self._timeout), self._tensors)

    def is_completed(self) -> bool:
        """Return True if the operation is complete or has failed, without blocking."""
        return self._is_in_callback() or self._work.done()

    def _is_in_callback(self) -> bool:
        """Return True in a callback of the future, which runs before the operation counts as complete; local."""
        is_own_thread = isinstance(self._work, WorkerWork) and self._work.is_own_thread
        return is_own_thread and self._future is not None and self._future.done()

    def is_success(self) -> bool:
        """Return True if the operation is complete and has not failed, without blocking."""
        return self._work.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the operation's error; None if it has none, or is not complete."""
        if not self._work.done():
            return None
        try:
            self._work.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        """Return the results, which are complete after `wait` only."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait: the CPU has no streams to order."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Wait, then return the source of a receive from any rank."""
        source = self._work.result()
        if not isinstance(source, int):
            raise ValueError("source_rank: expected a receive from any rank, got another operation")
        return source

    _source_rank = source_rank


def complete_with(future: Future[Any], operation: Callable[[], object], value: object) -> Exception | None:
    """Run an operation, complete a future with a value or the operation's error, and return the error; local."""
    try:
        operation()
    except Exception as error:
        future.set_exception(error)
        return error
    future.set_result(value)
    return None
