"""Messages between stages.

The executor asks a wire for four things:

    send       hand a payload over; the tensors may be dropped afterwards
    post       get ready to receive
    take       wait for the payload
    free       the payload is not needed any more

The first time that inputs of some shape go through the pipeline, no rank knows the shapes of the tensors between
stages. Then each payload is a message, and its form travels before it. Every later time the forms are known:
receives are posted ahead, each with a tag of its own, and ranks of a node use mailboxes.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...backends import Backend
from ...errors import CollectiveTimeoutError
from ...types import Work
from ...utils.waiting import Backoff
from .payload import Form, TensorForm

__all__ = ["MessageWire", "Outbox"]

_YIELDS = 400
"""How often a rank that waits for a message yields its core before it naps."""
_LENGTH = torch.int64


class Outbox:
    """Messages under way from this rank; they progress when asked to.

    Args:
        backend: Of the pipeline's ranks.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._under_way: list[Work] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Begin to send."""
        with self.observed("send", (tensor,)):
            self._under_way.append(self.backend.isend(tensor.detach().contiguous(), dst, tag))

    @contextmanager
    def observed(self, operation: str, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Tell the backend's observer, if there is one, about the block: `"send"` or `"wait"`."""
        observer = self.backend.observer
        if observer is not None:
            observer.enter(operation, sum(tensor.nbytes for tensor in tensors))
        try:
            yield
        finally:
            if observer is not None:
                observer.leave(operation)

    def progress(self) -> None:
        """Give the messages a chance to go on."""
        if self._under_way:
            self._under_way = [work for work in self._under_way if not _ended(work)]

    def wait(self, work: Work, what: str) -> None:
        """Wait for a message while the others go on."""
        with self.observed("wait"):
            backoff, began, timeout = Backoff(_YIELDS), time.monotonic(), self.backend.timeout
            while not _ended(work):
                backoff.rest()
                self.progress()
                self.backend.check_peers(what)
                if timeout is not None and time.monotonic() - began > timeout:
                    raise CollectiveTimeoutError(f"{what} waited {timeout:g} s")

    def flush(self) -> None:
        """Wait until all messages are through."""
        for work in self._under_way:
            self.wait(work, "sending")
        self._under_way = []


def _ended(work: Work) -> bool:
    """Say whether a message is through; raise if it has failed."""
    if not work.done():
        return False
    work.wait()
    return True


class MessageWire:
    """Tensors as tagged messages.

    Args:
        outbox: For sent messages.
        peer: The rank at the other end.
        first_tag: Tag of micro-batch 0.
        name: For messages to the user.
    """

    def __init__(self, outbox: Outbox, peer: int, first_tag: int, name: str) -> None:
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
        """Send the form of the payload that follows."""
        text = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        self.send(micro_batch, [torch.tensor([text.numel()], dtype=_LENGTH), text])

    def take_form(self, micro_batch: int) -> Form:
        """Receive the form of the payload that follows."""
        (length,) = self.take(micro_batch, [TensorForm((1,), _LENGTH, requires_grad=False)])
        (text,) = self.take(micro_batch, [TensorForm((int(length),), torch.uint8, requires_grad=False)])
        form: Form = pickle.loads(text.numpy().tobytes())
        return form

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Begin to receive."""
        tensors = [torch.empty(form.shape, dtype=form.dtype, device="cpu") for form in forms]
        tag, backend = self._first_tag + micro_batch, self._outbox.backend
        self._posted[micro_batch] = tensors, [backend.irecv(t, self._peer, tag) for t in tensors]

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
