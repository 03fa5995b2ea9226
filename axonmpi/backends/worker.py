"""The thread that runs a group's asynchronous operations, one after the other.

MPI libraries hardly progress a non-blocking collective unless somebody polls it, but release Python's lock
while they block. So an asynchronous operation is a blocking one on a thread of its own: one thread for each
group, started by its first asynchronous operation, and operations run in the order in which they were started.
Operations that begin on that thread, in a callback of one of torch's futures, run at once, before those that are
queued: so the order is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import CollectiveTimeoutError, RankFailedError
from ..types import Seconds, Work
from ..utils.arguments import seconds
from ..utils.torch_internals import skip_in_compile
from ..utils.waiting import compute_beside
from .call_site import call_site, called_at

Waiting = Callable[..., AbstractContextManager[None]]
"""Makes the context manager around a wait, which records it: `waiting(gives_up=...)`, whether it has a limit."""


def unheard(*, gives_up: bool) -> AbstractContextManager[None]:
    """Tell nobody of a wait; local."""
    return nullcontext()


class WorkerWork(Work):
    """An operation queued on, or run by, a worker thread."""

    def __init__(self, operation: str, task: Callable[[], Any], waiting: Waiting, worker: Worker) -> None:
        self.operation = operation
        self._waiting = waiting
        self._worker = worker
        self._task: Callable[[], Any] | None = task
        self._site = call_site()
        self._finished = threading.Lock()
        self._finished.acquire()
        self._complete = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._error_seen = False

    def run(self) -> None:
        """Run the operation, and keep its value or its error; called by the worker."""
        assert self._task is not None
        try:
            with called_at(self._site):
                self._value = self._task()
        except BaseException as error:
            self._error = error
        finally:
            self._task = None  # the tensors it holds are the caller's to free

    def finish(self) -> None:
        """Release the threads that wait; called by the worker after `run`."""
        self._complete = True
        self._finished.release()

    @skip_in_compile
    def wait(self, timeout: Seconds | None = None) -> None:
        """Block until the operation is complete; see `Work.wait`."""
        if not self._complete and self.is_own_thread:
            self._worker.run_until(self)
        if not self._complete:
            limit = seconds("timeout", timeout, positive=False)
            with self._waiting(gives_up=limit is not None):
                self._block(limit)
        if self._error is not None:
            self._error_seen = True
            raise self._error

    def _block(self, timeout: float | None) -> None:
        limit = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        waiters = self._worker.waiters
        waiters.add(threading.get_ident())
        try:
            finished = self._finished.acquire(timeout=limit)
        finally:
            waiters.discard(threading.get_ident())
        if not finished:
            raise CollectiveTimeoutError(
                f"{self.operation} was not complete after {timeout:g} s: another rank has not called it, "
                "or is still computing"
            )
        self._finished.release()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread that runs the operation."""
        return self._worker.is_current

    def done(self) -> bool:
        """Return True if the operation is complete or has failed."""
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
    """One thread and its queue; the thread starts with the first operation.

    Attributes:
        waiters: Ids of the threads that wait for an operation.
        started: Number of operations that were queued.
        ended: Number of them that are over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[WorkerWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.waiters: set[int] = set()
        self.started = 0  # written by callers only
        self.ended = 0  # written by the thread only

    @property
    def busy(self) -> bool:
        """Whether an operation is queued or running."""
        return self.started != self.ended

    @property
    def is_current(self) -> bool:
        """Whether this is the worker's thread."""
        return self._thread is threading.current_thread()

    def submit(self, operation: str, task: Callable[[], Any], waiting: Waiting = unheard) -> WorkerWork:
        """Queue `task` behind the operations already there, or run it now, on the worker's thread.

        Args:
            operation: Its name.
            task: Does it; returns its value.
            waiting: Makes a context manager for each wait for it.
        """
        work = WorkerWork(operation, task, waiting, self)
        if self.is_current:
            work.run()
            work.finish()
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self.started += 1
        self._queue.put(work)
        return work

    def run_until(self, wanted: WorkerWork) -> None:
        """Run operations until this one is complete; on the worker's thread, within an operation.

        Raises:
            RuntimeError: It is the operation within which this is called, or an earlier one.
        """
        while not wanted.done():
            if not self._run_next():
                self._queue.put(None)
                raise RuntimeError(f"{wanted.operation} cannot be waited for by what it runs itself")

    def close(self, timeout: float) -> bool:
        """End the thread after the operations already queued; False if it is still busy after `timeout` seconds."""
        if self._thread is None or self.is_current:
            return True
        self._queue.put(None)
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self._thread = None if ended else self._thread
        return ended

    def _loop(self) -> None:
        compute_beside(self.waiters)
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next operation, once there is one; False if there will be none."""
        work = self._queue.get()
        if work is None:
            return False
        work.run()
        self.ended += 1  # before the thread that waits goes on, so that its next operation finds an idle worker
        work.finish()
        return True


class AtOnce(Worker):
    """A worker without a thread: it runs operations when they are submitted, on the thread that submits them.

    Args:
        always: Whether blocking operations have to be submitted, too.
    """

    is_current = True

    def __init__(self, *, always: bool = False) -> None:
        super().__init__("")
        self.started = int(always)
