"""The lines between the ranks of a pipeline, from step to step.

    first step with inputs of a shape     messages, each with its form; afterwards the ranks tell each other
                                          how large their mailboxes have to be, and allocate them together
    later steps                           mailboxes between ranks of a node, messages between nodes

Inputs of another shape make a first step again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from torch import Tensor

from ...backends import MAX_TAG, Backend, all_gather_object
from ..schedule.actions import Schedule
from .mailboxes import Line, Mailbox, Ring, allocate_rings, payload_bytes, slots_needed
from .wires import Forms, MailboxWire, MessageWire, Outbox, Wire

__all__ = ["Transport"]


class Transport:
    """What this rank has of the lines between ranks; made and used collectively.

    Args:
        backend: Of the pipeline's ranks, for nobody else's messages.
        placement: The rank of each stage.
        edges: Pairs of stages between which activations go forward and gradients back.

    Attributes:
        outbox: Messages under way.
    """

    def __init__(self, backend: Backend, placement: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
        self.outbox = Outbox(backend)
        self._backend = backend
        self._placement = tuple(placement)
        self._lines = sorted(_lines(placement, edges))
        self._node = frozenset(backend.node_ranks)
        self._rings: dict[Line, Ring] = {}
        self._mailboxes: dict[Line, Mailbox] = {}
        self._numbers: dict[Line, int] = {}

    def check(self, num_microbatches: int) -> None:
        """Raise if there are too many micro-batches to tell their messages apart; local.

        Raises:
            ValueError: There are.
        """
        if len(self._lines) * num_microbatches > MAX_TAG:
            most = MAX_TAG // len(self._lines)
            raise ValueError(f"num_microbatches: expected at most {most} with these stages, got {num_microbatches}")

    def wires(self, num_microbatches: int, *, trains: bool, learning: bool) -> dict[Line, Wire]:
        """Return this rank's ends of the lines for one step; the same call on all ranks."""
        wires: dict[Line, Wire] = {}
        for index, line in enumerate(self._lines):
            ends = [self._placement[stage] for stage in line]
            if not trains and line[0] > line[1]:
                continue
            mailbox = None if learning else self._mailboxes.get(line)
            if mailbox is not None:
                if self._backend.rank in ends:
                    wires[line] = MailboxWire(mailbox, self.outbox, self._numbers[line])
                self._numbers[line] += num_microbatches
            elif self._backend.rank in ends:
                peer = ends[1] if self._backend.rank == ends[0] else ends[0]
                name = f"from stage {line[0]} at stage {line[1]}"
                wires[line] = MessageWire(self._backend, self.outbox, peer, index * num_microbatches, name)
        return wires

    def learn(self, schedule: Schedule, forms: Forms, *, trains: bool) -> None:
        """Make mailboxes for what is known now, where those there are do not do; collective."""
        own = dict(self._needed(schedule, forms, trains=trains))
        wanted: dict[Line, Ring] = {}
        for of_rank in all_gather_object(self._backend, own):
            wanted |= of_rank
        missing = [line for line, ring in wanted.items() if not self._rings.get(line, Ring(0, 0)).covers(ring)]
        if not missing:
            return
        for line in missing:
            self._rings[line] = wanted[line].joined(self._rings.get(line, Ring(0, 0)))
        self._mailboxes = {}
        try:
            made = allocate_rings(self._backend, self._rings, self._placement)
        except MemoryError as error:
            warnings.warn(f"stages hand over their tensors by messages, which takes longer: {error}", stacklevel=2)
            self._rings = {}
        else:
            self._mailboxes = made
        self._numbers = dict.fromkeys(self._rings, 0)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in a mailbox; local."""
        storage = tensor.untyped_storage().data_ptr()
        return any(mailbox.storage == storage for mailbox in self._mailboxes.values())

    def _needed(self, schedule: Schedule, forms: Forms, *, trains: bool) -> Iterator[tuple[Line, Ring]]:
        """Yield the rings of the lines into this rank from other ranks of its node."""
        slots = slots_needed(schedule.actions[self._backend.rank], trains=trains)
        for line in self._lines:
            source, target = line
            here = self._placement[target] == self._backend.rank and self._placement[source] in self._node
            if not here or line not in slots:
                continue
            if source < target:
                known = [forms[source, target, m].tensors for m in range(schedule.num_microbatches)]
            else:
                known = [forms[target, source, m].trained for m in range(schedule.num_microbatches)]
            yield line, Ring(slots[line], max(map(payload_bytes, known)))


def _lines(placement: Sequence[int], edges: Sequence[tuple[int, int]]) -> Iterator[Line]:
    for source, target in edges:
        if placement[source] != placement[target]:
            yield source, target
            yield target, source
