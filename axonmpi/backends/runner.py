"""The operations of a group: run now or on its worker thread, and recorded; and the group's end.

It stands below `contract.py`, whose `Backend` has the operations, and runs them at once if nothing is queued. The
rank's record has the operations under way and their outcomes, for readers outside of the process.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import AxonmpiError, CommunicatorError
from ..record import GroupLog, NoLog, describe
from ..types import Seconds
from ..utils.arguments import check_flags, seconds
from ..utils.cache import BoundedCache
from .call import Call
from .tuning import MAX_CALLS
from .worker import Worker


class Runner(ABC):
    """One rank of a group: runs operations, and ends.

    Attributes:
        name: Short name of the kind of backend.
        rank: This process's (or thread's) number among them, from 0.
        size: How many ranks there are.
        failures: Exceptions of the transport, raised as `CommunicatorError`.
        timeout: Seconds after which a blocking collective raises `CollectiveTimeoutError`; None never does.
            With a time-out, blocking collectives run on the worker thread, which costs some microseconds each,
            unless the backend keeps the time-out by itself.
        kept_timeout: The time-out that operations keep by themselves, without the worker's thread.
        grace: Seconds after the time-out in which an operation on the worker may still raise by itself.
        notes: Writes this group's operations to the rank's record; nothing for mock ranks and ranks alone.
    """

    name: str = "backend"
    failures: tuple[type[Exception], ...] = ()
    kept_timeout: float | None = None
    grace: float = 0.0

    def __init__(self, rank: int, size: int, worker: Worker, *, timeout: Seconds | None = None) -> None:
        self.rank = rank
        self.size = size
        self.timeout = seconds("timeout", timeout)
        self.notes: GroupLog | NoLog = NoLog()
        self._closed: str | None = None
        self._told: BoundedCache[Any, bytes] = BoundedCache(MAX_CALLS)
        self._worker = worker

    # ---- life ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether operations can be called: the group has not been closed, here or by a fork."""
        return self._closed is None

    @abstractmethod
    def abort(self, code: int = 1) -> None:
        """End the whole job now, with exit code `code`; local."""

    def close(self) -> None:
        """End the worker and release the communicator; collective in effect, may be called twice.

        Raises:
            CommunicatorError: An asynchronous operation is still under way after 10 s.
        """
        if self._closed is not None:
            return
        if not self._worker.close(timeout=10.0):
            raise CommunicatorError(
                "this group still runs an asynchronous operation that the other ranks have not met; "
                "wait for every Work before closing"
            )
        self._closed = "it was closed by destroy_process_group() or close()"
        self.notes.close()
        self._release()

    def set_timeout(self, timeout: Seconds | None) -> None:
        """Change the time-out of operations from now on; local, to be done on all ranks."""
        self.timeout = seconds("timeout", timeout)

    def give_up(self, reason: str) -> None:
        """Make every later operation raise, also on ranks that wait for this one, if they can be reached; local."""
        self.invalidate(reason)

    def invalidate(self, reason: str) -> None:
        """Make every later operation raise `CommunicatorError` with `reason`; local, releases nothing."""
        self._closed = reason

    # ---- running --------------------------------------------------------------------------------------------

    def _queue(self, async_op: bool, call: Call, move: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        check_flags(async_op=async_op)
        self._check_open(call.operation)
        inference = torch.is_inference_mode_enabled()
        note = self.notes.enter(call.description)
        if call.is_free:
            self.notes.set_bytes(note, bytes_of(args[0]))
        number = self.notes.count
        self.notes.queue(note)
        args = tuple(map(_without_history, args))

        def task() -> Any:
            self.notes.start(note)
            with torch.inference_mode(inference):  # a mode is a thread's own, and tensors made in it need it
                return self._recorded(note, call.operation, move, call, *args)

        work = self._worker.submit(str(call), task, partial(self.waiting, "wait", number=number))
        if async_op:
            return work
        work.wait(None if self.timeout is None else self.timeout + self.grace)
        return work.result()

    def _execute(self, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        self._check_open(call.operation)
        return self._recorded(self.notes.enter(call.description), call.operation, move, *args)

    def _message(self, operation: str, move: Callable[..., Any], tensor: Tensor, peer: int | None, tag: int) -> Any:
        """Send or receive, or begin to; `peer` is None if any rank may send."""
        self._check_open(operation)
        kind = (operation, tensor.dtype, tensor.shape, peer, tag)
        told = self._told.get(kind)
        if told is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            told = self._told.add(kind, describe(operation, dtype, tensor.shape, None, peer, tag, tensor.nbytes))
        return self._recorded(self.notes.enter(told, 0), operation, move, tensor, peer, tag)

    def _recorded(self, note: int, operation: str, move: Callable[..., Any], *args: Any) -> Any:
        """Move data, and record in the rank's record how the operation has ended."""
        try:
            result = move(*args)
        except BaseException as error:
            self.notes.fail(note)
            if isinstance(error, self.failures):
                raise self._failure(operation, error) from error
            raise
        self.notes.leave(note)
        return result

    @contextmanager
    def waiting(
        self,
        operation: str,
        peer: int | None = None,
        nbytes: int = 0,
        *,
        tag: int = -1,
        number: int = 0,
        gives_up: bool = False,
    ) -> Iterator[None]:
        """Note in the rank's record that the block waits, or hands data over; local.

        Args:
            operation: `"wait"`, for a collective; `"wait for isend"`, `"wait for irecv"`; `"stage send"` and
                `"stage recv"`, which neither of these stands behind.
            peer: The rank of this group that is waited for, if it is known.
            nbytes: Size of the data that is handed over.
            tag: Of the message.
            number: Which of the group's collectives is waited for.
            gives_up: Whether the wait has a time limit: then it is not recorded.
        """
        check_flags(gives_up=gives_up)
        notes = NoLog() if gives_up else self.notes
        with notes.noted(describe(operation, peer=peer, tag=tag, nbytes=nbytes), number):
            yield

    def _failure(self, operation: str, error: Exception) -> AxonmpiError:
        return CommunicatorError(f"{operation} failed on rank {self.rank}: {error}")

    def _check_open(self, operation: str) -> None:
        if self._closed is not None:
            raise CommunicatorError(f"{operation}: this group cannot be used: {self._closed}")

    def give_way(self) -> None:
        """Let other ranks run for a moment; local."""
        os.sched_yield()

    @abstractmethod
    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Raise if a rank has failed, for waits that nothing else ends; local.

        Args:
            what: The waiting operation.
            peer: The rank of this group that it waits for, if that is known.

        Raises:
            RankFailedError: A rank has failed.
            CollectiveMismatchError: `peer` is a mock rank that has returned.
        """

    @abstractmethod
    def _release(self) -> None:
        """Release the communicator and its memory; collective."""


def bytes_of(argument: Tensor | Sequence[Tensor] | None) -> int:
    """Return the bytes of a tensor, or of several; local."""
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(each.nbytes for each in argument or ())


def _without_history(argument: Any) -> Any:
    """Return tensors as they are now: autograd may mark them as results while an operation is under way; local."""
    if isinstance(argument, list):
        return [_without_history(each) for each in argument]
    return argument.detach() if isinstance(argument, Tensor) else argument
