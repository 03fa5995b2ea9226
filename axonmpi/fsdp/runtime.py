"""Hooks of a sharded model's forward and backward: when units are gathered, and when ranks meet.

    forward     unit 1 ─▶ unit 2 ─▶ unit 3          before a unit computes, its parameters are gathered
    backward    unit 1 ◀─ unit 2 ◀─ unit 3          again; a unit's complete gradients are reduced
    end         all ranks compare which parameters have a gradient on any rank; then shards may change

Ranks of a node read each other's shards while they compute, so no rank changes a shard before all ranks have ended
backward; without one, the ranks meet when an optimizer is about to step. `clock.py` has the states and their order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..record import Phase, enter_phase
from ..utils.torch_internals import (
    after_backward,
    in_backward,
    next_sequence_number,
    outside_compile,
    plain_tensors,
)
from ..wrapping.gradient_hooks import check_gradient, hook_gradient, watch_output, watched_rank, weakly
from .clock import BACKWARD, BETWEEN, FORWARD, IDLE, STEP, Clock, Forward
from .flat_parameter import FlatParameter, ShardedParameter
from .gradient_queue import FlatGradient, GradientQueue
from .groups import ShardingGroups
from .guard import Members, check_graph_of_gradients, guard
from .options import converted
from .unit import FullParameters, Unit


class FSDPRuntime:
    """Hooks of one model that gather parameters and reduce gradients.

    Args:
        groups: The ranks that shard the parameters, and the ranks with replicas.
        units: The units; the model itself first.
        gradients: Gradients of all trained parameters, in the order in which they are reduced.
        cast: Dtype to which floating-point inputs of units are converted; None: they are not.

    Attributes:
        group: The ranks that shard the parameters.
        flats: The flat parameters of all units.
        parameters: The parameters of all units.
        queue: The gradients.
        clock: The state of the model.
        enabled: False while gradients only accumulate.
        gathered: The full parameters that the user has gathered; None if there are none.
        optimizers: Optimizers that have stepped on the model's parameters.
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
        # Full gradients of two blocks at a time, or a slow network would leave those of the whole model in memory.
        sizes = [gradient.full_bytes for gradient in gradients if gradient.unit is not units[0]]
        most_bytes = None if all(unit.is_resident for unit in units) else 2 * max(sizes, default=0)
        self.queue = GradientQueue(gradients, groups, most_bytes)
        self.clock = Clock()
        self.enabled = True
        self.gathered: FullParameters | None = None
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._gathers_ahead = any(flat.gathers_ahead for flat in self.flats)
        self._pinned = next((flat.pinned for flat in self.flats), None)
        self._order: list[Unit] = []
        self._next_order: list[Unit] = []
        self._cast = cast
        self._watched_rank = watched_rank(groups.shard)
        for unit in units:
            guard(unit, self.may_read)
            module = unit.module
            assert module is not None
            module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True)
            module.register_forward_hook(partial(self._after_forward, unit), always_call=True)
        model = units[0].module
        assert model is not None
        self._members = Members(model)
        for gradient in gradients:
            for parameter in gradient.flat.parameters:
                node, _ = hook_gradient(parameter.full, weakly(self.on_gradient, gradient, parameter))
                gradient.nodes.append(node)
                parameter.sharded.register_hook(weakly(self.on_sharded_gradient, parameter))

    @property
    def shows_copies(self) -> bool:
        """True if modules compute with full parameters that the user has gathered, without gradients."""
        shown = self.gathered is not None and self.gathered.shown
        return shown and not self.clock.forwards and not torch.is_grad_enabled()

    # ---- forward --------------------------------------------------------------------------------------------

    def _before(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.shows_copies:
            return None
        self._before_forward(unit, is_training=module.training)
        return None if self._cast is None else converted((args, kwargs), self._cast)

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call another method of the model than its forward, which computes as forward does; collective."""
        unit, output = self.units[0], None
        assert unit.module is not None
        args, kwargs = self._before(unit, unit.module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            self._after_forward(unit, unit.module, args, output)
        return output

    @outside_compile
    def _before_forward(self, unit: Unit, *, is_training: bool) -> None:
        """Gather a unit and show its full parameters; collective."""
        is_recomputed, end_step = in_backward(), None
        if not self.clock.forwards and not is_recomputed:
            end_step = self._begin_pass(is_training=is_training)
        unit.gather()
        has_graph, first_node = torch.is_grad_enabled(), next_sequence_number()
        self.clock.begin_forward(Forward(unit, first_node, has_graph, unit.changes(), end_step))
        unit.active += 1
        if unit.active == 1:
            unit.show_full()
        if not is_recomputed:
            event = self.clock.next_event()
            # Reentrant checkpoints disable gradients inside a forward that has a backward all the same.
            if self.clock.forwards[0].has_graph:
                unit.first_event = min(unit.first_event, event)
            self._next_order.append(unit)
            self._gather_ahead(self._order, unit, 1)

    @outside_compile
    def _after_forward(self, unit: Unit, _module: object, _args: object, output: Any) -> None:
        """Show this rank's shards again, and watch for the unit's backward; local."""
        forwards = self.clock.forwards
        if not forwards or forwards[-1].unit is not unit:  # an exception came before its beginning
            return
        if unit.active == 1:
            unit.show_sharded()
        unit.active -= 1
        forward, event = self.clock.end_forward(), None
        if not in_backward():
            if not forwards:
                enter_phase(Phase.OTHER)
            event = self.clock.next_event()
        if torch.is_grad_enabled():
            hook = partial(weakly(self.before_backward, unit), forward.version, event, forward.end_step)
            is_watched = watch_output(output, hook, since=forward.first_node, is_outermost=not forwards)
            if forward.end_step is not None and not is_watched:
                forward.end_step(in_backward=False)

    def _begin_pass(self, *, is_training: bool) -> Callable[..., None] | None:
        """Take changes when all ranks have made theirs; return how to end the training step, if any; collective."""
        enter_phase(Phase.FORWARD)
        end_step = None
        if self.enabled and is_training and torch.is_grad_enabled():
            end_step = self.queue.steps.begin()
        self._drop_failed_backward()
        self._hide()
        self.take_changes()
        self._order, self._next_order = self._next_order or self._order, []
        self.forget_gathered()
        if any(flat.is_resident for flat in self.flats):
            self.group.barrier()
        return end_step

    def _drop_failed_backward(self) -> None:
        """Drop the gradients of a backward that ended by an exception; local."""
        if self.clock.state is BACKWARD and not in_backward():
            self.clock.advance(BETWEEN)
            self.queue.discard()

    def _gather_ahead(self, order: Sequence[Unit], unit: Unit, step: int) -> None:
        """Begin to gather the unit that follows, if it does not need the same memory."""
        if not self._gathers_ahead or order.count(unit) != 1:  # the position of a repeated unit is ambiguous
            return
        index = order.index(unit) + step
        if not 0 <= index < len(order):
            return
        following = order[index]
        lent = following.lent
        is_free = lent is None or (lent is not unit.lent and (lent.holder is None or not lent.holder.active))
        if following is not unit and is_free:
            following.begin_gather()

    # ---- backward -------------------------------------------------------------------------------------------

    def before_backward(
        self, unit: Unit, version: int, event: int | None, end_step: Callable[..., None] | None, begins: bool
    ) -> None:
        """Gather a unit for its backward; collective.

        Args:
            unit: The unit.
            version: Number of its changes at the time of the forward.
            event: Number of the forward's end; None if that was within a backward.
            end_step: Ends the training step that began with the forward; None if there is none.
            begins: True if a backward of the model begins that accumulates gradients.
        """
        if torch.is_grad_enabled():
            check_graph_of_gradients(self.units, accumulates=begins)
        if end_step is not None:
            end_step(in_backward=begins)
        if begins:
            self._open_backward()
        if unit.is_resident:
            return
        if unit.changes() != version:
            raise RuntimeError(
                f"parameters of unit {unit.name!r} were changed between forward and backward: its gradients would "
                "be wrong; call backward before the optimizer's step, or forward again"
            )
        if event is not None and self.enabled and self.clock.state is BACKWARD:
            self.queue.launch_after(event)
        unit.gather()
        self._gather_ahead(self._next_order, unit, -1)

    def may_read(self, unit: Unit, computes: bool) -> bool:
        """Return True if parameters of a unit that is not gathered may be read.

        In backward, which recomputes forwards of checkpoints, the unit is gathered; collective then.

        Args:
            unit: The unit.
            computes: True if a module with one of the parameters is about to compute.
        """
        if computes and self.shows_copies:
            return True
        if in_backward():
            self._show_in_backward(unit)
            return True
        return not computes and not self.clock.forwards

    @outside_compile
    def _show_in_backward(self, unit: Unit) -> None:
        unit.gather()
        unit.show_full()
        if not any(each.shown for each in self.units):
            after_backward(self._hide)
        unit.shown = True

    def _hide(self) -> None:
        for unit in self.units:
            if unit.shown and not unit.active:
                unit.show_sharded()

    def on_gradient(self, gradient: FlatGradient, parameter: ShardedParameter, *_: object) -> None:
        """Take note of a complete gradient; collective if it is the last one of a flat parameter."""
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
        """Refuse gradients of full parameters that the user has gathered: they would not be averaged."""
        if self.gathered is not None or computed.shape != parameter.sharded.shape:
            raise ValueError(
                f"the gradient of {parameter.name!r} was computed from the whole parameter that was gathered by "
                "hand, and would not be averaged: compute the loss from what the wrapped model returns, or under "
                "torch.no_grad()"
            )

    def _open_backward(self) -> None:
        if self.clock.state is not BACKWARD:
            self.clock.advance(BACKWARD)
            enter_phase(Phase.BACKWARD)
            after_backward(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        enter_phase(Phase.OTHER)
        for unit in self.units:
            unit.first_event = math.inf
        # Before the reduction, since the ranks meet in it and hooks on parameters may step at its end.
        after = IDLE if self.enabled else BETWEEN
        self.clock.advance(FORWARD if self.clock.forwards else after)
        if self.enabled:
            self.queue.reduce_rest()
        else:
            self.queue.keep()

    # ---- between steps --------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_accumulated(self) -> None:
        """Reduce gradients that any rank holds; collective."""
        if self.clock.state is BACKWARD and not in_backward():  # it has failed, maybe on this rank alone
            self.clock.advance(IDLE)
        self.clock.meet()  # in the reduction, before hooks on parameters may step
        self.queue.reduce_held()

    def take_changes(self) -> None:
        """Copy values that were put into other memory into the shards; collective with gathered parameters.

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
        """Gather parameters anew when they are needed next, as shards may have changed; local."""
        for flat in self.flats:
            flat.is_valid = flat.is_resident

    def begin_step(self) -> None:
        """Wait for ranks that may read shards, before an optimizer changes them; collective after a forward."""
        self._drop_failed_backward()
        may_be_read = self.clock.state is BETWEEN
        self.clock.advance(STEP)
        if may_be_read:
            self.group.barrier()
        if self.gathered is not None:
            self.take_changes()
            self.gathered.hide()
        if self._pinned is not None:
            self._pinned.settle()

    def end_step(self) -> None:
        """Show full parameters again after a step; collective if the user has gathered them."""
        if self.clock.state is STEP:  # a closure has left it
            self.clock.advance(IDLE)
        if self.gathered is not None:
            self.gathered.show()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Show this rank's shards with all changes in them, during a `with` block; collective."""
        self.group.barrier()  # all ranks have ended their forwards
        self._drop_failed_backward()
        self.clock.meet()
        self.begin_step()
        self.take_changes()
        self.group.barrier()  # all changes are made
        try:
            yield
        finally:
            self.end_step()

    def gather_full(self, *, writeback: bool = True) -> None:
        """Show a copy of all full parameters on every rank, until `reshard`; collective.

        Args:
            writeback: Take changes of the copies over, each rank those of its shard.

        Raises:
            ValueError: Parameters are gathered already, or a forward is running.
        """
        if self.gathered is not None or self.clock.forwards:
            raise ValueError(
                "parameters are gathered already: within full_parameters(), after "
                "gather_parameters(), or in a forward"
            )
        self.group.barrier()  # all ranks have ended their forwards
        self.take_changes()
        gathered = FullParameters(self.flats, writeback=writeback)
        gathered.show()
        self.gathered = gathered

    def reshard(self) -> None:
        """Show this rank's shards again; collective."""
        gathered = self.gathered
        assert gathered is not None
        try:
            if gathered.writeback:
                self.take_changes()
            else:
                self.group.barrier()  # all ranks have copied from the shards
        finally:
            gathered.hide()
            self.gathered = None
