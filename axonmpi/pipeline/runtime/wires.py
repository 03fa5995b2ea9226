"""Tagged messages between stages on different nodes, received into memory posted ahead.

The executor calls four methods of a wire:

    send       send a payload; the tensors may be dropped afterwards
    post       post the receive
    take       wait for the payload
    free       the payload is not needed any more

In the first step with inputs of some shape, no rank knows the shapes of the tensors between stages. Then each
payload is a message, and its form is sent before it. In later steps the forms are known: receives are posted ahead,
each with a tag of its own, and ranks of a node use mailboxes.

CPUs send forms and tensors on the CPU, and wait for them. GPUs send tensors on a GPU: only the stream waits, and
the messages of two ranks are matched by their order, without tags.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends import Backend
from ...errors import CollectiveTimeoutError
from ...types import Work
from ...utils.device import device_at
from ...utils.waiting import Backoff
from .payload import Form, TensorForm

_YIELDS = 400
"""The number of times that a rank yields its core before it naps, while it waits for a message."""
_LENGTH = torch.int64


class Outbox:
    """This rank's unfinished sends.

    Args:
        backend: Of the pipeline's ranks.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._under_way: list[Work] = []
        self._on_streams: list[Work] = []

    def send(self, tensor: Tensor, dst: int, tag: int, carrier: Backend | None = None) -> None:
        """Begin to send by the backend `carrier`; None chooses by the tensor's device."""
        work = (carrier or self.backend).isend(tensor.detach().contiguous(), dst, tag)
        works = self._on_streams if device_at(tensor.device).is_asynchronous else self._under_way
        works.append(work)

    def progress(self) -> None:
        """Let sends between CPUs progress, and drop finished ones."""
        if self._under_way:
            self._under_way = [work for work in self._under_way if not _ended(work)]

    def receive(self, work: Work, tensor: Tensor, what: str, src: int, tag: int) -> None:
        """Wait until a tensor has arrived: on the CPU this thread waits, on a GPU the current stream."""
        with self.backend.waiting("wait for irecv", src, tag=tag):
            if device_at(tensor.device).is_asynchronous:
                work.wait(self.backend.timeout)
            else:
                self._wait(work, what)

    def _wait(self, work: Work, what: str) -> None:
        """Wait for a message between CPUs while other sends progress."""
        backoff, began, timeout = Backoff(_YIELDS), time.monotonic(), self.backend.timeout
        while not _ended(work):
            backoff.rest()
            self.progress()
            self.backend.check_peers(what)
            if timeout is not None and time.monotonic() - began > timeout:
                raise CollectiveTimeoutError(f"{what} waited {timeout:g} s")

    def flush(self) -> None:
        """Wait until all sends are complete: on the CPU this thread waits, on a GPU the current stream."""
        if self._under_way:
            with self.backend.waiting("wait for isend"):
                for work in self._under_way:
                    self._wait(work, "sending")
        for work in self._on_streams:
            work.wait(self.backend.timeout)
        self._under_way, self._on_streams = [], []


def _ended(work: Work) -> bool:
    """Return True if a message is complete; raise its error if it has failed."""
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
        control = self._outbox.backend.control
        text = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        for part in (torch.tensor([text.numel()], dtype=_LENGTH, device="cpu"), text):
            self._outbox.send(part.to(control.place), self._peer, self._first_tag + micro_batch, control)

    def take_form(self, micro_batch: int) -> Form:
        """Receive the form of the payload that follows."""
        length = self._take_control(micro_batch, 1, _LENGTH)
        text = self._take_control(micro_batch, int(length), torch.uint8)
        form: Form = pickle.loads(text.cpu().numpy().tobytes())
        return form

    def _take_control(self, micro_batch: int, numel: int, dtype: torch.dtype) -> Tensor:
        control = self._outbox.backend.control
        tensor = torch.empty(numel, dtype=dtype, device=control.place)
        work = control.irecv(tensor, self._peer, self._first_tag + micro_batch)
        self._outbox.receive(work, tensor, f"receiving {self._name}", self._peer, self._first_tag + micro_batch)
        return tensor

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Begin to receive."""
        tag, backend = self._first_tag + micro_batch, self._outbox.backend
        tensors = [
            torch.empty(form.shape, dtype=form.dtype, device=backend.on(torch.device(form.device_type)).place)
            for form in forms
        ]
        self._posted[micro_batch] = tensors, [backend.irecv(t, self._peer, tag) for t in tensors]

    def take(self, micro_batch: int, forms: Sequence[TensorForm]) -> list[Tensor]:
        """Wait for the messages."""
        tensors, works = self._posted.pop(micro_batch)
        tag = self._first_tag + micro_batch
        for work, tensor in zip(works, tensors, strict=True):
            self._outbox.receive(work, tensor, f"receiving {self._name}", self._peer, tag)
        return tensors

    def free(self, micro_batch: int) -> None:
        """Do nothing: the tensors are this rank's own."""
