"""The choice of a mailbox or of messages for each pair of stages, kept from step to step.

    first step with inputs of a shape     messages, each with its form; afterwards the ranks gather the sizes of
                                          their mailboxes, and allocate them together
    later steps                           mailboxes between ranks of a node, messages between nodes

Tensors on GPUs are messages in later steps, too. Inputs of another shape make a first step again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ...backends import MAX_TAG, Backend, all_gather_object
from ..schedule.actions import Schedule
from .mailboxes import Line, Mailbox, MailboxSize, cells_needed, make_mailboxes, payload_bytes
from .payload import Forms
from .wires import MessageWire, Outbox

Wire = MessageWire | Mailbox
"""One direction of an edge, at one of its ends."""


@runtime_checkable
class PairConnector(Protocol):
    """A backend that matches messages by their order instead of tags, such as NCCL's.

    Without `connect_pairs` all messages of a group have one order, the order of the calls, and a tag has to be 0.
    """

    def connect_pairs(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give each direction of each pair of ranks an order of its own; collective.

        Messages from one rank to another have to be received in the order of their sends, with any tags.

        Args:
            pairs: Source and destination of each direction that is used; the same on all ranks.
        """


class Transport:
    """This rank's ends of the lines between ranks; made and used collectively.

    Args:
        backend: Of the pipeline's ranks; it carries no other messages.
        placement: The rank of each stage.
        edges: Pairs of stages between which activations go forward and gradients back.

    Attributes:
        outbox: Messages under way.
    """

    def __init__(self, backend: Backend, placement: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
        self.outbox = Outbox(backend)
        self._backend = backend
        self._placement = tuple(placement)
        apart = [(source, target) for source, target in edges if placement[source] != placement[target]]
        self._lines = sorted([*apart, *((target, source) for source, target in apart)])
        if isinstance(backend, PairConnector):
            backend.connect_pairs(sorted({(placement[line[0]], placement[line[1]]) for line in self._lines}))
        self._sizes: dict[Line, MailboxSize] = {}
        self._mailboxes: dict[Line, Mailbox] = {}

    def check(self, num_microbatches: int) -> None:
        """Raise unless each message of a step has a tag of its own; local.

        Raises:
            ValueError: There are too many micro-batches.
        """
        if len(self._lines) * num_microbatches > MAX_TAG:
            most = MAX_TAG // len(self._lines)
            raise ValueError(f"num_microbatches: expected at most {most} with these stages, got {num_microbatches}")

    def wires(self, num_microbatches: int, forms: Forms, *, trains: bool) -> dict[Line, Wire]:
        """Return this rank's ends of the lines for one step; the same call on all ranks."""
        wires: dict[Line, Wire] = {}
        for index, line in enumerate(self._lines):
            peers = [self._placement[stage] for stage in line]
            if self._backend.rank not in peers or (line[0] > line[1] and not trains):
                continue
            if line in self._mailboxes and forms.are_complete:
                self._mailboxes[line].begin_step(num_microbatches)
                wires[line] = self._mailboxes[line]
            else:
                peers.remove(self._backend.rank)
                name = f"from stage {line[0]} at stage {line[1]}"
                wires[line] = MessageWire(self.outbox, peers[0], index * num_microbatches, name)
        return wires

    def learn(self, schedule: Schedule, forms: Forms, *, trains: bool) -> None:
        """Mark the forms as known, and make larger mailboxes if these payloads do not fit; collective."""
        forms.are_complete = True
        sizes = dict(self._sizes)
        for needed in all_gather_object(self._backend, self._needed(schedule, forms, trains=trains)):
            for line, size in needed.items():
                sizes[line] = MailboxSize(*map(max, size, sizes.get(line, size)))
        if sizes == self._sizes:
            return
        self._sizes, self._mailboxes = sizes, {}
        try:
            self._mailboxes = make_mailboxes(self.outbox, sizes, self._placement)
        except MemoryError as error:
            warnings.warn(f"stages hand over their tensors by messages, which takes longer: {error}", stacklevel=2)
            self._sizes = {}

    def _needed(self, schedule: Schedule, forms: Forms, *, trains: bool) -> dict[Line, MailboxSize]:
        """Return the mailbox sizes of the lines into this rank from ranks of its node."""
        sizes = {}
        for line, cells in cells_needed(schedule.actions[self._backend.rank], trains=trains).items():
            payloads = [forms.carried(line, m) for m in range(schedule.num_microbatches)]
            kinds = {form.device_type for payload in payloads for form in payload} or {"cpu"}
            nodes = [self._backend.on(torch.device(kind)).node_ranks for kind in kinds]
            if all(self._placement[line[0]] in node for node in nodes):
                sizes[line] = MailboxSize(cells, max(map(payload_bytes, payloads)))
        return sizes
