"""A thread of each rank that ends the job where it would wait for ever.

A rank that is stuck in MPI cannot say so. So every half a second the lowest rank of each node that can looks at the
pages of the node's ranks, and ends the job

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
from ..launch.board import own_page
from ..launch.page import Header
from ..launch.settings import dump_folder
from ..utils.text import counted, name_ranks
from .board import Condition, RankPage, pages_of
from .flight_recorder import dump
from .judgement import Standing, awaited_by, awaited_in, in_vain, look_at
from .neighbours import Neighbours
from .report import cause_of, table_of, text_of_stacks
from .stacks import HasFileno, Questions, stacks_of

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
    if (path := own_page().path) is None:
        return
    if _watchdog is None:
        try:
            questions = Questions(path)
        except OSError as error:
            text = f"this rank is not watched, and what it waits for has no limit: {path}: {error.strerror}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        _watchdog = Watchdog(limit or 0.0, questions)
        if (folder := dump_folder()) is not None:
            exits.at_failure(partial(dump, _watchdog.pages, folder))
        exits.before_finalize(_watchdog.stop)
        _watchdog.start()
    if limit is not None:
        _watchdog.limit = limit


def still_under_way() -> str:
    """Return why the program cannot end: an operation of another thread is not over; empty if all are; local."""
    found = own_page().under_way()
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
    standings = look_at(_watchdog.pages)
    own = standings[own_page().identity["rank"]].page
    operation = next((each for each in own.unfinished() if each.thread == thread), None)
    return ("", set()) if operation is None else (operation.which, awaited_in(operation, own, standings))


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
        questions: Where others ask this rank for its stacks.

    Attributes:
        limit: The same.
        pages: Of the ranks of this node.
    """

    def __init__(self, limit: float, questions: Questions) -> None:
        self.limit = limit
        self._questions = questions
        self._own = own_page()
        self._rank: int = self._own.identity["rank"]
        self.pages = pages_of(self._own.identity["job"])
        self._seen = {page.rank: _Seen() for page in self.pages}
        self._circle, self._left = _Since(), _Since()
        self._neighbours = Neighbours(self._own.identity["host"], _print)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonmpi watchdog", daemon=True)

    def start(self) -> None:
        """Begin; local."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; local."""
        self._stop.set()
        self._questions.wake()
        self._thread.join()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._wait(LOOK_SECONDS, self._neighbours.open()):
            before, looked = looked, time.monotonic()
            self._own.words[Header.LOOKED] += 1
            self._own.words[Header.THREAD] = self._thread_to_judge()
            passed = min(looked - before, 2 * LOOK_SECONDS)  # it was not there for the rest
            self._end_without_launcher()
            if not any(self._looks(page, passed) for page in self.pages if page.rank < self._rank):
                self._look(passed)

    def _wait(self, seconds: float, also: Collection[HasFileno] = ()) -> bool:
        """Answer questions for so long, or until one of `also` can be read; say whether the watchdog is to end."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            if self._questions.wait(left, also):
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
            own = next(page for page in self.pages if page.rank == self._rank)
            begun = time.monotonic_ns() - self.limit * 1e9
            for operation in own.unfinished():
                if operation.thread in left and operation.entered < begun:
                    return operation.thread
        return threading.main_thread().ident or 0

    def _looks(self, page: RankPage, passed: float) -> bool:
        """Say whether another rank's watchdog runs."""
        if self._seen[page.rank].looks.see(page.looked, passed) > _BLIND_LOOKS * LOOK_SECONDS:
            return False
        return page.condition() in (Condition.LIVES, Condition.TRACED)

    # ---- one look ---------------------------------------------------------------------------------------------

    def _look(self, passed: float) -> None:
        left = frozenset(page.rank for page in self.pages if page.has_left())
        if self._left.see(left, passed) >= SECONDS_AFTER_END and left:
            self._end(_text_of_left(left, self.pages), look_at(self.pages), "RankFailedError")
        still = {page.rank: self._seen[page.rank].operation.see(page.latest, passed) for page in self.pages}
        self._neighbours.look(passed)
        if max(still.values()) < 2 * LOOK_SECONDS:
            self._circle = _Since()
            return
        standings = look_at(self.pages)
        if any(standing.condition is Condition.TRACED for standing in standings.values()):
            return
        if min(still.values()) >= SECONDS_AFTER_END and (cause := self._neighbours.in_vain(standings)):
            self._end(cause, standings, "RankFailedError")
        self._judge(standings, passed)
        self._count(standings, still)

    def _judge(self, standings: Mapping[int, Standing], passed: float) -> None:
        found = in_vain(standings)
        what = {rank: (standings[rank].latest, awaited) for rank, awaited in found.items()}
        waited = self._circle.see(what, passed) if found else 0.0
        if waited >= SECONDS_IN_CIRCLE:
            self._end(cause_of(standings, found), standings)

    def _count(self, standings: Mapping[int, Standing], still: Mapping[int, float]) -> None:
        """Name the ranks that others wait for, and end the job when the limit is over."""
        if not self.limit:
            return
        for rank, seconds in still.items():
            standing, seen = standings[rank], self._seen[rank]
            if standing.operation is None or standing.is_ending:
                seen.named = False
            elif seconds >= self.limit:
                awaited = name_ranks(awaited_by(rank, standings)) if awaited_by(rank, standings) else "other ranks"
                self._end(
                    f"rank {rank} has waited {seconds:.0f} s for {awaited} in {standing.operation}", standings
                )
            elif not seen.named and seconds >= min(NAMED_AFTER_SECONDS, self.limit / 6):
                self._name(rank, seconds, standings)

    def _name(self, rank: int, seconds: float, standings: Mapping[int, Standing]) -> None:
        """Say once for whom ranks wait."""
        awaited = awaited_by(rank, standings)
        waiting = [other for other in standings if awaited_by(other, standings) == awaited]
        for other in waiting:
            self._seen[other].named = True
        if awaited:
            stacks = stacks_of((standings[other].page for other in awaited), self._questions)
            _print(
                f"axonmpi: {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {name_ranks(awaited)} "
                f"since {seconds:.0f} s, and the job is ended after {self.limit:.0f} s\n{table_of(standings)}\n"
                f"{text_of_stacks(stacks)}"
            )

    # ---- ending the job ---------------------------------------------------------------------------------------

    def _end(self, cause: str, standings: Mapping[int, Standing], error: str = "CollectiveTimeoutError") -> None:
        """Print why, where all ranks are and their stacks, and end the job, unless another watchdog does."""
        self._neighbours.tell(cause)
        if not self._is_first() and self._wait(_OTHERS_SECONDS):
            return
        stacks = stacks_of((standing.page for standing in standings.values()), self._questions)
        unknown = standings[self._rank].page.size - len(standings)
        elsewhere = f"\n  {counted(unknown, 'rank')} of other nodes: not known here" if unknown else ""
        _print(
            f"axonmpi.errors.{error}: {cause}; the job is ended\n"
            f"{table_of(standings)}{elsewhere}\n{text_of_stacks(stacks)}"
        )
        for standing in standings.values():
            if standing.condition is Condition.STOPPED:  # it would hear of the end only when it goes on
                with suppress(OSError):
                    os.kill(standing.page.pid, signal.SIGKILL)
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


def _text_of_left(left: Collection[int], pages: Iterable[RankPage]) -> str:
    where = [f"rank {page.rank} on {page.host} (process {page.pid})" for page in pages if page.rank in left]
    return f"{', '.join(where)} ha{'s' if len(where) == 1 else 've'} ended before the end of the program"


def _print(text: str) -> None:
    """Write all at once, so that lines of several ranks do not mix."""
    with suppress(OSError):
        os.write(_stream, f"{text.rstrip()}\n".encode(errors="backslashreplace"))
