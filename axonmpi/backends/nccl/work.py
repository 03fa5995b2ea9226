"""`NcclWork`: an operation that a GPU was told to run, to be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import CollectiveTimeoutError
from ...types import Seconds, Work
from ...utils.arguments import seconds
from ...utils.device import Device
from ...utils.waiting import network_backoff, wait_until
from ..call import Call


class NcclWork(Work):
    """An operation on a stream of its own.

    Args:
        operation: Its name.
        device: Its GPU.
        done: The event behind it.
        value: The operation's result.
        check: Raises the error that NCCL has come to meanwhile, if any.

    Attributes:
        value: The same.
    """

    def __init__(
        self, operation: Call | str, device: Device, done: Any, value: Any, check: Callable[[Call | str], None]
    ) -> None:
        self.operation = operation
        self._device = device
        self._done = done
        self.value = value
        self._check = check

    def wait(self, timeout: Seconds | None = None) -> None:
        """Let later work of this thread's current stream begin after the operation.

        That does not block; with a time-out it does, until the GPU has done it.

        Args:
            timeout: Seconds to block; None does not block.

        Raises:
            CollectiveTimeoutError: Not complete in time; the operation goes on and can be waited for again.
            NcclError: The communicator has failed.
        """
        limit = seconds("timeout", timeout, positive=False)
        if limit is not None:
            self.block(limit)
        stream = self._device.current_stream()
        self._device.wait(stream, self._done)
        for tensor in self.value if isinstance(self.value, list) else [self.value]:
            if isinstance(tensor, Tensor):  # allocated for the stream that the operation was called from
                self._device.keep(tensor, stream)

    def block(self, limit: float | None = None) -> None:
        """Block this thread until the GPU has done the operation; local.

        Raises:
            CollectiveTimeoutError: That took longer than `limit` seconds.
            NcclError: The communicator has failed.
        """

        def ready() -> bool:
            self._check(self.operation)
            return self._device.is_complete(self._done)

        if not wait_until(ready, network_backoff(), limit):
            raise CollectiveTimeoutError(
                f"{self.operation} was not complete after {limit:g} s: another rank has not called it, or its GPU "
                "is still computing"
            )

    def done(self) -> bool:
        """Return True if the GPU has done the operation.

        Raises:
            NcclError: It has not, and the communicator has failed.
        """
        if self._device.is_complete(self._done):
            return True
        self._check(self.operation)
        return False

    def result(self) -> Any:
        """Wait, then return the operation's value."""
        self.wait()
        return self.value
