"""Memory of a node that stages hand their tensors over in.

Each direction of each edge between two ranks of a node has a ring of slots, in memory that both have in common. The
sender copies a payload into a slot and counts up; the receiver computes with the slot itself, so nothing is copied
again, and no message has to progress while the sender computes.

    slot 0 | micro-batch 0, being computed with |     filled 1   freed 0
    slot 1 | micro-batch 1, has arrived         |     filled 2   freed 0
    slot 2 | free                               |     filled 0   freed 0

A slot is free again after the action that needed it last: the sender of number n waits until number n - slots has
been freed. There are as many slots as the receiver has receives posted and not freed at once, and one more; so a
sender never waits longer than until its receive is posted, which the validator has proved to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...backends import Backend, NodeCounters
from ..schedule.actions import Action, ActionKind
from .payload import TensorForm

__all__ = ["Line", "Mailbox", "Ring", "allocate_rings", "last_uses", "payload_bytes", "slots_needed"]

Line = tuple[int, int]
"""A direction of an edge: the stage that sends and the stage that receives."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Ring:
    """How large the ring of one line is.

    Attributes:
        slots: Number of slots.
        slot_bytes: Bytes of each.
    """

    slots: int
    slot_bytes: int

    def covers(self, other: Ring) -> bool:
        """Say whether another ring's payloads fit into this one."""
        return self.slots >= other.slots and self.slot_bytes >= other.slot_bytes

    def joined(self, other: Ring) -> Ring:
        """Return a ring that covers both."""
        return Ring(max(self.slots, other.slots), max(self.slot_bytes, other.slot_bytes))


def payload_bytes(forms: Iterable[TensorForm]) -> int:
    """Return the bytes that tensors take in a slot."""
    return sum(_aligned(form.nbytes) for form in forms)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slots_needed(actions: Sequence[Action], *, trains: bool) -> dict[Line, int]:
    """Count the slots of each line into a rank: receives posted and not freed at once, and one more.

    Args:
        actions: What the rank does.
        trains: Whether payloads are needed until backward.
    """
    held: Counter[Line] = Counter()
    most: Counter[Line] = Counter()
    waiting: dict[tuple[int, int], list[Line]] = {}
    last = last_uses(trains=trains)
    for action in actions:
        own = action.stage, action.micro_batch
        if action.kind.is_receive:
            assert action.peer is not None
            line = action.peer, action.stage
            held[line] += 1
            most[line] = max(most[line], held[line])
            waiting.setdefault(own, []).append(line)
        elif action.kind in last:
            for line in waiting.pop(own, []):
                held[line] -= 1
    return {line: count + 1 for line, count in most.items()}


def last_uses(*, trains: bool) -> tuple[ActionKind, ...]:
    """Return the kinds of actions after which what a stage has received for a micro-batch is not needed."""
    return (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) if trains else (ActionKind.FORWARD,)


class Mailbox:
    """One end of a ring.

    Args:
        memory: [slots * slot_bytes] uint8, common to both ends.
        ring: Its size.
        counters: Of all rings of the node.
        first: Number of the first of this ring's counters: for each slot filled, then for each slot freed.
        line: The stages at its ends.
        ranks: The ranks of these stages.
    """

    def __init__(
        self, memory: Tensor, ring: Ring, counters: NodeCounters, first: int, line: Line, ranks: tuple[int, int]
    ) -> None:
        self._memory = memory
        self._ring = ring
        self._counters = counters
        self._filled = first
        self._freed = first + ring.slots
        self._name = f"from stage {line[0]} at stage {line[1]}"
        self._sender, self._receiver = ranks
        self._views: list[list[Tensor]] = [[] for _ in range(ring.slots)]

    @property
    def storage(self) -> int:
        """Address of the memory that all rings of the node lie in."""
        return self._memory.untyped_storage().data_ptr()

    def put(self, number: int, tensors: Sequence[Tensor], meanwhile: Callable[[], None]) -> None:
        """Hand over payload `number`, counted from 0 over all steps."""
        slot = number % self._ring.slots
        free = number + 1 - self._ring.slots
        if free > 0:
            self._counters.wait(self._freed + slot, free, f"sending {self._name}", meanwhile, self._receiver)
        for view, tensor in zip(self._tensors(slot, tensors), tensors, strict=True):
            view.copy_(tensor)
        self._counters.post(self._filled + slot, number + 1)

    def take(self, number: int, forms: Sequence[TensorForm], meanwhile: Callable[[], None]) -> list[Tensor]:
        """Wait for payload `number`; return its tensors, which are the slot itself."""
        slot = number % self._ring.slots
        self._counters.wait(self._filled + slot, number + 1, f"receiving {self._name}", meanwhile, self._sender)
        # Slots lie in one memory, but what is written to one of them is no change of the others.
        return [view.data for view in self._tensors(slot, forms)]

    def free(self, number: int) -> None:
        """Say that payload `number` is not needed any more."""
        self._counters.post(self._freed + number % self._ring.slots, number + 1)

    def _tensors(self, slot: int, forms: Sequence[Tensor | TensorForm]) -> list[Tensor]:
        """Return tensors of these forms in a slot: those of last time if they had the same, as nearly always."""
        views = self._views[slot]
        if len(views) != len(forms) or any(
            view.shape != form.shape or view.dtype != form.dtype for view, form in zip(views, forms, strict=True)
        ):
            views, offset = [], slot * self._ring.slot_bytes
            for form in forms:
                views.append(self._view(offset, form.shape, form.dtype))
                offset += _aligned(form.nbytes)
            self._views[slot] = views
        return views

    def _view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._memory[offset : offset + nbytes].view(dtype).view(shape)


def allocate_rings(backend: Backend, rings: Mapping[Line, Ring], placement: Sequence[int]) -> dict[Line, Mailbox]:
    """Allocate the rings of this node; collective.

    Args:
        backend: Of the pipeline's ranks.
        rings: The size of the ring of each line between two ranks of one node, on all nodes; the same on all ranks.
        placement: The rank of each stage.

    Returns:
        The ends of the rings of this rank's node.
    """
    places: dict[Line, tuple[int, int]] = {}
    nbytes: Counter[int] = Counter()
    counters: Counter[int] = Counter()
    nodes = backend.all_gather(torch.tensor([backend.node_ranks[0]])).tolist()
    for line in sorted(rings):
        node = nodes[placement[line[1]]]
        places[line] = nbytes[node], counters[node]
        nbytes[node] += rings[line].slots * rings[line].slot_bytes
        counters[node] += 2 * rings[line].slots
    memory = backend.node_empty((max(nbytes.values(), default=0),), torch.uint8)
    words = backend.node_counters(max(counters.values(), default=0))
    own = nodes[backend.rank]
    made = {}
    for line, (start, first) in places.items():
        ranks = placement[line[0]], placement[line[1]]
        if nodes[ranks[1]] == own:
            ring = rings[line]
            part = memory[start : start + ring.slots * ring.slot_bytes]
            made[line] = Mailbox(part, ring, words, first, line, ranks)
    return made
