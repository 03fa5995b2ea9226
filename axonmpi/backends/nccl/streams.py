"""The CUDA streams of a group of GPUs: the order between them and the caller's stream, failures, the end.

    blocking        caller's stream: earlier work ── NCCL ── later work
    asynchronous    caller's stream ── event ──▶ group's stream: NCCL ── event ──▶ Work.wait(): caller's stream

Source: NCCL's user guide, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import AxonmpiError, CollectiveTimeoutError, CommunicatorError, NcclError
from ...utils.device import Device
from ..call import Call
from ..contract import Backend
from .library import Library, nccl_error
from .work import NcclWork

CLOSE_SECONDS = 10.0
"""How long closing a group waits for its operations on the GPU."""


class Channel:
    """A communicator and the stream that its operations run on.

    Args:
        communicator: nccl4py's.
        device: This rank's GPU.
        apart_from: Streams that its stream has to be another one than.

    Attributes:
        communicator: The same.
        stream: The stream.
        handle: Its address.
    """

    def __init__(self, communicator: Any, device: Device, apart_from: Sequence[Any] = ()) -> None:
        self.communicator = communicator
        self.stream = device.new_stream(apart_from)
        self.handle = device.handle(self.stream)


class Streams:
    """The channels of a group, and the order between their streams and the caller's.

    Args:
        nccl: NCCL.
        communicator: The group's, of nccl4py.
        device: This rank's GPU.
        rank: This rank's number.
        host: The same ranks over their CPUs, if they are connected: looked at while a GPU is waited for.
        check_open: Raises if the group cannot be used any more; takes the operation.

    Attributes:
        main: The group's own channel.
        channels: Those of pairs of ranks, then the group's own.
    """

    def __init__(
        self,
        nccl: Library,
        communicator: Any,
        device: Device,
        rank: int,
        host: Backend | None,
        check_open: Callable[[Any], None],
    ) -> None:
        self.main = Channel(communicator, device)
        self.channels = [self.main]
        self._nccl = nccl
        self._device = device
        self._rank = rank
        self._host = host
        self._check_open = check_open
        self._latest: Any = None  # the event behind the last operation that was told to the group's stream

    def add(self, communicator: Any) -> Channel:
        """Make a channel of its own for a pair of ranks; local."""
        channel = Channel(communicator, self._device, [each.stream for each in self.channels])
        self.channels.insert(-1, channel)
        return channel

    # ---- telling the GPU ----------------------------------------------------------------------------------

    def launch(self, channel: Channel, operation: Call | str, move: Callable[..., Any], *args: Any) -> NcclWork:
        """Enqueue an operation on a stream of the group, after all work of the caller's stream so far; local."""
        device = self._device
        self.check(operation, channel)
        device.wait(channel.stream, device.record(device.current_stream()))
        try:
            value = move(*args)
        except self._nccl.failures as error:
            raise self.failure(str(operation), error) from error
        done = device.record(channel.stream)
        if channel is self.main:
            self._latest = done
        return NcclWork(operation, device, done, value, partial(self._check_waiting, channel=channel))

    def caller(self, operation: Call) -> Any:
        """Return the caller's own stream, for a blocking operation: it would wait for the group's anyway; local.

        The communicator's operations on different streams follow each other, see "Using multiple streams" in
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/streams.html.
        """
        self.check(operation, self.main)
        stream = self._device.current_stream()
        if self._latest is not None:
            self._device.wait(stream, self._latest)
            self._latest = None
        return stream

    def block(self, operation: str, stream: Any, limit: float | None) -> None:
        """Wait until a stream has completed its work; local."""
        check = partial(self._check_waiting, channel=self.main)
        NcclWork(operation, self._device, self._device.record(stream), None, check).block(limit)

    # ---- failures -----------------------------------------------------------------------------------------

    def check(self, operation: Call | str, channel: Channel) -> None:
        """Raise if the group is closed, or the asynchronous error of its communicator; local."""
        self._check_open(operation)
        self._check_state(operation, channel)

    def _check_waiting(self, operation: Call | str, channel: Channel) -> None:
        """Raise the error that ends a wait: a closed group, NCCL's asynchronous error, a failed rank; local."""
        self._check_open(operation)
        self._check_ending(operation, channel)

    def _check_ending(self, operation: Call | str, channel: Channel) -> None:
        """Raise the error that ends the wait of a group that closes; local."""
        self._check_state(operation, channel)
        if self._host is not None:
            self._host.check_peers(str(operation))

    def _check_state(self, operation: Call | str, channel: Channel) -> None:
        """Raise the asynchronous error of a communicator, if it has one; local."""
        state = channel.communicator.get_async_error()
        if state:
            error = NcclError(self._nccl.core.get_error_string(state))
            raise nccl_error(f"{operation} on rank {self._rank}", error, channel.communicator)

    def failure(self, operation: str, error: Exception) -> NcclError:
        """Make the error of an operation that NCCL has refused; local."""
        return nccl_error(f"{operation} failed on rank {self._rank}", error, self.main.communicator)

    # ---- the end ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort the group's operations on the GPU, also those that wait for other ranks; local."""
        with self._nccl.core.group():  # one after the other, each would wait for the operations of the next
            for channel in self.channels:
                channel.communicator.abort()

    def close(self) -> None:
        """Wait for the work of the streams, and release the communicators; collective in effect.

        Raises:
            CommunicatorError: The GPU is not done after `CLOSE_SECONDS`.
        """
        failed: tuple[type[Exception], ...] = (AxonmpiError, *self._nccl.failures)
        try:
            for channel in self.channels:
                self._end(channel, channel.stream)
            self._end(self.main, self._device.current_stream())
            for channel in self.channels:
                channel.communicator.destroy()
        except CollectiveTimeoutError as error:
            self.abort()
            raise CommunicatorError(
                f"the GPU of rank {self._rank} still waited for operations that other ranks have not called when "
                "the group was closed, and was made to stop; wait for every Work before closing"
            ) from error
        except failed:  # the calls that failed have raised it
            self.abort()

    def _end(self, channel: Channel, stream: Any) -> None:
        check = partial(self._check_ending, channel=channel)
        NcclWork("close", self._device, self._device.record(stream), None, check).block(CLOSE_SECONDS)
