"""Training with a different number of batches on each rank (layer 5).

Before each synchronisation the ranks tell each other who takes part, and in what:

    rank 0   batch · batch · batch · batch · leaves ─┐
    rank 1   batch · batch · leaves ─ zeros ─ zeros ─┤ rank 0's parameters for everybody

A rank that has left the loop answers with zeros until nobody is left, and then all take the parameters and
buffers of a rank that trained to the end. The idea is that of `torch.distributed.algorithms.join`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..errors import CollectiveMismatchError, RankFailedError
from ..types import ReduceOp
from .reducer import Reducer

if TYPE_CHECKING:
    from .wrapper import DistributedDataParallel

__all__ = ["Join"]

_EVENTS = ("none", "gradients", "by hand", "buffers")


class Join:
    """The context that `DistributedDataParallel.join` returns."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        *,
        enable: bool,
        divide_by_initial: bool,
        throw_on_early: bool,
    ) -> None:
        self._model = model
        self._group = model.process_group
        self._reducer = reducer
        self._enable = enable
        self._divide_by_initial = divide_by_initial
        self._throw_on_early = throw_on_early
        self._last_active = [0]

    def __enter__(self) -> Join:
        if self._enable:
            self._reducer.announce = self._announce
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        self._reducer = self._model.current_reducer
        try:
            if error is None:
                self._accompany()
                self._model.broadcast_state(self._last_active[0])
        finally:
            self._reducer.announce = None
            self._reducer.scale = 1.0

    def _announce(self, event: str) -> list[int]:
        """Tell the others what this rank begins; return the ranks that take part. Collective."""
        self._exchange(_EVENTS.index(event))
        if not self._divide_by_initial:
            self._model.current_reducer.scale = self._group.size / len(self._last_active)
        return self._last_active

    def _exchange(self, code: int) -> str:
        """Tell the others what this rank begins (0: nothing more) and return what the active ranks begin."""
        table = torch.zeros(self._group.size, dtype=torch.int64, device=self._reducer.device)
        table[self._group.rank] = code
        self._group.all_reduce(table, ReduceOp.SUM)
        events = [_EVENTS[value] for value in table.tolist()]
        active = [rank for rank, event in enumerate(events) if event != "none"]
        if active:
            self._last_active = active
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
        """Answer the others' synchronisations until all have left."""
        self._reducer.settle()
        while (event := self._exchange(0)) != "none":
            if event == "buffers":
                self._model.broadcast_buffers_from(self._last_active[0])
            else:
                self._reducer.shadow(by_hand=event == "by hand")
