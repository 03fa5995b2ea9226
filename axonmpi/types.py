"""`ReduceOp`, `GradSyncStrategy` and `Work`, which all packages use."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Any

from .utils.arguments import Seconds

__all__ = ["CompletedWork", "GradSyncStrategy", "ReduceOp", "Seconds", "Work"]


class ReduceOp(enum.IntEnum):
    """The operation of a reduction over ranks.

    On `torch.bool`, SUM and MAX are the logical or, PRODUCT and MIN the logical and. Integers wrap around.
    AVERAGE needs a floating-point or complex dtype, MIN and MAX an ordered one. BAND, BOR and BXOR are the bitwise
    and, or and exclusive or, of integers and `torch.bool`.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class GradSyncStrategy(enum.Enum):
    """The time at which data parallelism reduces gradients.

    SYNCHRONOUS: all at the end of backward, or when `sync_gradients()` is called.
    OVERLAPPED: bucket by bucket, while backward runs if ranks have a spare core for it.
    NO_SYNC: only when `sync_gradients()` is called.
    """

    SYNCHRONOUS = "synchronous"
    OVERLAPPED = "overlapped"
    NO_SYNC = "no_sync"


class Work(ABC):
    """A running operation. Operations of one group run in the order in which they were started."""

    @abstractmethod
    def wait(self, timeout: Seconds | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout: Seconds to wait; None has no limit.

        Raises:
            CollectiveTimeoutError: Not complete in time; the operation continues and can be waited for again.
            Exception: Raised by the operation itself.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return True if the operation is complete or has failed, without blocking."""

    @abstractmethod
    def result(self) -> Any:
        """Wait, then return the result of the operation."""


class CompletedWork(Work):
    """The Work of an operation that is complete from the start."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def wait(self, timeout: Seconds | None = None) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the operation's value."""
        return self._value
