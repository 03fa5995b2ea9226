"""Messages between two GPUs.

NCCL runs the operations of one communicator in one order: a rank that first receives would wait for one that
first receives, too. So messages of a group are posted, and enqueued in one launch as soon as somebody waits
for one of them, or calls another operation. Pairs that are connected beforehand have a communicator and a stream
for each direction: a message is under way as soon as it is sent, beside all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CommunicatorError
from ...types import Seconds, Work
from ...utils.device import Device
from .dtypes import as_bytes, in_memory, is_plain
from .streams import Channel, Streams
from .work import NcclWork


@dataclass(eq=False)
class _Message(Work):
    """A message that the GPU is told at once, or when somebody waits for it.

    Attributes:
        sends: Whether this rank sends it.
        tensor: The tensor that is sent, or received into.
        peer: The other rank, as the communicator numbers it.
        ready: The event after which the tensor may be used; None of a message that is told at once.
        flush: Tells the GPU all messages that were posted.
        work: The launch, once there is one.
    """

    sends: bool
    tensor: Tensor
    peer: int
    ready: Any
    flush: Callable[[], None]
    work: NcclWork | None = None

    def _launched(self) -> NcclWork:
        if self.work is None:
            self.flush()
        if self.work is None:  # the launch of all that was posted has failed
            raise CommunicatorError("this message was never sent or received: an earlier operation has failed")
        return self.work

    def wait(self, timeout: Seconds | None = None) -> None:
        """Let later work of this thread's current stream begin after the message; see `NcclWork.wait`."""
        self._launched().wait(timeout)

    def done(self) -> bool:
        """Return True if the GPU has sent or received the message."""
        return self._launched().done()

    def result(self) -> None:
        """Wait; a message has no value."""
        self.wait()


class Messages:
    """The messages of a group.

    Args:
        core: nccl4py.
        device: This rank's GPU.
        streams: The group's.
    """

    def __init__(self, core: Any, device: Device, streams: Streams) -> None:
        self._core = core
        self._device = device
        self._streams = streams
        self._connected: set[tuple[int, int]] = set()
        self._channels: dict[tuple[int, int], Channel] = {}
        self._posted: list[_Message] = []

    def rounds_to_connect(self, pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Divide pairs that are not connected yet into rounds in which each rank is in one pair at most; local.

        A rank and itself are no pair.
        """
        rounds: list[list[tuple[int, int]]] = []
        for pair in dict.fromkeys(pairs):
            if pair[0] == pair[1] or pair in self._connected:
                continue
            self._connected.add(pair)
            free = (each for each in rounds if not any(rank in other for other in each for rank in pair))
            chosen = next(free, None)
            if chosen is None:
                rounds.append([pair])
            else:
                chosen.append(pair)
        return rounds

    def add_channel(self, pair: tuple[int, int], communicator: Any) -> None:
        """Use a communicator, in which they are 0 and 1, for messages from one rank to another; local."""
        self._channels[pair] = self._streams.add(communicator)

    def post(self, tensor: Tensor, src: int, dst: int, tag: int, *, sends: bool) -> Work:
        """Send or receive a message: at once on the pair's channel, else when somebody waits; local.

        Raises:
            ValueError: There is no channel, and `tag` is not 0.
        """
        channel = self._channels.get((src, dst))
        if channel is not None:
            message = _Message(sends, tensor, int(sends), None, self.flush)
            return self._streams.launch(channel, "isend" if sends else "irecv", self._move, channel, [message])
        if tag:
            raise ValueError(
                f"tag: expected 0 for tensors on a GPU, got {tag}: NCCL has no tags; messages between two ranks "
                "have to be received in the order in which they are sent"
            )
        ready = self._device.record(self._device.current_stream())
        message = _Message(sends, tensor, dst if sends else src, ready, self.flush)
        self._posted.append(message)
        return message

    def flush(self) -> None:
        """Tell the GPU all messages that were posted, in one launch, so that none waits for another; local."""
        if not self._posted:
            return
        posted, self._posted = self._posted, []
        main = self._streams.main
        for message in posted:
            self._device.wait(main.stream, message.ready)
        work = self._streams.launch(main, "messages", self._move, main, posted)
        for message in posted:
            message.work = work

    def _move(self, channel: Channel, messages: Sequence[_Message]) -> None:
        device, communicator = self._device, channel.communicator
        with device.within(channel.stream):
            memory = [self._memory(message, channel) for message in messages]
            with self._core.group():
                for message, values in zip(messages, memory, strict=True):
                    if values.numel():
                        move = communicator.send if message.sends else communicator.recv
                        move(as_bytes(values), message.peer, stream=channel.handle)  # the dtypes may differ
            for message, values in zip(messages, memory, strict=True):
                if not message.sends and values is not message.tensor:
                    message.tensor.copy_(values)

    def _memory(self, message: _Message, channel: Channel) -> Tensor:
        """Return contiguous memory to send from or receive into, on the channel's stream; local."""
        tensor = message.tensor
        self._device.keep(tensor, channel.stream)
        if message.sends:
            return in_memory(tensor)
        return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
