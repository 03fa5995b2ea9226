"""Messages between two GPUs.

NCCL does what it is told for one communicator in one order: a rank that first receives would wait for one that
first receives, too. So messages of a group are posted, and told to the GPU in one launch as soon as somebody waits
for one of them, or calls another operation. Pairs that are connected beforehand have a communicator and a stream
for each direction: a message is under way as soon as it is sent, beside all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...types import Seconds, Work
from ...utils.device import Device
from .work import NcclWork

__all__ = ["Channel", "Posted", "PostedWork", "rounds_of"]


class Channel:
    """A communicator and the stream that its operations run on.

    Args:
        communicator: nccl4py's.
        device: This rank's GPU.

    Attributes:
        communicator: The same.
        stream: The stream.
        handle: Its address.
    """

    def __init__(self, communicator: Any, device: Device) -> None:
        self.communicator = communicator
        self.stream = device.new_stream()
        self.handle = device.handle(self.stream)


@dataclass
class Posted:
    """A message that the GPU is still to be told.

    Attributes:
        sends: Whether this rank sends it.
        tensor: What is sent, or where it goes.
        peer: The other rank.
        ready: The event after which the tensor may be used.
        work: The launch, once there is one.
    """

    sends: bool
    tensor: Tensor
    peer: int
    ready: Any
    work: list[NcclWork] = field(default_factory=list)


class PostedWork(Work):
    """A message that is told to the GPU when somebody waits for it.

    Args:
        flush: Tells the GPU all that is posted.
        posted: The message.
    """

    def __init__(self, flush: Callable[[], None], posted: Posted) -> None:
        self._flush = flush
        self._posted = posted

    def _work(self) -> NcclWork:
        if not self._posted.work:
            self._flush()
        return self._posted.work[0]

    def wait(self, timeout: Seconds | None = None) -> None:
        """Let what this thread tells the GPU from now on begin after the message; see `NcclWork.wait`."""
        self._work().wait(timeout)

    def done(self) -> bool:
        """Say whether the GPU has sent or received the message."""
        return self._work().done()

    def result(self) -> None:
        """Wait; a message has no value."""
        self.wait()


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs of ranks into rounds in which each rank is in one pair at most; local.

    Pairs of a rank with itself are left out.
    """
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        if pair[0] == pair[1]:
            continue
        free = (each for each in rounds if not any(rank in other for other in each for rank in pair))
        chosen = next(free, None)
        if chosen is None:
            rounds.append([pair])
        else:
            chosen.append(pair)
    return rounds
