"""The thread that runs a group's asynchronous operations, one after the other.

MPI libraries hardly progress a non-blocking collective unless somebody polls it, but release Python's lock
while they block. So an asynchronous operation is a blocking one on a thread of its own: one thread for each
group, started by its first asynchronous operation, and operations run in the order in which they were started.

An operation in steps waits for a network most of the time: up to three of these, one after the other in the queue,
are under way at once. They begin and are complete in order, and any other operation waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import CollectiveTimeoutError, RankFailedError
from ..types import Observer, Seconds, Work
from ..utils.arguments import seconds
from ..utils.waiting import Steps, compute_beside, network_backoff
from .tuning import OPERATIONS_UNDER_WAY

__all__ = ["AtOnce", "Worker", "WorkerWork"]


class WorkerWork(Work):
    """An operation queued on, or run by, a worker thread."""

    def __init__(
        self, operation: str, task: Callable[[], Any], observer: Observer | None = None, *, in_steps: bool = False
    ) -> None:
        self.operation = operation
        self._observer = observer
        self.in_steps = in_steps
        self._task: Callable[[], Any] | None = task
        self._steps: Steps[Any] | None = None
        self._finished = threading.Lock()
        self._finished.acquire()
        self._complete = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._error_seen = False

    def run(self) -> None:
        """Run the operation, or begin one in steps, and keep its value or its error; called by the worker."""
        assert self._task is not None
        try:
            value = self._task()
            if self.in_steps:
                self._steps = value
            else:
                self._value = value
        except BaseException as error:
            self._error = error
        finally:
            self._task = None  # the tensors it holds are the caller's to free

    def advance(self) -> bool:
        """Do a step of an operation in steps; say whether it got on. Called by the worker."""
        assert self._steps is not None
        try:
            return next(self._steps)
        except StopIteration as end:
            self._value = end.value
        except BaseException as error:
            self._error = error
        self._steps = None
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether there are steps to do."""
        return self._steps is not None

    def finish(self) -> None:
        """Release the threads that wait; called by the worker after `run`."""
        self._complete = True
        self._finished.release()

    def wait(self, timeout: Seconds | None = None) -> None:
        """Block until the operation is complete; see `Work.wait`."""
        if not self._complete:
            limit = seconds("timeout", timeout, positive=False)
            if self._observer is None:
                self._block(limit)
            else:
                self._observer.enter("wait", 0)
                try:
                    self._block(limit)
                finally:
                    self._observer.leave("wait")
        if self._error is not None:
            self._error_seen = True
            raise self._error

    def _block(self, timeout: float | None) -> None:
        limit = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        if not self._finished.acquire(timeout=limit):
            raise CollectiveTimeoutError(
                f"{self.operation} was not complete after {timeout:g} s: another rank has not called it, "
                "or is still computing"
            )
        self._finished.release()

    def done(self) -> bool:
        """Say whether the operation is complete or has failed."""
        return self._complete

    def result(self) -> Any:
        """Wait, then return the operation's value."""
        self.wait()
        return self._value

    def __del__(self) -> None:
        # Nobody waited for it: Python prints it as an unraisable error. A rank that failed tells by itself.
        if self._error is not None and not self._error_seen and not isinstance(self._error, RankFailedError):
            raise self._error


class Worker:
    """One thread and its queue; the thread starts with the first operation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[WorkerWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.started = 0  # written by callers only
        self.ended = 0  # written by the thread only
        self._next: WorkerWork | None = None
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether an operation is queued or running."""
        return self.started != self.ended

    def submit(
        self, operation: str, task: Callable[[], Any], observer: Observer | None = None, *, in_steps: bool = False
    ) -> WorkerWork:
        """Queue `task` behind the operations already there.

        Args:
            operation: What to call it.
            task: Does it; returns its value.
            observer: Told about each wait for it.
            in_steps: Whether `task` returns the operation's steps: then the next one of this kind may begin while
                it is under way.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        work = WorkerWork(operation, task, observer, in_steps=in_steps)
        self.started += 1
        self._queue.put(work)
        return work

    def close(self, timeout: float) -> bool:
        """End the thread after the operations already queued; False if it is still busy after `timeout` seconds."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._queue.put(None)
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self._thread = None if ended else self._thread
        return ended

    def _loop(self) -> None:
        compute_beside()
        self._closing = False
        under_way: deque[WorkerWork] = deque()
        backoff = network_backoff()
        while self._take_in(under_way):
            if self._advance(under_way):
                backoff.reset()
            elif under_way:
                backoff.rest()

    def _take_in(self, under_way: deque[WorkerWork]) -> bool:
        """Begin the next operation if it may begin beside those under way; False if there is no more to do."""
        if self._next is None and not self._closing and (not under_way or not self._queue.empty()):
            self._next = self._queue.get()
            self._closing = self._next is None
        work = self._next
        if work is not None and (not under_way or (work.in_steps and len(under_way) < OPERATIONS_UNDER_WAY)):
            self._next = None  # or the last operation's tensors would live until the next one
            work.run()
            under_way.append(work)
        return bool(under_way) or not self._closing

    def _advance(self, under_way: deque[WorkerWork]) -> bool:
        """Do a step of each operation, end those that are complete; say whether anything got on."""
        moved = False
        for work in under_way:
            moved |= work.is_under_way and work.advance()
        while under_way and not under_way[0].is_under_way:
            work = under_way.popleft()
            self.ended += 1  # before the thread that waits goes on, so that its next operation finds an idle worker
            work.finish()
            moved = True
        return moved


class AtOnce:
    """In place of a worker: runs operations when they are submitted."""

    started = ended = 0

    def submit(
        self, operation: str, task: Callable[[], Any], observer: Observer | None = None, *, in_steps: bool = False
    ) -> Work:
        """Run the operation; local."""
        work = WorkerWork(operation, task, observer)
        work.run()
        work.finish()
        return work

    def close(self, timeout: float) -> bool:
        """Nothing is ever under way."""
        return True
