"""`DistributedDataParallel.join()`: training with a different number of batches on each rank.

Before each synchronisation the ranks exchange its name, or "none" from a rank that has left the loop:

    rank 0   batch · batch · batch · batch · leaves ─┐
    rank 1   batch · batch · leaves ─ zeros ─ zeros ─┤ rank 0's parameters and optimizer state for everybody

A rank that has left contributes zeros until all ranks have left. Then all ranks get the parameters, buffers and
optimizer state of a rank that trained to the end. A stateful optimizer that was not given to `join` refuses its
next step: gradients would be equal on all ranks, and the steps different. `torch.distributed.algorithms.join` has
the same idea.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import CollectiveMismatchError, RankFailedError
from ..types import ReduceOp
from ..wrapping.optimizer_hooks import after_steps, parameters_of
from .reducer import Reducer

_EVENTS = ("none", "gradients", "by hand", "buffers")


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load a state."""


class Join:
    """The context manager of `DistributedDataParallel.join`.

    Args:
        module: The model.
        reducer: The reducer of its gradients.
        state: Objects that get the state of a rank that trained to the end.
        broadcast_state: Copies the parameters and buffers of a rank to all ranks; collective.
        broadcast_buffers: Copies the buffers of a rank to all ranks; collective.
        divide_by_initial: Divide sums by the group's size; if False, by the number of ranks still training.
        throw_on_early: Raise on all ranks as soon as one has left.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: Reducer,
        state: Sequence[Stateful],
        broadcast_state: Callable[[int], None],
        broadcast_buffers: Callable[[int], None],
        *,
        divide_by_initial: bool,
        throw_on_early: bool,
    ) -> None:
        for each in state:
            if not isinstance(each, Stateful):
                raise TypeError(
                    "join: expected optimizers, schedulers and the like, which have state_dict() and "
                    f"load_state_dict(), got {each!r}; settings go by name, as in join(optimizer, enable=False)"
                )
        self._module = module
        self._reducer = reducer
        self._group = reducer.group
        self._broadcast_state = broadcast_state
        self._broadcast_buffers = broadcast_buffers
        self._state = list(state)
        self._stepped: dict[int, Optimizer] = {}
        self._steps = 0
        self._is_uneven = False
        self._divide_by_initial = divide_by_initial
        self._throw_on_early = throw_on_early
        self._last_active = [0]

    def __enter__(self) -> Join:
        self._reducer.report_event = self._report
        self._end_watch = after_steps(self._after_step)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._end_watch()
        try:
            if error is None:
                self._accompany()
                self._broadcast_state(self._last_active[0])
                if self._is_uneven or len(set(self._group.all_gather_object(self._steps))) > 1:
                    self._share_state()
        finally:
            self._reducer.steps.restart()
            self._reducer.report_event = None
            self._reducer.scale = 1.0

    def _report(self, event: str) -> list[int]:
        """Exchange the event that this rank begins and return the ranks that take part; collective."""
        self._exchange(event)
        if not self._divide_by_initial:
            self._reducer.scale = self._group.size / len(self._last_active)
        return self._last_active

    def _exchange(self, event: str) -> str:
        """Exchange the ranks' events and return the event of the ranks still training; collective."""
        control = self._group.backend.control
        codes = torch.zeros(control.size, dtype=torch.int64, device=control.place)
        codes[control.rank] = _EVENTS.index(event)
        control.all_reduce(codes, ReduceOp.SUM)
        events = [_EVENTS[code] for code in codes.tolist()]
        active = [rank for rank, event in enumerate(events) if event != "none"]
        if active:
            self._last_active = active
            self._is_uneven |= len(active) < len(events)
            self._check(events, active)
        return events[active[0]] if active else "none"

    def _check(self, events: list[str], active: list[int]) -> None:
        if self._throw_on_early and len(active) < len(events):
            left = [rank for rank, event in enumerate(events) if event == "none"]
            raise RankFailedError(f"ranks {left} ran out of batches while ranks {active} were still training")
        if any(events[rank] != events[active[0]] for rank in active):
            steps = ", ".join(f"rank {rank}: {events[rank]}" for rank in active)
            raise CollectiveMismatchError(f"the ranks that still train are not at the same step: {steps}")

    def _accompany(self) -> None:
        """Take part in the other ranks' synchronisations until all have left; collective."""
        self._reducer.report_failed_backward()
        while (event := self._exchange("none")) != "none":
            if event == "buffers":
                self._broadcast_buffers(self._last_active[0])
            else:
                self._reducer.reduce_zeros(by_hand=event == "by hand")

    def _after_step(self, optimizer: Optimizer) -> None:
        own = set(self._module.parameters())
        if any(parameter in own for parameter in parameters_of(optimizer)):
            self._stepped[id(optimizer)] = optimizer
            self._steps += 1

    def _share_state(self) -> None:
        """Load the state of a rank that trained to the end on all ranks; collective."""
        for each in self._state:
            each.load_state_dict(self._group.broadcast_object(each.state_dict(), self._last_active[0]))
        given = {id(each) for each in self._state}
        for optimizer in self._stepped.values():
            if id(optimizer) not in given and _counts_steps(optimizer):
                refusal = optimizer.register_step_pre_hook(_refuse)
                optimizer.register_load_state_dict_post_hook(partial(_remove, refusal))


def _counts_steps(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's next step depends on earlier steps, by its state or a schedule of its rates."""
    return any(optimizer.state.values()) or any("initial_lr" in group for group in optimizer.param_groups)


def _remove(refusal: RemovableHandle, _optimizer: Optimizer) -> None:
    refusal.remove()


def _refuse(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    raise RuntimeError(
        "the ranks made different numbers of steps with this optimizer within join(), so its state differs between "
        "them, and this step would as well: give it to join, with its scheduler if it has one, as in "
        "`with model.join(optimizer, scheduler):`, or load the same state on all ranks"
    )
