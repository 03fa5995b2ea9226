"""The end of a rank, and of the job with it: uncaught errors, atexit, exit codes (85 of a preempted run too).

Once MPI runs with several ranks, a rank that fails does not leave the others waiting:

    an exception nobody caught, in any thread    one traceback, prefixed with the rank, then MPI_Abort
    ctrl-C, a launch that cannot work            the same, from rank 0
    sys.exit(3), raise SystemExit(3)             code 3 for the whole job, unless all ranks end at the same time
    the end of the program                       waits for the other ranks' ends, then MPI_Finalize
    sys.exit(85)                                 the same: the job has stopped early, to be started again
    os._exit, a signal, a crash                  nothing: the launcher sees it and ends the job

A single rank ends as any Python program does, after MPI_Finalize.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from ..errors import LaunchError, RankFailedError
from ..record.files import enter_phase, phase
from ..record.layout import Phase
from ..utils.pipes import wait_until_read
from ..utils.waiting import Backoff, wait_until
from .exit_code import observe_exit_code
from .segments import remove_segments

REQUEUE_EXIT_CODE = 85
"""Exit code of a job that has stopped early, with a checkpoint, and wants to be started again (ERESTART)."""
FAILED_END_SECONDS = 1.0
"""Time that a rank that ends with an error waits for the other ranks' ends before it aborts the job."""
PATIENCE_SECONDS = 10.0
"""Time that a rank waits at its end before it prints a message."""
CLOSING_SECONDS = 5.0
"""Time limit of all functions of `before_finalize` together."""
ABORT_SECONDS = 3.0
"""Time limit of MPI_Abort; then the process ends by itself, which the launcher notices."""
CAUSE_SECONDS = 1.5
"""Time that a rank waits for another rank, which failed before or with it, to print its error and end the job."""
FIRST_SECONDS = 3.0
"""Time that a process that does not print an error waits for the first process to print it."""
READ_SECONDS = 0.5
"""Time that an aborting rank waits for the launcher to read its output."""

_NO_FAILURE = (0, REQUEUE_EXIT_CODE)
_OF_ALL_RANKS = (KeyboardInterrupt, LaunchError)
"""Errors that all ranks raise at the same time: rank 0 prints them."""

_before_finalize: list[Callable[[], None]] = []
_at_failure: list[Callable[[], object]] = []
_job: _Job | None = None


def before_finalize(callback: Callable[[], None]) -> None:
    """Register a function to call at the end of the program, before MPI is finalised; local.

    The last registered is called first. If one raises, or all together take more than 5 seconds, the job is
    aborted: a thread that is inside MPI while MPI is finalised crashes the process.
    """
    _before_finalize.append(callback)


def at_failure(callback: Callable[[], object]) -> None:
    """Register a function to call before this rank aborts the job, from any thread; its errors are lost; local."""
    _at_failure.append(callback)


def install(mpi: Any, *, finalize: bool) -> None:
    """Control the end of this process; local, does nothing when called again.

    Args:
        mpi: The module `mpi4py.MPI`, initialised.
        finalize: Finalise MPI at the end; False if the program itself has started MPI.
    """
    global _job
    if _job is not None:
        return
    _job = _Job(mpi, finalize)
    atexit.register(_job.end)
    if _job.size > 1:
        sys.excepthook = _job.on_exception
        threading.excepthook = _job.on_thread_exception
        observe_exit_code(_job.on_system_exit)


def set_end_communicator(comm: Any) -> None:
    """Use a duplicate of `comm` for the barrier at the end of the program; collective over `comm`."""
    assert _job is not None
    if _job.comm is None:
        _job.join(comm.Dup())


def silence_launch_error() -> None:
    """Print no traceback of an uncaught LaunchError, unless this process is one of several ranks; local."""
    if _job is not None and _job.size > 1:
        return
    hook = sys.excepthook

    def quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, LaunchError):
            wait_for_first_report()
        else:
            hook(kind, error, trace)

    sys.excepthook = quiet


def wait_for_first_report() -> None:
    """Wait for another process to print the error: the first process to end may end the whole job; local.

    Ranks of one MPI world end together, so they need not wait.
    """
    if _job is None or _job.size == 1:
        time.sleep(FIRST_SECONDS)


def expect_common_end() -> None:
    """Declare that all ranks end now: a rank with an error waits for the others without limit; local."""
    assert _job is not None
    _job.all_end = True


def end_job(code: int, reason: str = "") -> NoReturn:
    """Print the reason and end the whole job now, from any thread, whatever the other ranks do; local."""
    if _job is None:
        end_process(code)
    _job.write(reason)
    _job.abort(code)


def end_process(code: int) -> NoReturn:
    """End this process now, from any thread, if no launcher or MPI is left to end the job; local."""
    remove_segments(at_abort=True)
    os._exit(code)


class _Job:
    """The job of this rank, and the ways to end it.

    Attributes:
        size: Number of ranks.
        comm: Communicator of the barrier at the end; None without one.
        is_part: True if other ranks of the job are not in `comm`.
        all_end: True if all ranks end, so that a rank waits for the others whatever its exit code.
    """

    def __init__(self, mpi: Any, finalize: bool) -> None:
        self.size: int = mpi.COMM_WORLD.Get_size()
        self.comm: Any = None
        self.is_part = False
        self.all_end = False
        self._has_waited = False
        self._mpi = mpi
        self._finalize = finalize
        self._rank: int = mpi.COMM_WORLD.Get_rank()
        self._name = f"[rank {self._rank}] " if self.size > 1 else ""
        self._pid = os.getpid()
        self._code: int | None = None
        self._exception_hook = sys.excepthook
        self._thread_hook = threading.excepthook

    def join(self, comm: Any) -> None:
        """Belong to the world of a communicator, which may be a part of the job."""
        rank, size = comm.Get_rank(), comm.Get_size()
        self.comm = comm
        self.is_part = size < self.size
        if self.is_part or rank != self._rank:
            self._name = f"[rank {rank} of {size}, rank {self._rank} of MPI] "

    # ---- the ways to end ------------------------------------------------------------------------------------

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replace `sys.excepthook`: print the traceback and end the job."""
        if self._is_out():
            self._exception_hook(kind, error, trace)
            return
        if isinstance(error, RankFailedError) or (self._rank and isinstance(error, _OF_ALL_RANKS)):
            time.sleep(CAUSE_SECONDS)  # the launcher ends this process when the other rank ends the job
        self._print_error(lambda: self._exception_hook(kind, error, trace), error)
        self.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def on_thread_exception(self, args: threading.ExceptHookArgs, /) -> None:
        """Replace `threading.excepthook`: the same, except that SystemExit ends the thread only."""
        if self._is_out() or issubclass(args.exc_type, SystemExit):
            self._thread_hook(args)
            return
        self._print_error(lambda: self._thread_hook(args), args.exc_value)
        self.abort(1)

    def on_system_exit(self, code: object) -> object:
        """Keep the exit code that the interpreter asks for; return the code for the interpreter to use."""
        if self._is_out():
            return code
        if code is not None and not isinstance(code, int):
            self.write(str(code))
            code = 1
        self._code = (code or 0) & 0xFF
        if not self._waits_for_others(self._code):
            # Python is about to wait for the program's other threads, and they may be waiting for other ranks.
            self._wait_or_abort(self._code)
            self._has_waited = True
        return code

    def end(self) -> None:
        """Wait for the other ranks and finalise MPI, or abort the job; called when the interpreter ends."""
        enter_phase(Phase.ENDING)
        if self._is_out():
            return
        code = self._exit_code()
        try:
            if not self._has_waited:
                self._wait_or_abort(code)
            self.all_end = True
            self._wait_or_abort(code)  # again: ranks that waited in `on_system_exit` have waited for threads since
            self._run_callbacks(code)
            if (run := sys.modules.get("mpi4py.run")) is not None:
                run.set_abort_status(0)  # `python -m mpi4py` aborts at every other exit code, 85 too
            if self._finalize:
                self._mpi.Finalize()
            gc.freeze()  # or the interpreter's last collection would visit all objects of torch
        except KeyboardInterrupt:
            self.abort(130)

    def abort(self, code: int) -> NoReturn:
        """End the whole job; from any thread."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        wait_until_read((1, 2), READ_SECONDS)  # the launcher may drop unread output when the job is aborted
        remove_segments(at_abort=True)
        for callback in _at_failure:
            with contextlib.suppress(Exception):
                callback()
        # MPI_Abort can hang while other threads are inside MPI, and it keeps Python's lock.
        _end_after(ABORT_SECONDS)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    # ---- steps ----------------------------------------------------------------------------------------------

    def _exit_code(self) -> int:
        if self._code is not None:
            return self._code
        hook_was_replaced = self.size > 1 and sys.excepthook != self.on_exception
        return int(hook_was_replaced and getattr(sys, "last_value", None) is not None)

    def _waits_for_others(self, code: int) -> bool:
        """Return True if a rank with this exit code waits for the other ranks without limit."""
        return code in _NO_FAILURE or self.all_end

    def _wait_or_abort(self, code: int) -> None:
        if not self._all_ranks_end(code):
            others = "may go on" if self.is_part else "go on"
            self.write(f"has ended with exit code {code} while other ranks {others}, and ends the job")
            self.abort(code or 1)

    def _all_ranks_end(self, code: int) -> bool:
        """Wait for the ends of all ranks, after an error for a moment only; return True if all have ended."""
        if self.size == 1:
            return True
        if self.is_part and code not in _NO_FAILURE:
            return False  # the ranks outside of the world go on
        if self.comm is None:
            return code in _NO_FAILURE  # MPI_Finalize waits as well, at the cost of a core
        has_time = self._waits_for_others(code)
        backoff = Backoff(0, 1e-4, 0.02)  # the other ranks may need this core
        try:
            with phase(Phase.ENDING):
                all_have_ended = self.comm.Ibarrier().Test
                if wait_until(all_have_ended, backoff, PATIENCE_SECONDS if has_time else FAILED_END_SECONDS):
                    return True
                if not has_time:
                    return False
                self.write("has come to the end of its program and waits for the other ranks")
                return wait_until(all_have_ended, backoff)
        except self._mpi.Exception as error:
            self.write(f"could not wait for the other ranks' ends: {error}")
            return False

    def _run_callbacks(self, code: int) -> None:
        """Run the functions of `before_finalize`; abort if one fails, end the process if they block."""
        _end_after(CLOSING_SECONDS)
        try:
            for callback in reversed(_before_finalize):
                callback()
        except Exception:
            self.write(traceback.format_exc())
            self.abort(code or 1)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _is_out(self) -> bool:
        """Return True if this process must not use MPI: it is a fork, or MPI has been finalised."""
        return os.getpid() != self._pid or self._mpi.Is_finalized()

    def _print_error(self, hook: Callable[[], object], error: BaseException | None) -> None:
        """Print the output of an exception hook, or the traceback if the hook prints nothing."""
        printed = io.StringIO()
        with contextlib.suppress(Exception), contextlib.redirect_stderr(printed):
            hook()
        self.write(printed.getvalue() or "".join(traceback.format_exception(error)))

    def write(self, text: str) -> None:
        """Write all lines at once, so that lines of several ranks do not mix."""
        lines = "".join(f"{self._name}{line}\n" for line in text.splitlines())
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, lines.encode(errors="backslashreplace"))


def _end_after(seconds: float) -> None:
    """End the process after some seconds, with a traceback if there is memory for the thread that writes it."""
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    except RuntimeError:
        signal.setitimer(signal.ITIMER_REAL, seconds)
