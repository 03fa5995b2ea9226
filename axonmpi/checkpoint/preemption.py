"""When to stop early: a signal has come, or the time that the job may take is nearly up.

    signal ──► handler ──► a flag of this rank ──┐
    clock ───────────────► near the end? ────────┴──► vote ──► sum or largest of all ranks ──► all stop, or none

A handler does nothing but set the flag: it runs between any two instructions of the program, where nothing can be
saved. The ranks notice at different times, and only some may get the signal. So they stop when all know that one of
them wants to: at the same step, after one small reduction, or as shard of one that happens anyway.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import torch

from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group
from ..launch.settings import stop_signal
from ..launch.variables import job_end_time
from ..types import ReduceOp, Seconds
from ..utils.arguments import either_group_name, seconds

_LONGEST_MARGIN = 60.0
_SHARE_OF_TIME = 0.1
_NOT_CALLED = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
"""What handled a signal before: these would end the program, or do nothing."""


class PreemptionGuard:
    """Tells all ranks at the same step to stop: after a signal on any of them, or when the time is nearly up.

    Handlers are installed here and put back by `close()`, or at the end of a `with` block; without either they stay
    to the end of the process. A handler that was there before, if it is a Python function, is called after the flag
    is set; the default action, which would end the process, is not taken. More signals change nothing. In processes
    that this one forks, such as DataLoader workers, SIGTERM does again what it did before, and the other signals
    are ignored: launchers send them to all processes of a job.

    Construction is local.

    Args:
        signals: What to handle; None means SIGTERM and SIGUSR1, or SIGTERM and the signal that the environment
            variable `AXONMPI_STOP_SIGNAL` names. With none of them the guard needs no main thread.
        time_limit: Seconds from now until this process will be ended, or a `timedelta`; None means the end of the
            Slurm job (`SLURM_JOB_END_TIME`), if this is one and has a limit.
        margin: Seconds before that end at which to stop: as long as a step and a save take, at least. None means a
            tenth of the time, and no more than 60.
        group: The ranks that stop together; None means the default group at the time when it is needed.

    Raises:
        ValueError: A signal cannot be handled, this is not the main thread of the process, a number is not
            positive, or the margin is longer than the time.
        TypeError: A signal is no number of one, or `group` is no group.
    """

    @either_group_name
    def __init__(
        self,
        signals: Iterable[int] | None = None,
        time_limit: Seconds | None = None,
        *,
        margin: Seconds | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if group is not None:
            chosen_group(group)
        self._group = group
        self._deadline = _deadline(seconds("time_limit", time_limit), seconds("margin", margin, positive=False))
        self._wanted = False
        self._decided = False
        self._earlier: dict[signal.Signals, Any] = {}
        chosen = [signal.SIGTERM, stop_signal()] if signals is None else _checked(signals)
        try:
            for each in chosen:
                self._install(each)
        except BaseException:
            self.close()
            raise

    # ---- what to ask ----------------------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Say whether to stop now; the same on all ranks, which ask at the same step; collective.

        It costs a reduction of one byte. Once the answer is yes it stays yes, and nothing more is sent.
        """
        if not self._decided:
            backend = chosen_group(self._group).backend.control
            votes = torch.tensor([self._votes()], dtype=torch.uint8, device=backend.place)
            backend.all_reduce(votes, ReduceOp.MAX)
            self._decided = bool(votes.item())
        return self._decided

    def vote(self) -> float:
        """Return 1.0 if this rank wants to stop, else 0.0: for a sum over the ranks that is made anyway; local.

        ::

            total = torch.tensor([loss, guard.vote()])
            ax.all_reduce(total)
            if guard.decide(total[1]):
                ...

        One vote needs one `decide`, on all ranks.
        """
        return float(self._votes())

    def decide(self, votes: float | torch.Tensor) -> bool:
        """Say whether to stop now, given the sum, the average or the largest of all ranks' votes; local.

        Args:
            votes: A number, or a tensor of one element, the same on all ranks.
        """
        self._decided = self._decided or float(votes) > 0
        return self._decided

    def request_stop(self) -> None:
        """Set this rank's flag, as a signal does: all ranks stop when they ask next; local."""
        self._wanted = True

    def _votes(self) -> bool:
        return self._decided or self._wanted or time.monotonic() >= self._deadline

    # ---- handlers -------------------------------------------------------------------------------------------

    def _install(self, number: signal.Signals) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals: Python handles signals in the main thread of a process only, and this is "
                f"{threading.current_thread().name!r}: make the guard there, or with signals=() for the time limit "
                "and request_stop()"
            )
        earlier = signal.getsignal(number)
        if earlier is None:
            raise ValueError(
                f"signals: {number.name} is handled by a library, whose handler Python could not put back: give "
                "other signals"
            )
        try:
            signal.signal(number, self._on_signal)
        except OSError as error:
            raise ValueError(f"signals: {number.name} cannot be handled: {error.strerror}") from error
        self._earlier[number] = earlier
        _remember(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True
        earlier = self._earlier.get(signal.Signals(number))
        if callable(earlier) and earlier not in _NOT_CALLED:
            earlier(number, frame)

    def close(self) -> None:
        """Put back the handlers that were there before; local, in the main thread, may be called twice.

        A signal whose handler was replaced meanwhile is left alone.
        """
        while self._earlier:
            number, earlier = self._earlier.popitem()
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, earlier)

    def _become_child(self) -> None:
        """In a forked process: end at SIGTERM, as multiprocessing ends its processes; ignore the others."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, earlier if number == signal.SIGTERM else signal.SIG_IGN)
        self._earlier.clear()

    def __enter__(self) -> PreemptionGuard:
        """Return the guard."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back."""
        self.close()


_installed: weakref.WeakSet[PreemptionGuard] = weakref.WeakSet()
_watches_forks = False


def _remember(guard: PreemptionGuard) -> None:
    """Have forked processes not take the guard's signals for their own."""
    global _watches_forks
    _installed.add(guard)
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_become_children)


def _become_children() -> None:
    for guard in _installed:
        guard._become_child()


def _checked(signals: Iterable[int]) -> list[signal.Signals]:
    try:
        return [signal.Signals(each) for each in dict.fromkeys(signals)]
    except (ValueError, TypeError) as error:
        expected = "signals: expected numbers of signals, such as (signal.SIGTERM, signal.SIGUSR1)"
        raise type(error)(f"{expected}, got {signals!r}") from None


def _deadline(limit: float | None, margin: float | None) -> float:
    """Return when to stop, on the clock of `time.monotonic`; infinity without a limit."""
    end = job_end_time()
    left = limit if limit is not None else math.inf if end is None else end - time.time()
    if margin is None:
        margin = min(_LONGEST_MARGIN, max(0.0, _SHARE_OF_TIME * left))
    elif margin < 0 or (limit is not None and margin >= limit):
        most = "" if limit is None else f" and less than time_limit = {limit:g}"
        raise ValueError(f"margin: expected seconds, at least 0{most}, got {margin:g}")
    return time.monotonic() + left - margin
