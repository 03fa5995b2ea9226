"""Mailboxes: memory of a node through which stages hand over their tensors.

Each direction of each edge between two ranks of a node has a mailbox, a ring of cells in memory that both ranks
share. The sender copies a payload into a cell and increments a counter; the receiver computes with the cell itself,
so nothing is copied again, and no message has to progress while the sender computes.

    cell 0 | micro-batch 0, in use              |     filled 1   freed 0
    cell 1 | micro-batch 1, has arrived         |     filled 2   freed 0
    cell 2 | free                               |     filled 0   freed 0

A cell is free again after the last action that needs it: the sender of payload n waits until payload n - cells has
been freed. There is one more cell than the receiver has receives posted and not freed at once; so a sender never
waits longer than until its receive is posted, and the validator has proved that it is posted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends import NodeCounters, all_gather_number
from ..schedule.actions import Action, ActionKind
from .payload import TensorForm
from .wires import Outbox

Line = tuple[int, int]
"""A direction of an edge: the stage that sends and the stage that receives."""

_ALIGNMENT = 64


class MailboxSize(NamedTuple):
    """The size of a mailbox.

    Attributes:
        cells: Number of cells.
        cell_bytes: Bytes of each.
    """

    cells: int
    cell_bytes: int


def payload_bytes(forms: Iterable[TensorForm]) -> int:
    """Return the bytes that tensors take in a cell."""
    return sum(_aligned(form.nbytes) for form in forms)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def cells_needed(actions: Sequence[Action], *, trains: bool) -> dict[Line, int]:
    """Count the cells of each line into a rank: the most receives posted and not freed at once, plus 1.

    Args:
        actions: The rank's actions.
        trains: Whether payloads are needed until backward.
    """
    held: Counter[Line] = Counter()
    most: Counter[Line] = Counter()
    for action in actions:
        if action.kind.is_receive:
            held[action.line] += 1
            most[action.line] = max(most[action.line], held[action.line])
        elif action.kind in last_uses(trains=trains):
            held.subtract([line for line in held if line[1] == action.stage])
    return {line: count + 1 for line, count in most.items()}


def last_uses(*, trains: bool) -> tuple[ActionKind, ...]:
    """Return the kinds of actions that are the last to need the payloads of their stage and micro-batch."""
    return (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) if trains else (ActionKind.FORWARD,)


class Mailbox:
    """One end of a mailbox. Payloads are numbered from 0 over all steps.

    Args:
        outbox: This rank's messages, which progress while it waits.
        memory: [cells * cell_bytes] uint8, shared by both ends.
        size: The number and the bytes of its cells.
        counters: Of all mailboxes of the node.
        first: Index of this mailbox's first counter: `filled` of each cell, then `freed` of each cell.
        line: The stages at its ends.
        ranks: The ranks of these stages.
    """

    def __init__(
        self,
        outbox: Outbox,
        memory: Tensor,
        size: MailboxSize,
        counters: NodeCounters,
        first: int,
        line: Line,
        ranks: Sequence[int],
    ) -> None:
        self._outbox = outbox
        self._memory = memory
        self._size = size
        self._counters = counters
        self._filled = first
        self._freed = first + size.cells
        self._name = f"from stage {line[0]} at stage {line[1]}"
        self._sender, self._receiver = ranks
        self._views: list[list[Tensor]] = [[] for _ in range(size.cells)]
        self._first_of_step = self._first_of_next_step = 0

    def begin_step(self, num_microbatches: int) -> None:
        """Begin a step with this number of payloads."""
        self._first_of_step = self._first_of_next_step
        self._first_of_next_step += num_microbatches

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a cell."""
        number, cell = self._number_and_cell(micro_batch)
        freed, progress = number + 1 - self._size.cells, self._outbox.progress
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with self._outbox.backend.waiting("stage send", self._receiver, nbytes):
            if freed > 0:
                self._counters.wait(self._freed + cell, freed, f"sending {self._name}", progress, self._receiver)
            for view, tensor in zip(self._tensors(cell, tensors), tensors, strict=True):
                view.copy_(tensor)
            self._counters.post(self._filled + cell, number + 1)

    def post(self, micro_batch: int, forms: Sequence[TensorForm]) -> None:
        """Do nothing: the cell exists."""

    def take(self, micro_batch: int, forms: Sequence[TensorForm]) -> list[Tensor]:
        """Wait until the cell is filled; return its tensors, which are the cell itself."""
        number, cell = self._number_and_cell(micro_batch)
        progress = self._outbox.progress
        with self._outbox.backend.waiting("stage recv", self._sender):
            self._counters.wait(self._filled + cell, number + 1, f"receiving {self._name}", progress, self._sender)
        # Cells are views of one tensor; `data` gives each of them its own version counter.
        return [view.data for view in self._tensors(cell, forms)]

    def free(self, micro_batch: int) -> None:
        """Free the cell for a later payload."""
        number, cell = self._number_and_cell(micro_batch)
        self._counters.post(self._freed + cell, number + 1)

    def _number_and_cell(self, micro_batch: int) -> tuple[int, int]:
        number = self._first_of_step + micro_batch
        return number, number % self._size.cells

    def _tensors(self, cell: int, forms: Sequence[Tensor | TensorForm]) -> list[Tensor]:
        """Return views of a cell with these forms; cached until the forms change."""
        views = self._views[cell]
        if [(view.shape, view.dtype) for view in views] != [(form.shape, form.dtype) for form in forms]:
            views, offset = [], cell * self._size.cell_bytes
            for form in forms:
                views.append(self._memory[offset : offset + form.nbytes].view(form.dtype).view(form.shape))
                offset += _aligned(form.nbytes)
            self._views[cell] = views
        return views


def make_mailboxes(
    outbox: Outbox, sizes: Mapping[Line, MailboxSize], placement: Sequence[int]
) -> dict[Line, Mailbox]:
    """Make the mailboxes of all nodes; collective.

    Args:
        outbox: This rank's messages.
        sizes: Of each line between two ranks of one node, on all nodes; the same on all ranks.
        placement: The rank of each stage.

    Returns:
        This rank's mailboxes, by line.

    Raises:
        MemoryError: A node has not enough memory.
    """
    backend = outbox.backend.on(torch.device("cpu"))
    nodes = all_gather_number(backend, backend.node_ranks[0])
    starts: dict[Line, tuple[int, int]] = {}
    nbytes: Counter[int] = Counter()
    counters: Counter[int] = Counter()
    for line, size in sorted(sizes.items()):
        node = int(nodes[placement[line[1]]])
        starts[line] = nbytes[node], counters[node]
        nbytes[node] += size.cells * size.cell_bytes
        counters[node] += 2 * size.cells
    memory = backend.node_empty((max(nbytes.values(), default=0),), torch.uint8)
    words = backend.node_counters(max(counters.values(), default=0))
    made = {}
    for line, (start, first) in starts.items():
        ranks, size = [placement[stage] for stage in line], sizes[line]
        if backend.rank in ranks:
            own = memory[start : start + size.cells * size.cell_bytes]
            made[line] = Mailbox(outbox, own, size, words, first, line, ranks)
    return made
