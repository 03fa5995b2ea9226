"""`PreemptionGuard`: the step at which all ranks stop, after a signal or before time is up.

    signal ──► handler ──► a flag of this rank ──┐
    clock ───────────────► near the end? ────────┴──► vote ──► sum or largest of all ranks ──► all stop, or none

A handler only sets the flag: it runs between any two instructions of the program, and could not save there. Ranks
notice at different times, and the signal may reach only some. So they vote: all ranks stop at the same step, after
one small reduction, or after another reduction that carries the vote along.
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
from ..launch.launcher_variables import job_end_time
from ..launch.user_variables import stop_signal
from ..types import ReduceOp, Seconds
from ..utils.arguments import seconds

_LONGEST_MARGIN = 60.0
_SHARE_OF_TIME = 0.1
_NOT_CALLED = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
"""Earlier handlers that are not called: they end the program, or do nothing."""


class PreemptionGuard:
    """An early stop of all ranks at the same step: after a signal on any of them, or when the time is nearly up.

    The constructor installs handlers. `close()`, or the end of a `with` block, restores the earlier ones; without
    either the handlers stay to the end of the process. An earlier handler that is a Python function is called after
    the flag is set; the default action, which would end the process, is not taken. More signals change nothing. In
    forked processes, such as DataLoader workers, SIGTERM has its earlier handler again, and the other signals are
    ignored: launchers send them to all processes of a job.

    Construction is local.

    Args:
        signals: Numbers of the signals to handle; None means SIGTERM and SIGUSR1, or SIGTERM and the signal in the
            environment variable `AXONMPI_STOP_SIGNAL`. Without any signal the guard needs no main thread.
        time_limit: Seconds from now until this process will be ended, or a `timedelta`; None means the end of the
            Slurm job (`SLURM_JOB_END_TIME`), if this is one and has a limit.
        margin: Seconds before that end at which to stop: as long as a step and a save take, at least. None means a
            tenth of the time, and no more than 60.
        group: The ranks that stop together; None means the default group at the time when it is needed.

    Raises:
        ValueError: A signal cannot be handled, this is not the main thread of the process, a number is not
            positive, or the margin is longer than the time.
        TypeError: `signals` are no numbers of signals, or `group` is no group.
    """

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

    # ---- the vote -------------------------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Return True on all ranks if any of them wants to stop; collective.

        It costs a reduction of one byte. After the first True, it stays True and nothing is sent.
        """
        if not self._decided:
            backend = chosen_group(self._group).backend.control
            votes = torch.tensor([self._votes()], dtype=torch.uint8, device=backend.place)
            backend.all_reduce(votes, ReduceOp.MAX)
            self._decided = bool(votes.item())
        return self._decided

    def vote(self) -> float:
        """Return 1.0 if this rank wants to stop, else 0.0, to be summed with other values of the program; local.

        ::

            total = torch.tensor([loss, guard.vote()])
            ax.all_reduce(total)
            if guard.decide(total[1]):
                ...

        Each vote is followed by one `decide`, on all ranks.
        """
        return float(self._votes())

    def decide(self, votes: float | torch.Tensor) -> bool:
        """Return True if the sum, average or maximum of all ranks' votes says to stop; local.

        Args:
            votes: A number, or a tensor of one element, the same on all ranks.
        """
        self._decided = self._decided or float(votes) > 0
        return self._decided

    def request_stop(self) -> None:
        """Set this rank's flag, as a signal does: all ranks stop at the next vote; local."""
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
        _installed.add(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True
        earlier = self._earlier.get(signal.Signals(number))
        if callable(earlier) and earlier not in _NOT_CALLED:
            earlier(number, frame)

    def close(self) -> None:
        """Restore the earlier handlers; local, in the main thread, may be called twice.

        A handler that was replaced meanwhile is left alone.
        """
        while self._earlier:
            number, earlier = self._earlier.popitem()
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, earlier)

    def _become_child(self) -> None:
        """Handle SIGTERM as before in a forked process, since multiprocessing sends it, and ignore the others."""
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
        """Restore the handlers."""
        self.close()


_installed: weakref.WeakSet[PreemptionGuard] = weakref.WeakSet()


def _become_children() -> None:
    for guard in _installed:
        guard._become_child()


os.register_at_fork(after_in_child=_become_children)


def _checked(signals: Iterable[int]) -> list[signal.Signals]:
    try:
        return [signal.Signals(each) for each in dict.fromkeys(signals)]
    except (ValueError, TypeError) as error:
        expected = "signals: expected numbers of signals, such as (signal.SIGTERM, signal.SIGUSR1)"
        raise type(error)(f"{expected}, got {signals!r}") from None


def _deadline(limit: float | None, margin: float | None) -> float:
    """Return the time to stop at, on the clock of `time.monotonic`; infinity without a limit."""
    end = job_end_time()
    left = limit if limit is not None else math.inf if end is None else end - time.time()
    if margin is None:
        margin = min(_LONGEST_MARGIN, max(0.0, _SHARE_OF_TIME * left))
    elif margin < 0 or (limit is not None and margin >= limit):
        most = "" if limit is None else f" and less than time_limit = {limit:g}"
        raise ValueError(f"margin: expected seconds, at least 0{most}, got {margin:g}")
    return time.monotonic() + left - margin
