"""A thread of each rank that ends the job where it would wait for ever.

A rank that is stuck in MPI cannot say so. So every half a second the lowest rank of each node that can looks at the
records of the node's ranks, and ends the job

    after 3 s      if the process of a rank has ended, but its program had not come to its end
    after 4 s      if ranks wait for one that is stopped, or has come to its end, or for each other in a circle
    after 3 s      if all wait, and a rank of another node, its node or the network to it has gone: `node_links.py`
    after 1 h      if a rank has waited for so long, whatever it waits for: `AXONMPI_TIMEOUT`

Only time in which it has looked counts, and nothing is ended while a rank is in a debugger. A sixth of the last
limit before, it names the ranks that the others wait for, with their stacks. It uses no MPI but to end the job.

A rank whose launcher has gone ends by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ..launch import exit as exits
from ..launch.user_variables import dump_folder
from ..record.files import own_record
from ..record.reader import Condition, RankRecord, records_of
from ..record.writer import Header
from ..utils.text import counted, name_ranks
from .flight_recorder import dump
from .node_monitor import NodeMonitor
from .stacks import HasFileno, StackServer, stacks_of
from .waits import RankState, awaited_by, awaited_in, states_of, stuck_ranks
from .watchdog_text import cause_of, table_of, text_of_stacks

LOOK_SECONDS = 0.5
SECONDS_AFTER_END = 3.0
"""Time for the ranks that wait in shared memory to raise an error, and to print it."""
SECONDS_IN_CIRCLE = 4.0
NAMED_AFTER_SECONDS = 600.0
"""When a rank that others wait for is named; a sixth of the limit if that is less."""
_BLIND_LOOKS = 6
"""A watchdog that has not looked while another one has so often does not run."""
_OTHERS_SECONDS = 8.0
"""How long a watchdog leaves it to another one to end the job."""

_watchdog: Watchdog | None = None
_stream = 2


def write_to(stream: int) -> None:
    """Have the watchdog write to this file descriptor: a runner of tests captures the standard error; local."""
    global _stream
    _stream = stream


def watch(limit: float | None) -> None:
    """Begin to watch the ranks of this node, and to write stacks down when asked; local.

    It warns where there is no room for what that needs.

    Args:
        limit: Seconds that a rank may wait; 0 means no limit; None keeps the limit of a running watchdog, and
            means no limit otherwise.
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
    """Return why the program cannot end: an operation of another thread is not over; empty if all are; local."""
    found = own_record().under_way()
    if not found:
        return ""
    name, thread = found[0]
    operation, awaited = _unmet_in(thread)
    names = {each.ident: each.name for each in threading.enumerate()}
    ranks = f"{name_ranks(awaited)} {'have' if len(awaited) > 1 else 'has'}" if awaited else "another rank has"
    return (
        f"{operation or name} in thread {names.get(thread, thread)!r} was still under way when the program "
        f"ended: {ranks} not met it; wait for every Work, and for threads that communicate"
    )


def _unmet_in(thread: int) -> tuple[str, set[int]]:
    """Return the operation of a thread of this rank, and the ranks of this node that have not called it."""
    if _watchdog is None:
        return "", set()
    states = states_of(_watchdog.records)
    own = states[own_record().identity["rank"]].record
    operation = next((each for each in own.unfinished() if each.thread == thread), None)
    return ("", set()) if operation is None else (operation.which, awaited_in(operation, own, states))


@dataclass
class _Since:
    """What was seen, and for how long it has been so."""

    what: object = None
    seconds: float = 0.0

    def see(self, what: object, passed: float) -> float:
        """Return for how long it has been so."""
        self.seconds = self.seconds + passed if what == self.what else 0.0
        self.what = what
        return self.seconds


@dataclass
class _Seen:
    """What a watchdog remembers of a rank."""

    operation: _Since = field(default_factory=_Since)
    looks: _Since = field(default_factory=_Since)
    named: bool = False


class Watchdog:
    """The thread of one rank.

    Args:
        limit: Seconds that a rank may wait; 0: for ever.
        stack_server: Where others ask this rank for its stacks.

    Attributes:
        limit: The same.
        records: Of the ranks of this node.
    """

    def __init__(self, limit: float, stack_server: StackServer) -> None:
        self.limit = limit
        self._stack_server = stack_server
        self._own = own_record()
        self._rank: int = self._own.identity["rank"]
        self.records = records_of(self._own.identity["job"])
        self._seen = {record.rank: _Seen() for record in self.records}
        self._circle, self._left = _Since(), _Since()
        self._node_monitor = NodeMonitor(self._own.identity["host"], _print)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonmpi watchdog", daemon=True)

    def start(self) -> None:
        """Begin; local."""
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
            passed = min(looked - before, 2 * LOOK_SECONDS)  # it was not there for the rest
            self._end_without_launcher()
            if not any(self._looks(record, passed) for record in self.records if record.rank < self._rank):
                self._look(passed)

    def _wait(self, seconds: float, also: Collection[HasFileno] = ()) -> bool:
        """Answer stack_server for so long, or until one of `also` can be read; say whether the watchdog is to end."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            if self._stack_server.wait(left, also):
                break
        return self._stop.is_set()

    def _end_without_launcher(self) -> None:
        if os.getppid() != self._own.identity["parent"]:
            with suppress(OSError):
                os.write(_stream, f"[rank {self._rank}] the launcher has gone, and the job ends\n".encode())
            exits.end_process(1)

    def _thread_to_judge(self) -> int:
        """Return the thread whose operation decides whether this rank waits.

        That is the main thread. After its end it is the only other thread that Python waits for. If there are
        several, one may do what another waits for: then it is a thread that has exceeded the limit, if any.
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

    def _looks(self, record: RankRecord, passed: float) -> bool:
        """Say whether another rank's watchdog runs."""
        if self._seen[record.rank].looks.see(record.looked, passed) > _BLIND_LOOKS * LOOK_SECONDS:
            return False
        return record.condition() in (Condition.LIVES, Condition.TRACED)

    # ---- one look ---------------------------------------------------------------------------------------------

    def _look(self, passed: float) -> None:
        left = frozenset(record.rank for record in self.records if record.has_left())
        if self._left.see(left, passed) >= SECONDS_AFTER_END and left:
            self._end(_text_of_left(left, self.records), states_of(self.records), "RankFailedError")
        still = {
            record.rank: self._seen[record.rank].operation.see(record.latest, passed) for record in self.records
        }
        self._node_monitor.look(passed)
        if max(still.values()) < 2 * LOOK_SECONDS:
            self._circle = _Since()
            return
        states = states_of(self.records)
        if any(state.condition is Condition.TRACED for state in states.values()):
            return
        if min(still.values()) >= SECONDS_AFTER_END and (cause := self._node_monitor.reason_to_end(states)):
            self._end(cause, states, "RankFailedError")
        self._judge(states, passed)
        self._count(states, still)

    def _judge(self, states: Mapping[int, RankState], passed: float) -> None:
        found = stuck_ranks(states)
        what = {rank: (states[rank].latest, awaited) for rank, awaited in found.items()}
        waited = self._circle.see(what, passed) if found else 0.0
        if waited >= SECONDS_IN_CIRCLE:
            self._end(cause_of(states, found), states)

    def _count(self, states: Mapping[int, RankState], still: Mapping[int, float]) -> None:
        """Name the ranks that others wait for, and end the job when the limit is over."""
        if not self.limit:
            return
        for rank, seconds in still.items():
            state, seen = states[rank], self._seen[rank]
            if state.operation is None or state.is_ending:
                seen.named = False
            elif seconds >= self.limit:
                awaited = name_ranks(awaited_by(rank, states)) if awaited_by(rank, states) else "other ranks"
                self._end(f"rank {rank} has waited {seconds:.0f} s for {awaited} in {state.operation}", states)
            elif not seen.named and seconds >= min(NAMED_AFTER_SECONDS, self.limit / 6):
                self._name(rank, seconds, states)

    def _name(self, rank: int, seconds: float, states: Mapping[int, RankState]) -> None:
        """Say once for whom ranks wait."""
        awaited = awaited_by(rank, states)
        waiting = [other for other in states if awaited_by(other, states) == awaited]
        for other in waiting:
            self._seen[other].named = True
        if awaited:
            stacks = stacks_of((states[other].record for other in awaited), self._stack_server)
            _print(
                f"axonmpi: {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {name_ranks(awaited)} "
                f"since {seconds:.0f} s, and the job is ended after {self.limit:.0f} s\n{table_of(states)}\n"
                f"{text_of_stacks(stacks)}"
            )

    # ---- ending the job ---------------------------------------------------------------------------------------

    def _end(self, cause: str, states: Mapping[int, RankState], error: str = "CollectiveTimeoutError") -> None:
        """Print why, where all ranks are and their stacks, and end the job, unless another watchdog does."""
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
            if state.condition is Condition.STOPPED:  # it would hear of the end only when it goes on
                with suppress(OSError):
                    os.kill(state.record.pid, signal.SIGKILL)
        exits.end_job(1)

    def _is_first(self) -> bool:
        """Say whether no other rank of the node ends the job."""
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
    where = [
        f"rank {record.rank} on {record.host} (process {record.pid})" for record in records if record.rank in left
    ]
    return f"{', '.join(where)} ha{'s' if len(where) == 1 else 've'} ended before the end of the program"


def _print(text: str) -> None:
    """Write all at once, so that lines of several ranks do not mix."""
    with suppress(OSError):
        os.write(_stream, f"{text.rstrip()}\n".encode(errors="backslashreplace"))
