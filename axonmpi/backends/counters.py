"""Counters in shared memory, by which ranks of a node wait for each other: spinning, yielding, then sleeping.

A rank that has waited for a count sees all that the other wrote to shared memory before it counted up. It is how
data is handed over without a message: the receiver needs no copy, and the sender can compute on at once, since
nothing has to progress.

    rank 0: writes its data, post(5, 1)            rank 1: wait(5, 1), reads the data, post(6, 1)
    rank 0: wait(6, 1), writes the next ...
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ..errors import AxonmpiError, CollectiveTimeoutError
from ..utils.futex import Futex
from .tuning import COUNTER_SLEEP_SECONDS, COUNTER_YIELDS, COUNTER_YIELDS_OVERSUBSCRIBED

WORDS_PER_COUNTER = 16
"""Counters are two cache lines apart, so that a rank that waits for one does not slow down who writes another."""
_SLEEPERS = 8
"""Offset of the number of sleeping ranks, in the other cache line of the counter."""


def _nothing() -> None:
    """Do nothing while waiting."""


class NodeCounters:
    """Numbers that only grow; made by `Backend.node_counters`.

    Args:
        memory: [count * WORDS_PER_COUNTER] int64, common to the ranks and zero.
        fence: A full memory barrier, None if the processor needs none.
        timeout: Seconds after which a rank gives up waiting; None never does.
        check: Called now and then while waiting, with the operation and the rank; raises if the wait is in vain.
        give_way: Lets others run for a moment.
        oversubscribed: Whether ranks outnumber the cores, so that a rank that waits should soon sleep.
    """

    def __init__(
        self,
        memory: Tensor,
        fence: Callable[[], None] | None,
        timeout: float | None,
        check: Callable[[str, int | None], None],
        give_way: Callable[[], object],
        *,
        oversubscribed: bool,
    ) -> None:
        self._memory = memory  # whose storage the words are
        self._words = memory.numpy().data.cast("B").cast("q")
        self._fence = fence
        self._timeout = timeout
        self._check = check
        self._futex = Futex(memory.data_ptr())
        self._give_way = give_way
        self._yields = COUNTER_YIELDS_OVERSUBSCRIBED if oversubscribed else COUNTER_YIELDS

    def post(self, index: int, value: int) -> None:
        """Set a counter, which publishes all that this rank has written before; local."""
        if self._fence is not None:
            self._fence()
        word = index * WORDS_PER_COUNTER
        self._words[word] = value
        if self._words[word + _SLEEPERS]:
            self._words[word + _SLEEPERS] = 0
            self._futex.wake(word)

    def reached(self, index: int, value: int) -> bool:
        """Return True if a counter has reached a value; then all writes before it can be read; local."""
        if self._words[index * WORDS_PER_COUNTER] < value:
            return False
        if self._fence is not None:
            self._fence()
        return True

    def wait(
        self,
        index: int,
        value: int,
        what: str,
        meanwhile: Callable[[], None] = _nothing,
        peer: int | None = None,
    ) -> None:
        """Wait until a counter has reached a value, yielding the core; local.

        Args:
            index: Which counter.
            value: The value to wait for.
            what: The awaited event, for messages.
            meanwhile: Called again and again while waiting.
            peer: The rank that counts up, if it is known.

        Raises:
            CollectiveTimeoutError: It has not come within the time-out.
            RankFailedError: A mock rank has failed.
            CollectiveMismatchError: `peer` is a mock rank that has returned.
        """
        for _ in range(self._yields):
            if self.reached(index, value):
                return
            self._give_way()
            meanwhile()
        began, word = time.monotonic(), index * WORDS_PER_COUNTER
        while not self.reached(index, value):
            seen = self._words[word]
            self._words[word + _SLEEPERS] = 1
            if seen < value:  # a wake-up that is missed all the same costs no more than the longest sleep
                self._futex.sleep(word, seen, COUNTER_SLEEP_SECONDS)
            meanwhile()
            try:
                self._check(what, peer)
            except AxonmpiError:
                if self.reached(index, value):  # it has counted up, and then failed or returned
                    return
                raise
            waited = time.monotonic() - began
            if self._timeout is not None and waited > self._timeout:
                raise CollectiveTimeoutError(f"{what} waited {self._timeout:g} s")
