"""The barrier of a node: pages by which its ranks see who has arrived; `counters.py` has the waiting.

Each rank has a page with a counter of the barriers that it has reached, on a cache line of its own:

    rank 0 | 7 |      ranks 0 and 2 have reached barrier 7 and wait;
    rank 1 | 6 |      rank 1 has not
    rank 2 | 7 |

A rank that waits yields its core at every look, and naps when it takes long, since ranks may outnumber the cores.
Everything a rank wrote before a barrier is seen by all ranks after it. On processors that reorder loads and stores,
`MPI_Win_sync` on both sides is the memory barrier (MPI 4.1, section 12.4; 12.7 on shared windows); the
counters are 8 aligned bytes, which are written and read whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import CollectiveTimeoutError, CommunicatorError, RankFailedError
from ...observe import describe_process
from ...utils.processes import process
from ...utils.text import name_ranks
from ...utils.waiting import Backoff
from ..tuning import (
    BARRIER_CHECK_SECONDS,
    BARRIER_NAP_SECONDS,
    BARRIER_YIELDS,
    LONGEST_BARRIER_NAP_SECONDS,
    PROGRESS_CALLS_PER_NAP,
)
from .segment import Segment

if TYPE_CHECKING:
    from mpi4py import MPI

_MARK = 16  # a cache line pair away from the counter
_MARKS = ("", "gave up waiting", "has failed")
"""Meanings of a rank's mark."""


class Fence:
    """A full memory barrier, by way of a small shared window of the node's ranks; made collectively.

    Attributes:
        sync: The barrier; local.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._window = mpi.Win.Allocate_shared(8, comm=comm)
        self._window.Lock_all()  # MPI_Win_sync is defined within an epoch
        self.sync = self._window.Sync

    def free(self) -> None:
        """Release the window; collective."""
        self._window.Unlock_all()
        self._window.Free()


class NodeBarrier:
    """The barrier of one group's ranks on a node.

    Args:
        segment: Shared memory with at least one page for each rank. The barrier uses the first 256 bytes of each
            rank's region.
        sync: A full memory barrier, or None if the processor needs none.
        processes: Process ID of each local rank.
        names: Rank in the group of each local rank.
        timeout: Seconds after which a waiting rank raises. None waits without limit.
        progress: A call in which MPI makes progress on pending sends.

    Attributes:
        count: How many barriers this rank has passed; the same on all ranks between two barriers.
        spins: How often a rank looks before it yields: if each has a core, the others arrive soon.
        sync: The memory barrier, as given.
        timeout: The same as given.
    """

    def __init__(
        self,
        segment: Segment,
        sync: Any,
        processes: list[int],
        names: list[int],
        timeout: float | None,
        progress: Callable[[], object],
    ) -> None:
        self._words = memoryview(segment.memory).cast("q")
        self.sync = sync
        # Ranks in containers of their own may not see each other's processes.
        self._processes = [process if _is_alive(process) else None for process in processes]
        self._names = names
        self.timeout = timeout
        self._progress = progress
        words = segment.region_bytes // 8
        self._own = segment.own * words
        peers = [(segment.own + step) % len(processes) for step in range(1, len(processes))]
        self._peers = [(peer * words, peer) for peer in peers]
        self._failed = ""
        self._checked = 0.0
        self.count = 0
        self.spins = 0

    def wait(self, what: object = "a barrier") -> None:
        """Wait until all ranks of the node have arrived; collective.

        Raises:
            CollectiveTimeoutError: A rank has not come within the time-out.
            RankFailedError: A rank has ended or has given up.
            CommunicatorError: This rank has given up before.
        """
        if self._failed:
            raise CommunicatorError(f"{what}: this group cannot be used: {self._failed}")
        words, count = self._words, self.count + 1
        if self.sync is not None:
            self.sync()
        words[self._own] = count
        waited = False
        for word, peer in self._peers:
            if words[word] < count:
                self._await(word, peer, count, what)
                waited = True
        if waited:  # a rank that had come may have given up while this one waited for another
            for word, peer in self._peers:
                if words[word] < count:
                    self._await(word, peer, count, what)
        if self.sync is not None:
            self.sync()
        self.count = count

    def _await(self, word: int, peer: int, count: int, what: object) -> None:
        words = self._words
        for _ in range(self.spins):
            if words[word] >= count:
                return
        for _ in range(BARRIER_YIELDS):
            os.sched_yield()
            if words[word] >= count:
                return
        began = checked = time.monotonic()
        backoff = Backoff(0, BARRIER_NAP_SECONDS, LONGEST_BARRIER_NAP_SECONDS)
        while words[word] < count:
            # A peer may need a pending message before it arrives. MPICH sends one message for each call.
            for _ in range(PROGRESS_CALLS_PER_NAP):
                self._progress()
            backoff.rest()
            now = time.monotonic()
            if self.timeout is not None and now - began > self.timeout:
                self._give_up(what)
            how = _MARKS[words[word + _MARK]]
            if not how and now - checked > BARRIER_CHECK_SECONDS:
                checked, how = now, self._end_of(peer)
            if how and words[word] < count:  # else it arrived before it ended
                self._raise_failed(peer, how, what)

    def _give_up(self, what: object) -> None:
        late = sorted(self._names[peer] for word, peer in self._peers if self._words[word] <= self.count)
        self.mark_failed(f"{what} was given up after {self.timeout:g} s", gave_up=True)
        raise CollectiveTimeoutError(
            f"{what} was not complete after {self.timeout:g} s: "
            f"{name_ranks(late)} did not come, or is still computing"
        )

    def check_alive(self, what: object) -> None:
        """Raise if the process of another rank on this node has ended, which is seen within 0.1 s; local.

        MPI makes progress on pending sends, as in any other wait.

        Args:
            what: The waiting operation, for messages.

        Raises:
            RankFailedError: A process has ended.
        """
        self._progress()
        now = time.monotonic()
        if now - self._checked < BARRIER_CHECK_SECONDS:
            return
        self._checked = now
        for _, peer in self._peers:
            if ended := self._end_of(peer):
                self._raise_failed(peer, ended, what)

    def _end_of(self, peer: int) -> str:
        """Return how the process of another rank has ended, empty if it has not; local."""
        number = self._processes[peer]
        if number is None or _is_alive(number):
            return ""
        did = describe_process(number)
        return f"has ended (process {number}{f': {did}' if did else ''})"

    def _raise_failed(self, peer: int, how: str, what: object) -> NoReturn:
        text = f"rank {self._names[peer]} {how} while {what} waited for it"
        self.mark_failed(text)
        raise RankFailedError(f"{text} on this node")

    def mark_failed(self, reason: str, *, gave_up: bool = False) -> None:
        """Tell the other ranks that this one comes to no further barrier; local."""
        self._failed = self._failed or reason
        self._words[self._own + _MARK] = 1 if gave_up else 2
        # A rank that arrives late must not pass: this rank's data may be overwritten from now on.
        self._words[self._own] = self.count


def _is_alive(number: int) -> bool:
    return process(number) is not None
