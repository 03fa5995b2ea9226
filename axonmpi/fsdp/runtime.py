"""Running a model whose parameters are spread over the ranks.

    forward     unit 1 ─▶ unit 2 ─▶ unit 3          before a unit computes its parameters are gathered
    backward    unit 1 ◀─ unit 2 ◀─ unit 3          again, and its gradients are reduced when the last one is there
    end         did any rank have a gradient for each parameter? every rank is here: shards may change now

Gradients are reduced in one order on all ranks, whatever order they come in. Ranks of a node read each other's
shards while they compute, so nobody may change a shard before all have come to the end of backward. Where no
backward follows a forward, the ranks meet when an optimizer is about to step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..groups.world import ProcessGroup
from ..types import ReduceOp
from ..utils.torch_internals import (
    after_backward,
    in_backward,
    next_sequence_number,
    outside_compile,
    sequence_number,
)
from ..wrapping.autograd import accumulates_into, leaf_below, tensors_in
from .flat_parameter import State
from .gradients import FlatGradient
from .unit import ShowsWholes, Unit, check_parts

__all__ = ["Run"]


class Run:
    """Gathers parameters and reduces gradients as a model computes.

    Args:
        group: The ranks that share the parameters out.
        replicas: The ranks that hold the same shard as this one; None if there are no others.

    Attributes:
        units: The units; the model itself first.
        gradients: The gradients, in the order in which they are reduced.
        enabled: False while gradients only accumulate.
        gathers_ahead: Whether the next unit is gathered while the present one computes.
        by_hand: What shows whole parameters to the user, if anything does.
        accumulates: Whether a backward has left gradients that were not averaged.
    """

    def __init__(self, group: ProcessGroup, replicas: ProcessGroup | None) -> None:
        backend = group.backend
        self.group = group
        self.replicas = replicas
        self.units: list[Unit] = []
        self.gradients: list[FlatGradient] = []
        self.enabled = True
        self.by_hand: ShowsWholes | None = None
        self.accumulates = False
        self.gathers_ahead = backend.overlaps and len(backend.node_ranks) < group.size
        self._reduces_ahead = backend.overlaps and group.size > 1
        self._gathers = False
        self._stack: list[Unit] = []
        self._starts: list[int] = []
        self._events = 0
        self._records = False
        self._shown: list[Unit] = []
        self._order: list[Unit] = []
        self._next_order: list[Unit] = []
        self._reading = False
        self._open = False
        self._next = 0
        self._under_way: deque[FlatGradient] = deque()
        self._most_under_way = 0

    def start(self, units: Sequence[Unit], gradients: Sequence[FlatGradient], watch: Callable[..., None]) -> None:
        """Take over the units; local.

        Args:
            units: All of them.
            gradients: Of all that is trained, in the order in which they are to be reduced.
            watch: Lets a unit's output tell when its backward begins, see `hooks.watch`.
        """
        self.units, self.gradients = list(units), list(gradients)
        # Whole gradients of two blocks at a time, or a slow network would leave those of the whole model in memory.
        sizes = [gradient.whole_bytes for gradient in gradients if gradient.unit is not units[0]]
        self._most_under_way = 2 * max(sizes, default=0)
        self._gathers = not all(unit.is_resident for unit in units)
        self._watch_output = watch

    @property
    def depth(self) -> int:
        """How many forwards of units are going on, one within the other."""
        return len(self._stack)

    @property
    def timeout(self) -> float | None:
        """Seconds to wait for a collective."""
        return self.group.backend.timeout

    @property
    def has_whole_parameters(self) -> bool:
        """Whether each parameter is on one rank as a whole."""
        return all(flat.layout.keeps_whole for unit in self.units for flat in unit.flats)

    @property
    def shows_wholes(self) -> bool:
        """Whether modules compute with the whole parameters that users have gathered: without gradients."""
        shown = self.by_hand is not None and self.by_hand.shown
        return shown and not self._stack and not torch.is_grad_enabled()

    # ---- forward --------------------------------------------------------------------------------------------

    @outside_compile
    def before_forward(self, unit: Unit) -> None:
        """Make a unit's parameters whole; collective."""
        if not self._stack and not in_backward():
            self._begin_pass()
        unit.begin_gather()
        unit.finish_gather()
        unit.version = unit.changes()
        self._stack.append(unit)
        self._starts.append(next_sequence_number())
        unit.active += 1
        if unit.active == 1:
            unit.install_fulls()
        if not in_backward():
            self._events += 1
            if self._records:
                unit.first_event = min(unit.first_event, self._events)
            self._next_order.append(unit)
            self._gather_ahead(self._order, unit, 1)

    @outside_compile
    def after_forward(self, unit: Unit, output: Any) -> None:
        """Let the unit's parameters go, and be there for its backward; local."""
        if not self._stack or self._stack[-1] is not unit:  # the forward has not begun
            return
        if unit.active == 1:
            unit.install_parts()
        unit.active -= 1
        self._stack.pop()
        start = self._starts.pop()
        if not in_backward():
            self._events += 1
        if torch.is_grad_enabled():
            self._watch(unit, output, start)
        if not self._stack:
            self._reading = True

    def _watch(self, unit: Unit, output: Any, start: int) -> None:
        is_outermost = not self._stack
        event = self._events if not in_backward() else None
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is not None and sequence_number(node) >= start:  # not one that the unit was given
                leaf = leaf_below(tensor) if is_outermost else None
                self._watch_output(self, tensor, unit, event, is_outermost, leaf)

    def _begin_pass(self) -> None:
        """See that the parameters are what they were, and that all ranks have made their changes; collective."""
        if self._open:  # an earlier backward ended in an exception
            self._abandon()
        self._hide()
        self._records = torch.is_grad_enabled()
        self.take_changes()
        self._order, self._next_order = self._next_order or self._order, []
        resident = False
        for unit in self.units:
            for flat in unit.flats:
                resident |= flat.state == State.RESIDENT
                flat.is_valid = flat.state == State.RESIDENT
        if resident:
            self.barrier()

    def _gather_ahead(self, order: Sequence[Unit], unit: Unit, step: int) -> None:
        """Begin to gather the unit that follows, if it does not need the same memory."""
        if not self.gathers_ahead or order.count(unit) != 1:  # of several calls, which one is this?
            return
        place = order.index(unit) + step
        if not 0 <= place < len(order):
            return
        following = order[place]
        slot = following.slot
        is_free = slot is None or (slot is not unit.slot and (slot.holder is None or not slot.holder.active))
        if following is not unit and is_free:
            following.begin_gather()

    # ---- backward -------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, version: int, event: int | None, is_outermost: bool, leaf: Any) -> None:
        """Make a unit's parameters whole for its backward; collective."""
        if is_outermost and accumulates_into(leaf):
            self._open_backward()
        if unit.is_resident:
            return
        if unit.changes() != version:
            raise RuntimeError(
                f"parameters of unit {unit.name!r} were changed between forward and backward: its gradients would "
                "be wrong; call backward before the optimizer's step, or forward again"
            )
        if event is not None and self.enabled and self._open:
            self._launch_after(event)
        unit.begin_gather()
        unit.finish_gather()
        self._gather_ahead(self._next_order, unit, -1)

    def _launch_after(self, event: int) -> None:
        """Reduce gradients of units whose forward came after an event: their backward is over; collective.

        Every rank comes here at the same time, while some may have no gradient for a parameter that others have.
        """
        while self._next < len(self.gradients) and self.gradients[self._next].unit.first_event > event:
            self._launch_next()

    @outside_compile
    def shows_in_backward(self, unit: Unit) -> bool:
        """Make a unit's parameters whole for what is computed once more in backward, if that is now; collective."""
        if not in_backward():
            return False
        unit.begin_gather()
        unit.finish_gather()
        unit.install_fulls()
        unit.shown = True
        if not self._shown:
            after_backward(self._hide)
        self._shown.append(unit)
        return True

    def _hide(self) -> None:
        shown, self._shown = self._shown, []
        for unit in shown:
            if unit.shown and not unit.active:
                unit.install_parts()

    def on_gradient(self, gradient: FlatGradient, index: int) -> None:
        """Take notice of a gradient that is complete; collective if it is the last one of a flat parameter."""
        unit = gradient.unit
        if not unit.is_valid or unit.pending:
            raise RuntimeError(
                f"the gradient of {gradient.flat.members[index].name!r} was computed while unit {unit.name!r} was "
                "not gathered, with wrong values: something that its forward computes reaches the loss other than "
                "through what it returns; return it, or put both into one unit with units=..."
            )
        full = gradient.flat.fulls[index]
        if full.grad is not None and full.grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {gradient.flat.members[index].name!r} is sparse, which cannot be averaged over "
                "ranks; build its module with sparse=False"
            )
        self._open_backward()
        gradient.arrived.add(index)
        # Whole gradients are large: they go as soon as they can. Where units are gathered, all ranks have to gather
        # and reduce in one order, see `_launch_after`.
        while self.enabled and not self._gathers and self._next < len(self.gradients):
            if not self.gradients[self._next].is_complete:
                break
            self._launch_next()

    def _launch_next(self) -> None:
        self._next += 1
        self._launch(self.gradients[self._next - 1])

    def _launch(self, gradient: FlatGradient) -> None:
        self._under_way.append(gradient)
        # Only where all ranks come here in one order: another one may first want something else of this rank.
        while self._gathers and sum(each.whole_bytes for each in self._under_way) > self._most_under_way:
            self._under_way.popleft().wait(self.timeout)
        gradient.launch(async_op=self._reduces_ahead)

    def _open_backward(self) -> None:
        if not self._open:
            self._open = True
            after_backward(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._open = False
        for unit in self.units:
            unit.first_event = math.inf
        if not self.enabled:
            self.accumulates = True
            for gradient in self.gradients:
                gradient.arrived.clear()
            return
        self._reduce_rest()

    def _reduce_rest(self) -> None:
        """Reduce what is left, compare notes, and hand the averages out; collective."""
        held = [gradient.holds() for gradient in self.gradients]
        used = [
            held_now or index in gradient.defined
            for gradient, holds in zip(self.gradients, held, strict=True)
            for index, held_now in enumerate(holds)
        ]
        # Reentrant checkpointing hands out the gradients of a parameter that it meets twice one by one.
        late = any(g.launched and any(holds) for g, holds in zip(self.gradients, held, strict=True))
        for gradient in self.gradients:
            if not gradient.launched:
                self._launch(gradient)
        flags = self._agree([late, *used])
        self._reading = self.accumulates = False  # hooks on parts may step
        at = 1
        try:
            for gradient in self.gradients:
                count = len(gradient.flat.members)
                gradient.finish(flags[at : at + count], self.timeout)
                at += count
        except BaseException:  # of a hook on a part: what was not handed out would be added to the next averages
            self._abandon()
            raise
        self._next = 0
        self._under_way.clear()
        if flags[0]:
            self._reduce_rest()

    def _agree(self, values: Sequence[bool]) -> list[bool]:
        """Return which flags any rank has set; collective over shards and replicas, and a barrier."""
        flags = torch.tensor(values, dtype=torch.uint8)
        if self.group.size > 1:
            self.group.all_reduce(flags, ReduceOp.MAX)
        if self.replicas is not None:
            self.replicas.all_reduce(flags, ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _abandon(self) -> None:
        self.discard()
        self._open, self._next = False, 0
        self._under_way.clear()

    def discard(self) -> None:
        """Drop gradients that were not averaged; local."""
        self.accumulates = False
        for gradient in self.gradients:
            gradient.discard()

    # ---- by hand --------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let gradients accumulate on each rank; local."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @torch.no_grad()
    def reduce_accumulated(self) -> None:
        """Reduce gradients that any rank holds; collective."""
        holds = any(held for gradient in self.gradients for held in gradient.holds())
        if self._agree([holds])[0]:
            self._reduce_rest()

    def barrier(self) -> None:
        """Wait for the ranks that share the parameters out; collective."""
        if self.group.size > 1:
            self.group.barrier()

    def take_changes(self) -> None:
        """Take over values that were put elsewhere; collective while users see whole parameters.

        Raises:
            ValueError: A parameter was replaced, or changed in shape or dtype.
        """
        for unit in self.units:
            if unit.has_changed():
                check_parts(unit)
        if self.by_hand is not None:
            self.by_hand.write()

    @contextmanager
    def as_parts(self) -> Iterator[None]:
        """Let parameters be parts, with all changes in them; collective."""
        self.barrier()  # nobody computes any more
        self.begin_step()
        self.take_changes()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """Before an optimizer changes shards: wait for ranks that still read them; collective if anybody may."""
        if self.by_hand is not None:
            self.by_hand.hide()
        if self._reading:
            self._reading = False
            self.barrier()

    def end_step(self) -> None:
        """After a step: show users whole parameters again, if they have gathered them; collective then."""
        if self.by_hand is not None:
            self.by_hand.show()
