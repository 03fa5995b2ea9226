"""Running a model whose parameters are spread over the ranks.

    forward     unit 1 ─▶ unit 2 ─▶ unit 3          before a unit computes its parameters are gathered
    backward    unit 1 ◀─ unit 2 ◀─ unit 3          again, and its gradients are reduced when the last one is there
    end         did any rank have a gradient for each parameter? every rank is here: shards may change now

Ranks of a node read each other's shards while they compute, so nobody may change a shard before all have come to
the end of backward. Where no backward follows a forward, the ranks meet when an optimizer is about to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..launch.board import enter_phase
from ..launch.page import Phase
from ..utils.torch_internals import (
    after_backward,
    in_backward,
    next_sequence_number,
    outside_compile,
    plain_tensors,
)
from ..wrapping.gradient_hooks import check_gradient, watch_output, watched_rank, weakly
from ..wrapping.nested import hook_gradient
from .flat_parameter import FlatParameter, ShardedParameter
from .gradient_queue import FlatGradient, GradientQueue
from .groups import ShardingGroups
from .guard import Members, check_graph_of_gradients, guard
from .options import converted
from .unit import FullParameters, Unit


class FSDPRuntime:
    """Gathers parameters and reduces gradients as a model computes.

    Args:
        groups: The ranks that share the parameters out, and those that hold replicas.
        units: The units; the model itself first.
        gradients: Of all that is trained, in the order in which they are to be reduced.
        cast: Dtype to convert floating-point inputs of units to, if any.

    Attributes:
        groups: The same.
        group: The ranks that share the parameters out.
        units: The same.
        flats: Their flat parameters.
        parameters: Their parameters.
        queue: The gradients.
        enabled: False while gradients only accumulate.
        gathered: The full parameters that the user has gathered, if any.
    """

    def __init__(
        self,
        groups: ShardingGroups,
        units: Sequence[Unit],
        gradients: Sequence[FlatGradient],
        cast: torch.dtype | None,
    ) -> None:
        self.groups = groups
        self.group = groups.shard
        self.units = list(units)
        self.flats: list[FlatParameter] = [flat for unit in units for flat in unit.flats]
        self.parameters: list[ShardedParameter] = [parameter for unit in units for parameter in unit.parameters]
        # Whole gradients of two blocks at a time, or a slow network would leave those of the whole model in memory.
        sizes = [gradient.full_bytes for gradient in gradients if gradient.unit is not units[0]]
        most_bytes = None if all(unit.is_resident for unit in units) else 2 * max(sizes, default=0)
        self.queue = GradientQueue(gradients, groups, most_bytes)
        self.enabled = True
        self.gathered: FullParameters | None = None
        self._gathers_ahead = any(flat.gathers_ahead for flat in self.flats)
        self._pinned = next((flat.pinned for flat in self.flats), None)
        self._stack: list[tuple[Unit, int]] = []  # forwards that are going on, and their first nodes' numbers
        self._events = 0
        self._records_events = False
        self._shown: list[Unit] = []
        self._order: list[Unit] = []
        self._next_order: list[Unit] = []
        self._reading = False
        self._open = False
        self._step: Callable[..., None] | None = None  # ends the step of the forward under way
        self._cast = cast
        model = units[0].module
        assert model is not None
        self._members = Members(model)
        self._watched_rank = watched_rank(groups.shard)
        for unit in units:
            guard(unit, self.may_read)
            module = unit.module
            assert module is not None
            module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True)
            module.register_forward_hook(partial(self._after_forward, unit), always_call=True)
        for gradient in gradients:
            for parameter in gradient.flat.parameters:
                node, _ = hook_gradient(parameter.full, weakly(self.on_gradient, gradient, parameter))
                gradient.nodes.append(node)
                parameter.sharded.register_hook(weakly(self.on_sharded_gradient, parameter))

    @property
    def shows_copies(self) -> bool:
        """Whether modules compute with the full parameters that the user has gathered: without gradients."""
        shown = self.gathered is not None and self.gathered.shown
        return shown and not self._stack and not torch.is_grad_enabled()

    # ---- forward --------------------------------------------------------------------------------------------

    def _before(self, unit: Unit, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.shows_copies:
            return None
        self._before_forward(unit)
        if self._cast is None:
            return None
        return converted((args, kwargs), self._cast)

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let another method of the model than its forward compute; collective as that is."""
        model, output = self.units[0], None
        args, kwargs = self._before(model, model.module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            self._after_forward(model, model.module, args, output)
        return output

    @outside_compile
    def _before_forward(self, unit: Unit) -> None:
        """Make a unit's parameters full; collective."""
        if not self._stack and not in_backward():
            self._begin_pass(unit)
        unit.gather()
        unit.version = unit.changes()
        self._stack.append((unit, next_sequence_number()))
        unit.active += 1
        if unit.active == 1:
            unit.show_full()
        if not in_backward():
            self._events += 1
            if self._records_events:
                unit.first_event = min(unit.first_event, self._events)
            self._next_order.append(unit)
            self._gather_ahead(self._order, unit, 1)

    @outside_compile
    def _after_forward(self, unit: Unit, _module: object, _args: object, output: Any) -> None:
        """Show this rank's parts again, and watch for the unit's backward; local."""
        if not self._stack or self._stack[-1][0] is not unit:  # the forward has not begun
            return
        if unit.active == 1:
            unit.show_sharded()
        unit.active -= 1
        _, start = self._stack.pop()
        event = step = None
        if not in_backward():
            if not self._stack:
                enter_phase(Phase.OTHER)
                step, self._step = self._step, None
            self._events += 1
            event = self._events
        if torch.is_grad_enabled():
            hook = partial(weakly(self.before_backward, unit), unit.version, event, step)
            is_watched = watch_output(output, hook, since=start, is_outermost=not self._stack)
            if step is not None and not is_watched:
                step(in_backward=False)
        if not self._stack:
            self._reading = True

    def _begin_pass(self, unit: Unit) -> None:
        """Begin an outermost forward: take changes, and wait until all ranks have made theirs; collective."""
        enter_phase(Phase.FORWARD)
        if self.enabled and unit.is_training and torch.is_grad_enabled():
            self._step = self.queue.steps.begin()
        if self._open:  # an earlier backward ended in an exception
            self._open = False
            self.queue.discard()
        self._hide()
        self._records_events = torch.is_grad_enabled()
        self.take_changes()
        self._order, self._next_order = self._next_order or self._order, []
        self.forget_gathered()
        if any(flat.is_resident for flat in self.flats):
            self.group.barrier()

    def _gather_ahead(self, order: Sequence[Unit], unit: Unit, step: int) -> None:
        """Begin to gather the unit that follows, if it does not need the same memory."""
        if not self._gathers_ahead or order.count(unit) != 1:  # of several calls, which one is this?
            return
        place = order.index(unit) + step
        if not 0 <= place < len(order):
            return
        following = order[place]
        lent = following.lent
        is_free = lent is None or (lent is not unit.lent and (lent.holder is None or not lent.holder.active))
        if following is not unit and is_free:
            following.begin_gather()

    # ---- backward -------------------------------------------------------------------------------------------

    def before_backward(
        self, unit: Unit, version: int, event: int | None, step: Callable[..., None] | None, begins: bool
    ) -> None:
        """Make a unit's parameters full for its backward; collective.

        Args:
            unit: The unit.
            version: Its changes as of the forward.
            event: When the forward ended; None if that was within a backward.
            step: Ends the forward's step, if it is one.
            begins: Whether a backward of the model begins that accumulates gradients.
        """
        if torch.is_grad_enabled():
            check_graph_of_gradients(self.units, accumulates=begins)
        if step is not None:
            step(in_backward=begins)
        if begins:
            self._open_backward()
        if unit.is_resident:
            return
        if unit.changes() != version:
            raise RuntimeError(
                f"parameters of unit {unit.name!r} were changed between forward and backward: its gradients would "
                "be wrong; call backward before the optimizer's step, or forward again"
            )
        if event is not None and self.enabled and self._open:
            self.queue.launch_after(event)
        unit.gather()
        self._gather_ahead(self._next_order, unit, -1)

    def may_read(self, unit: Unit, computes: bool) -> bool:
        """Say whether parameters of a unit that is not gathered may be read; see `guard`.

        In backward, where something is computed once more, they are made full; collective then.
        """
        if computes and self.shows_copies:
            return True
        if in_backward():
            self._show_in_backward(unit)
            return True
        return not computes and not self._stack

    @outside_compile
    def _show_in_backward(self, unit: Unit) -> None:
        unit.gather()
        unit.show_full()
        unit.shown = True
        if not self._shown:
            after_backward(self._hide)
        self._shown.append(unit)

    def _hide(self) -> None:
        shown, self._shown = self._shown, []
        for unit in shown:
            if unit.shown and not unit.active:
                unit.show_sharded()

    def on_gradient(self, gradient: FlatGradient, parameter: ShardedParameter, *_: object) -> None:
        """Take note of a gradient that is complete; collective if it is the last one of a flat parameter."""
        unit = gradient.unit
        if not unit.is_valid or unit.pending:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} was computed while unit {unit.name!r} was not gathered, with "
                "wrong values: something that its forward computes reaches the loss other than through what it "
                "returns; return it, or put both into one unit with units=..."
            )
        check_gradient(parameter.name, parameter.full.grad, self._watched_rank)
        self._open_backward()
        gradient.arrived.add(parameter)
        if self.enabled:
            with plain_tensors():
                self.queue.launch_complete()

    def on_sharded_gradient(self, parameter: ShardedParameter, computed: Tensor) -> None:
        """Refuse gradients of the full parameters that users see: nobody would average them."""
        if self.gathered is not None or computed.shape != parameter.sharded.shape:
            raise ValueError(
                f"the gradient of {parameter.name!r} was computed from the whole parameter that was gathered by "
                "hand, and would not be averaged: compute the loss from what the wrapped model returns, or under "
                "torch.no_grad()"
            )

    def _open_backward(self) -> None:
        if not self._open:
            self._open = True
            enter_phase(Phase.BACKWARD)
            after_backward(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._open = False
        enter_phase(Phase.OTHER)
        for unit in self.units:
            unit.first_event = math.inf
        if self.enabled:
            self._reading = False  # the ranks meet before hooks on parameters may step
            self.queue.reduce_rest()
        else:
            self.queue.keep()

    # ---- between steps --------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_accumulated(self) -> None:
        """Reduce gradients that any rank holds; collective."""
        self._reading = False  # the ranks meet before hooks on parameters may step
        self.queue.reduce_held()

    def take_changes(self) -> None:
        """Take over values that were put elsewhere; collective while users see full parameters.

        Raises:
            ValueError: A parameter was replaced or added, or changed in shape or dtype.
        """
        with plain_tensors():
            for unit in self.units:
                unit.take_changes()
        self._members.check()
        if self.gathered is not None:
            self.gathered.take_changes()

    def forget_gathered(self) -> None:
        """Have parameters gathered once more when they are needed, as shards may have changed; local."""
        for flat in self.flats:
            flat.is_valid = flat.is_resident

    def begin_step(self) -> None:
        """Before an optimizer changes shards: wait for ranks that still read them; collective if anybody may."""
        if self.gathered is not None:
            self.take_changes()
            self.gathered.hide()
        if self._reading:
            self._reading = False
            self.group.barrier()
        if self._pinned is not None:
            self._pinned.settle()

    def end_step(self) -> None:
        """After a step: show users full parameters again, if they have gathered them; collective then."""
        if self.gathered is not None:
            self.gathered.show()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let sharded parameters show this rank's parts, with all changes in them; collective."""
        self.group.barrier()  # nobody computes any more
        self.begin_step()
        self.take_changes()
        self.group.barrier()  # all changes are made
        try:
            yield
        finally:
            self.end_step()

    def gather_full(self, *, writeback: bool = True) -> None:
        """Show every rank a copy of all parameters, until `reshard`; collective.

        Args:
            writeback: Whether changes of the copies are taken over, by each rank those of its part.

        Raises:
            ValueError: Parameters are gathered already, or a forward is going on.
        """
        if self.gathered is not None or self._stack:
            raise ValueError(
                "parameters are gathered already: within full_parameters(), after "
                "gather_parameters(), or in a forward"
            )
        self.group.barrier()  # nobody computes any more
        self.take_changes()
        gathered = FullParameters(self.flats, writeback=writeback)
        gathered.show()
        self.gathered = gathered

    def reshard(self) -> None:
        """Show this rank's parts again; collective."""
        gathered = self.gathered
        assert gathered is not None
        try:
            if gathered.writeback:
                self.take_changes()
            else:
                self.group.barrier()  # nobody copies from the shards any more
        finally:
            gathered.hide()
            self.gathered = None
