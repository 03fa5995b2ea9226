"""How tensors get from stage to stage: as messages, or through memory that two ranks have in common.

The executor asks for four things, whichever way they are done:

    send       hand a payload over; the tensors may be dropped afterwards
    post       get ready to receive
    take       wait for the payload
    free       it is not needed any more

The first time that inputs of some shape go through the pipeline nobody knows the shapes of what comes between the
stages. Then each payload is a message, and before it comes its form. Every later time all is known: receives are
posted ahead, each with a tag of its own, and ranks of a node use mailboxes.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ...backends import Backend
from ...errors import CollectiveTimeoutError
from ...types import Observer, Work
from .mailboxes import Mailbox
from .payload import Form, TensorForm

__all__ = ["Forms", "MailboxWire", "MessageWire", "Outbox", "Wire"]

Forms = dict[tuple[int, int, int], Form]
"""What is known of payloads: by the stages that they leave and come to, and the micro-batch."""

_YIELDS = 400
_NAP_SECONDS = 1e-4
_LENGTH = torch.int64
_UNOBSERVED = nullcontext()


class Outbox:
    """Messages under way from this rank; they progress when somebody asks.

    Args:
        backend: Of the pipeline's ranks.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: list[Work] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Begin to send."""
        with self.observed("send", (tensor,)):
            self._under_way.append(self._backend.isend(tensor.detach().contiguous(), dst, tag))

    def observed(self, operation: str, tensors: Sequence[Tensor] = ()) -> AbstractContextManager[None]:
        """Tell the backend's observer, if there is one, about what the block does: `"send"` or `"wait"`."""
        observer = self._backend.observer
        return _UNOBSERVED if observer is None else _observed(observer, operation, tensors)

    def progress(self) -> None:
        """Give the messages a chance to go on."""
        if self._under_way:
            self._under_way = [work for work in self._under_way if not _ended(work)]

    def wait(self, work: Work, what: str) -> None:
        """Wait for a message while the others go on, giving the core away."""
        with self.observed("wait"):
            self._wait(work, what)

    def _wait(self, work: Work, what: str) -> None:
        for _ in range(_YIELDS):
            if _ended(work):
                return
            self._backend.give_way()
            self.progress()
        began, timeout = time.monotonic(), self._backend.timeout
        while not _ended(work):
            time.sleep(_NAP_SECONDS)
            self.progress()
            self._backend.check_peers(what)
            if timeout is not None and time.monotonic() - began > timeout:
                raise CollectiveTimeoutError(f"{what} waited {timeout:g} s")

    def flush(self) -> None:
        """Wait until all messages are through."""
        for work in self._under_way:
            self.wait(work, "sending")
        self._under_way = []


@contextmanager
def _observed(observer: Observer, operation: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    observer.enter(operation, sum(tensor.nbytes for tensor in tensors))
    try:
        yield
    finally:
        observer.leave(operation)


def _ended(work: Work) -> bool:
    """Say whether a message is through; raise if it has failed."""
    if not work.done():
        return False
    work.wait()
    return True


class Wire(Protocol):
    """One direction of an edge, at one of its ends."""

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Hand over the payload of a micro-batch; the tensors may be dropped, but not changed, afterwards."""

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Get ready to receive the payload of a micro-batch."""

    def take(self, micro_batch: int, forms: Sequence[TensorForm]) -> list[Tensor]:
        """Wait for the payload of a micro-batch."""

    def free(self, micro_batch: int) -> None:
        """Say that the payload of a micro-batch is not needed any more."""


class MessageWire:
    """Tensors as tagged messages.

    Args:
        backend: Of the pipeline's ranks.
        outbox: For what is sent.
        peer: The rank at the other end.
        first_tag: Tag of micro-batch 0.
        name: For messages to the user.
    """

    def __init__(self, backend: Backend, outbox: Outbox, peer: int, first_tag: int, name: str) -> None:
        self._backend = backend
        self._outbox = outbox
        self._peer = peer
        self._first_tag = first_tag
        self._name = name
        self._posted: dict[int, tuple[list[Tensor], list[Work]]] = {}

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Send each tensor as a message."""
        for tensor in tensors:
            self._outbox.send(tensor, self._peer, self._first_tag + micro_batch)

    def send_form(self, micro_batch: int, form: Form) -> None:
        """Send what is to be known of the payload that follows."""
        text = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        self.send(micro_batch, [torch.tensor([text.numel()], dtype=_LENGTH), text])

    def take_form(self, micro_batch: int) -> Form:
        """Receive what is to be known of the payload that follows."""
        (length,) = self.take(micro_batch, [TensorForm((1,), _LENGTH, requires_grad=False)])
        (text,) = self.take(micro_batch, [TensorForm((int(length),), torch.uint8, requires_grad=False)])
        form: Form = pickle.loads(text.numpy().tobytes())
        return form

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Begin to receive."""
        tensors = [torch.empty(form.shape, dtype=form.dtype, device="cpu") for form in forms]
        tag = self._first_tag + micro_batch
        self._posted[micro_batch] = tensors, [self._backend.irecv(t, self._peer, tag) for t in tensors]

    def take(self, micro_batch: int, forms: Sequence[TensorForm]) -> list[Tensor]:
        """Wait for the messages."""
        if micro_batch not in self._posted:
            self.post(micro_batch, forms)
        tensors, works = self._posted.pop(micro_batch)
        for work in works:
            self._outbox.wait(work, f"receiving {self._name}")
        return tensors

    def free(self, micro_batch: int) -> None:
        """Do nothing: the tensors are this rank's own."""


class MailboxWire:
    """Tensors in memory that both ends have in common.

    Args:
        mailbox: The memory.
        outbox: What has to go on while this rank waits.
        first: Number of the payload of micro-batch 0, counted over all steps.
    """

    def __init__(self, mailbox: Mailbox, outbox: Outbox, first: int) -> None:
        self._mailbox = mailbox
        self._outbox = outbox
        self._first = first

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a slot."""
        with self._outbox.observed("send", tensors):
            self._mailbox.put(self._first + micro_batch, tensors, self._outbox.progress)

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Do nothing: the slot is there."""

    def take(self, micro_batch: int, forms: Sequence[TensorForm]) -> list[Tensor]:
        """Wait for the slot to be filled, return what is in it."""
        with self._outbox.observed("wait"):
            return self._mailbox.take(self._first + micro_batch, forms, self._outbox.progress)

    def free(self, micro_batch: int) -> None:
        """Give the slot back."""
        self._mailbox.free(self._first + micro_batch)
