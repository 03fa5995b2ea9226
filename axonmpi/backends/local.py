"""The backend of a group of one rank, which receives its own messages.

No other rank can differ, so nothing is compared, and asynchronous operations are complete when they return.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import CollectiveMismatchError
from ..types import CompletedWork, Seconds, Work
from .buffers import copy_message, copy_of
from .call import Call
from .contract import Backend
from .counters import NodeCounters
from .flat_parts import FlatParts
from .ranks import Parts
from .reduction import reduce_wide_into
from .worker import AtOnce


class _Receive(Work):
    """A receive that was posted before the message was sent, or after it."""

    def __init__(self, tensor: Tensor, tag: int) -> None:
        self._tensor = tensor
        self._tag = tag
        self._complete = False
        self._error: Exception | None = None

    def take(self, message: Tensor) -> None:
        """Put the message into the tensor; local."""
        try:
            copy_message(message, self._tensor, 0)
        except CollectiveMismatchError as error:
            self._error = error
        self._complete = True

    def wait(self, timeout: Seconds | None = None) -> None:
        """Raise if the message was of another size, or is still to be sent by this very rank."""
        if not self._complete:
            raise CollectiveMismatchError(
                f"recv(tag={self._tag}) waits for this very rank, which is alone in its group; send first, by isend"
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if the message was received."""
        return self._complete

    def result(self) -> int:
        """Wait, and return the rank that has sent: this one."""
        self.wait()
        return 0


class LocalBackend(Backend):
    """The communicator of one rank with itself.

    Args:
        timeout: As for every backend; nothing here takes long.
        memory: The device of memory that it allocates; the CPU if not given.
    """

    name = "local"
    device_types = ("cpu", "cuda")

    def __init__(self, *, timeout: float | None = None, memory: torch.device | None = None) -> None:
        super().__init__(0, 1, AtOnce(), timeout=timeout)
        self.place = self.place if memory is None else memory
        self._elsewhere = {self.place: self}  # one for each device, of which all have the same messages
        self._messages: dict[int, deque[Tensor]] = defaultdict(deque)
        self._receives: dict[int, deque[_Receive]] = defaultdict(deque)

    def on(self, place: torch.device) -> LocalBackend:
        """Return a communicator that allocates memory on a device; local."""
        if place not in self._elsewhere:
            other = self._elsewhere[place] = LocalBackend(timeout=self.timeout, memory=place)
            other._elsewhere = self._elsewhere
            other._messages, other._receives = self._messages, self._receives
        return self._elsewhere[place]

    @property
    def control(self) -> LocalBackend:
        """Backend for small messages of the library, on the CPU."""
        return self.on(torch.device("cpu"))

    def abort(self, code: int = 1) -> NoReturn:
        """End this process now, with exit code `code`; local."""
        os._exit(code)

    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Return: there are no others to fail."""

    def _reduce(self, call: Call, tensor: Tensor) -> None:
        torch.autograd.graph.increment_version(tensor)  # whatever the reduction, that of one tensor is the tensor

    def _broadcast(self, call: Call, tensor: Tensor) -> None: ...

    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return copy_of(tensor)

    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return copy_of(tensor)

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor]:
        return [copy_of(tensor)]

    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return copy_of(tensor)

    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        return [copy_of(tensor) for tensor in tensors]

    def _barrier(self, call: Call) -> None: ...

    def _symmetric_empty(self, call: Call) -> Tensor:
        return torch.empty(call.shape, dtype=call.dtype, device=self.place)

    def _node_empty(self, call: Call) -> Tensor:
        return self._symmetric_empty(call)

    def _counters(self, memory: Tensor) -> NodeCounters:
        return NodeCounters(memory, None, self.timeout, self.check_peers, self.give_way, oversubscribed=True)

    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        if tensor is not None:
            output.copy_(tensor)

    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        reduce_wide_into([parts.flat(place=output.device)], call.op, output)

    def _divide(self, call: Call, parts: Parts) -> LocalBackend:
        return LocalBackend(timeout=self.timeout, memory=self.place)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        if self._receives[tag]:
            self._receives[tag].popleft().take(copy_of(tensor))
        else:
            self._messages[tag].append(copy_of(tensor))

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._send(tensor, dst, tag)
        return CompletedWork()

    def _recv(self, tensor: Tensor, src: int, tag: int) -> None:
        work = _Receive(tensor, tag)
        if self._messages[tag]:
            work.take(self._messages[tag].popleft())
        work.wait()

    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        work = _Receive(tensor, tag)
        if self._messages[tag]:
            work.take(self._messages[tag].popleft())
        else:
            self._receives[tag].append(work)
        return work

    def _release(self) -> None:
        self._messages.clear()
        self._receives.clear()
