"""The watchdog: a thread of each rank that ends the job if ranks can never go on, or have waited too long.

A rank that is stuck in MPI cannot report it. So every half a second the lowest rank of each node that is able to
reads the records of the node's ranks, and ends the job

    after 3 s      if the process of a rank has ended before the end of its program
    after 4 s      if ranks wait for a rank that is stopped or has come to its end, or for each other in a circle
    after 3 s      if all wait, and a rank of another node, its node or the network is lost (`node_monitor.py`)
    after 1 h      if a rank has waited for so long, for any reason: `AXONMPI_TIMEOUT`

Only time between looks that took place counts, and nothing is ended while a rank is in a debugger. After a sixth of
the last limit, at most ten minutes, the watchdog prints the ranks that others wait for, with their stacks. It uses
MPI only to end the job. A rank whose launcher has ended ends itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial

from ..launch import exit as exits
from ..launch.node_links import Link
from ..launch.user_variables import dump_folder
from ..record.files import own_record
from ..record.layout import Header
from ..record.reader import Condition, RankRecord, records_of
from ..utils.text import counted, name_ranks
from .flight_recorder import dump
from .node_monitor import NodeMonitor
from .stacks import StackServer, stacks_of
from .waits import RankState, awaited_by, awaited_in, states_of, stuck_ranks
from .watchdog_text import cause_of, table_of, text_of_stacks

LOOK_SECONDS = 0.5
SECONDS_AFTER_END = 3.0
"""Time for the ranks that wait in shared memory to raise an error, and to print it."""
SECONDS_STUCK = 4.0
NAMED_AFTER_SECONDS = 600.0
"""Wait after which an awaited rank is named; a sixth of the limit if that is less."""
_BLIND_LOOKS = 6
"""A watchdog that has not looked while another has looked so often does not run."""
_OTHERS_SECONDS = 8.0
"""Time that a watchdog leaves to another watchdog that ends the job."""

_watchdog: Watchdog | None = None
_stream = 2


def write_to(stream: int) -> None:
    """Make the watchdog write to a file descriptor: test runners capture the standard error; local."""
    global _stream
    _stream = stream


def watch(limit: float | None) -> None:
    """Watch the ranks of this node from now on, and write stacks when asked; local.

    It warns if there is no room for the files that this needs.

    Args:
        limit: Limit for the wait of a rank in seconds; 0 means no limit; None keeps the limit of a running
        watchdog,
            and means no limit otherwise.
    """
    global _watchdog
    if (path := own_record().path) is None:
        return
    if _watchdog is None:
        try:
            stack_server = StackServer(path)
        except OSError as error:
            text = f"this rank is not watched, and what it waits for has no limit: {path}: {error.strerror}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        _watchdog = Watchdog(limit or 0.0, stack_server)
        if (folder := dump_folder()) is not None:
            exits.at_failure(partial(dump, _watchdog.records, folder))
        exits.before_finalize(_watchdog.stop)
        _watchdog.start()
    if limit is not None:
        _watchdog.limit = limit


def unfinished_operation() -> str:
    """Return a message if an operation of another thread is unfinished at the end of the program; local.

    Returns:
        The message, with the ranks that have not called the operation; empty if there is none.
    """
    unfinished = own_record().unfinished_of_others()
    if not unfinished:
        return ""
    operation, thread = unfinished[0]
    awaited: set[int] = set()
    if _watchdog is not None:
        states = states_of(_watchdog.records)
        own = states[own_record().identity["rank"]].record
        for each in own.unfinished():
            if each.thread == thread:
                operation, awaited = each.in_group, awaited_in(each, own, states)
                break
    names = {each.ident: each.name for each in threading.enumerate()}
    ranks = f"{name_ranks(awaited)} {'have' if len(awaited) > 1 else 'has'}" if awaited else "another rank has"
    return (
        f"{operation} in thread {names.get(thread, thread)!r} was still under way when the program "
        f"ended: {ranks} not met it; wait for every Work, and for threads that communicate"
    )


class Watchdog:
    """The watchdog of this rank.

    Args:
        limit: Limit for the wait of a rank in seconds; 0 for none.
        stack_server: Server of this rank's stacks.

    Attributes:
        limit: Limit for the wait of a rank in seconds; 0 for none.
        records: Records of the ranks of this node.
    """

    def __init__(self, limit: float, stack_server: StackServer) -> None:
        self.limit = limit
        self._stack_server = stack_server
        self._own = own_record()
        self._rank: int = self._own.identity["rank"]
        self.records = records_of(self._own.identity["job"])
        self._unchanged: dict[object, tuple[object, float]] = {}
        self._named: set[int] = set()
        self._node_monitor = NodeMonitor(self._own.identity["host"], _print)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonmpi watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; local."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; local."""
        self._stop.set()
        self._stack_server.wake()
        self._thread.join()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._wait(LOOK_SECONDS, self._node_monitor.open()):
            before, looked = looked, time.monotonic()
            self._own.words[Header.LOOKED] += 1
            self._own.words[Header.THREAD] = self._thread_to_judge()
            passed = min(looked - before, 2 * LOOK_SECONDS)  # it did not look in the rest of the time
            if os.getppid() != self._own.identity["parent"]:
                _print(f"[rank {self._rank}] the launcher has gone, and the job ends")
                exits.end_process(1)
            if not any(self._runs(record, passed) for record in self.records if record.rank < self._rank):
                self._look(passed)

    def _wait(self, seconds: float, also: Collection[Link] = ()) -> bool:
        """Serve stacks for some seconds, or until one of `also` is readable; return True if the thread must end."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            if self._stack_server.wait(left, also):
                break
        return self._stop.is_set()

    def _thread_to_judge(self) -> int:
        """Return the thread whose operation decides whether this rank waits.

        That is the main thread. After its end it is the only other thread that Python waits for. If there are
        several, one may compute while another waits for it: then it is a thread that has exceeded the limit, if
        any.
        """
        left = _threads_at_the_end()
        if len(left) == 1:
            return left[0]
        if left and self.limit:
            own = next(record for record in self.records if record.rank == self._rank)
            begun = time.monotonic_ns() - self.limit * 1e9
            for operation in own.unfinished():
                if operation.thread in left and operation.entered < begun:
                    return operation.thread
        return threading.main_thread().ident or 0

    def _runs(self, record: RankRecord, passed: float) -> bool:
        """Return True if another rank's watchdog runs."""
        looked = record.word(Header.LOOKED)
        if self._seconds_unchanged(("looked", record.rank), looked, passed) > _BLIND_LOOKS * LOOK_SECONDS:
            return False
        return record.condition() in (Condition.LIVES, Condition.TRACED)

    def _seconds_unchanged(self, name: object, value: object, passed: float) -> float:
        """Return the seconds for which a named value has been the same, in looks of this watchdog."""
        before, seconds = self._unchanged.get(name, (None, 0.0))
        seconds = seconds + passed if value == before else 0.0
        self._unchanged[name] = value, seconds
        return seconds

    # ---- one look ---------------------------------------------------------------------------------------------

    def _look(self, passed: float) -> None:
        left = frozenset(record.rank for record in self.records if record.has_left())
        if self._seconds_unchanged("left", left, passed) >= SECONDS_AFTER_END and left:
            self._end(_text_of_left(left, self.records), states_of(self.records), "RankFailedError")
        still = {
            record.rank: self._seconds_unchanged(("latest", record.rank), record.latest, passed)
            for record in self.records
        }
        self._node_monitor.look(passed)
        if max(still.values()) < 2 * LOOK_SECONDS:
            return
        states = states_of(self.records)
        if any(state.condition is Condition.TRACED for state in states.values()):
            return
        if min(still.values()) >= SECONDS_AFTER_END and (cause := self._node_monitor.reason_to_end(states)):
            self._end(cause, states, "RankFailedError")
        stuck = stuck_ranks(states)
        waits = {rank: (states[rank].latest, awaited) for rank, awaited in stuck.items()}
        if self._seconds_unchanged("stuck", waits, passed) >= SECONDS_STUCK and stuck:
            self._end(cause_of(states, stuck), states)
        if self.limit:
            self._apply_limit(states, still)

    def _apply_limit(self, states: Mapping[int, RankState], still: Mapping[int, float]) -> None:
        """Name the ranks that others wait for, and end the job once a rank has waited for the limit."""
        for rank, seconds in still.items():
            state = states[rank]
            if state.operation is None or state.is_ending:
                self._named.discard(rank)
            elif seconds >= self.limit:
                awaited = awaited_by(rank, states)
                ranks = name_ranks(awaited) if awaited else "other ranks"
                self._end(f"rank {rank} has waited {seconds:.0f} s for {ranks} in {state.operation}", states)
            elif rank not in self._named and seconds >= min(NAMED_AFTER_SECONDS, self.limit / 6):
                self._name(awaited_by(rank, states), seconds, states)

    def _name(self, awaited: set[int], seconds: float, states: Mapping[int, RankState]) -> None:
        """Print once the ranks that others wait for."""
        waiting = [rank for rank in states if awaited_by(rank, states) == awaited]
        self._named.update(waiting)
        if awaited:
            stacks = stacks_of((states[rank].record for rank in awaited), self._stack_server)
            _print(
                f"axonmpi: {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {name_ranks(awaited)} "
                f"since {seconds:.0f} s, and the job is ended after {self.limit:.0f} s\n{table_of(states)}\n"
                f"{text_of_stacks(stacks)}"
            )

    # ---- ending the job ---------------------------------------------------------------------------------------

    def _end(self, cause: str, states: Mapping[int, RankState], error: str = "CollectiveTimeoutError") -> None:
        """Print the cause, states and stacks of all ranks, and end the job, unless another watchdog does."""
        self._node_monitor.tell(cause)
        if not self._is_first() and self._wait(_OTHERS_SECONDS):
            return
        stacks = stacks_of((state.record for state in states.values()), self._stack_server)
        unknown = states[self._rank].record.size - len(states)
        elsewhere = f"\n  {counted(unknown, 'rank')} of other nodes: not known here" if unknown else ""
        _print(
            f"axonmpi.errors.{error}: {cause}; the job is ended\n"
            f"{table_of(states)}{elsewhere}\n{text_of_stacks(stacks)}"
        )
        for state in states.values():
            if state.condition is Condition.STOPPED:  # it would receive no other signal before it goes on
                with suppress(OSError):
                    os.kill(state.record.pid, signal.SIGKILL)
        exits.end_job(1)

    def _is_first(self) -> bool:
        """Return True if no other rank of the node ends the job."""
        assert self._own.path is not None
        path = self._own.path.with_name(f"{self._own.identity['job']}-node.ended")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError:  # /dev/shm is full
            return True
        return True


def _threads_at_the_end() -> list[int]:
    """Return the threads that Python waits for once the main thread has ended; none before that."""
    # While Python waits for pools of threads, the main thread counts as alive.
    main = threading.main_thread()
    if main.is_alive() and not getattr(threading, "_SHUTTING_DOWN", False):
        return []
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    return [thread.ident for thread in others if thread.ident is not None]


def _text_of_left(left: Collection[int], records: Iterable[RankRecord]) -> str:
    ranks = [record for record in records if record.rank in left]
    names = ", ".join(f"rank {record.rank} on {record.host} (process {record.pid})" for record in ranks)
    return f"{names} ha{'s' if len(ranks) == 1 else 've'} ended before the end of the program"


def _print(text: str) -> None:
    """Write all at once, so that lines of several ranks do not mix."""
    with suppress(OSError):
        os.write(_stream, f"{text.rstrip()}\n".encode(errors="backslashreplace"))
