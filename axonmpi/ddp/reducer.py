"""Averaging gradients while backward runs (layer 5).

Autograd calls a hook on each parameter when its gradient is complete. The hook puts the gradient into its bucket;
a full bucket is reduced, in the buckets' order, which is the same on all ranks whatever order gradients come in:

    backward     ── grad ── grad ── grad ── grad ── grad ──┐ end of backward
    bucket 0         └──── full ─▶ all-reduce ─────────────┤
    bucket 1                        └──── full ─▶ all-reduce ┤ wait for all, write back
    status                                                   └▶ did every rank have every gradient?

Where ranks have no core to spare for a thread that communicates, the reductions all come at the end.
After the first backward the buckets are laid out anew, in the order in which gradients became ready on rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..errors import CollectiveTimeoutError, RankFailedError, UnusedParameterError
from ..group import ProcessGroup
from ..memory import ReusedMemory, set_gradient_memory
from ..types import GradSyncStrategy, ReduceOp, Work
from ..wrapping.outputs import outside_compile
from .buckets import Bucket, LargeGradient, is_large, make_buckets

__all__ = ["Reducer"]

COMPLETE, PARTIAL, ABANDONED = range(3)
"""How a backward ended on a rank: with every gradient, without some, or with an exception."""

_NAMED_PARAMETERS = 10
"""How many parameters an error lists before it only counts."""


class Reducer:
    """Averages the gradients of some parameters over a group.

    Args:
        named_parameters: Those that require grad, the same on all ranks.
        group: The ranks to average over.
        strategy: When to reduce.
        cap_bytes: Largest bucket, in bytes.
        as_view: Whether `param.grad` becomes a view of its bucket.
        find_unused: Whether parameters without a gradient count as zero instead of being an error.
        reduce_dtype: Dtype of communication; None for the gradients' own.
        direct: Those of the parameters whose gradients are put where `set_gradient_memory` says.

    Attributes:
        enabled: False while gradients only accumulate.
        announce: Called before each synchronisation; uneven inputs use it (`join`).
        scale: Factor on the averages; uneven inputs use it.
        learns: Whether the next complete backward may lay the buckets out anew.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        strategy: GradSyncStrategy,
        cap_bytes: int,
        as_view: bool,
        find_unused: bool,
        reduce_dtype: torch.dtype | None,
        direct: Collection[Tensor] = (),
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._kinds = [_kind(parameter) for parameter in self._parameters]
        self._group = group
        self._strategy = strategy
        # Without a core to spare, a thread that communicates would only slow backward down.
        self._overlaps = strategy is GradSyncStrategy.OVERLAPPED and group.backend.overlaps
        self._cap_bytes = cap_bytes if strategy is GradSyncStrategy.OVERLAPPED else None
        self._as_view = as_view
        self._find_unused = find_unused
        self._reduce_dtype = reduce_dtype
        self.enabled = True
        self.announce: Callable[[str], list[int]] | None = None
        self.scale = 1.0
        self.learns = strategy is GradSyncStrategy.OVERLAPPED and group.size > 1
        self._touched: dict[int, None] = {}  # gradients changed since they were last reduced, in order
        self._open = False
        self._announced = False
        self._works: list[Work] = []
        self._buckets: list[Bucket | LargeGradient] = []
        self._memories = self._share_memory(direct)  # for as long as this lives
        self._lay_out(list(reversed(range(len(self._parameters)))))
        # The hooks outlive a wrapper that was dropped; a module can be wrapped again without them.
        own = weakref.ref(self)
        hooks = [
            parameter.register_post_accumulate_grad_hook(_make_hook(own, position))
            for position, parameter in enumerate(self._parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove, hooks)
        self._remove_hooks.atexit = False

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket, in the order in which they are reduced."""
        return [bucket.numel for bucket in self._buckets]

    @property
    def device(self) -> torch.device:
        """Where small tensors have to be to travel with the gradients."""
        return self._buckets[0].device if self._buckets else torch.device("cpu")

    def detach(self) -> None:
        """Take the hooks off the parameters; local."""
        self._remove_hooks()

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Say whether these are the parameters whose gradients are reduced, of the same kind as before; local."""
        return len(parameters) == len(self._parameters) and all(
            new is old and _kind(new) == kind
            for new, old, kind in zip(parameters, self._parameters, self._kinds, strict=True)
        )

    def take_over(self, before: Reducer) -> None:
        """Go on in place of `before`, which reduced other parameters; local.

        Raises:
            ValueError: One of those is no longer trained and has a gradient that was not averaged.
        """
        position_of = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        for position in before._touched:
            parameter = before._parameters[position]
            if id(parameter) in position_of:
                self._touched[position_of[id(parameter)]] = None
            elif parameter.grad is not None:
                raise ValueError(
                    f"{before._names[position]!r} was frozen while its gradient was not averaged; "
                    "call sync_gradients() before, or set its grad to None"
                )
        self.enabled = before.enabled
        self.announce = before.announce

    # ---- during backward ----------------------------------------------------------------------------------

    @outside_compile
    def on_gradient(self, position: int, parameter: Tensor) -> None:
        """Take note of a gradient that is complete; called by autograd."""
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self._names[position]!r} is sparse, which cannot be averaged over ranks; "
                "build its module with sparse=False"
            )
        self._touched[position] = None
        if not self.enabled or self._strategy is GradSyncStrategy.NO_SYNC:
            return
        self.open_backward()
        if self._strategy is GradSyncStrategy.OVERLAPPED:
            self._announce_once()
            self._take_in(position)

    def open_backward(self) -> None:
        """Arrange for `_finish` to run when the outermost backward under way ends; local."""
        if self._open or not self.enabled or not self._parameters or self._strategy is GradSyncStrategy.NO_SYNC:
            return
        self._open = True
        Variable._execution_engine.queue_callback(self._finish)

    def settle(self) -> None:
        """Let the other ranks know if an earlier backward ended in an exception; collective in that case.

        They wait for this rank's gradients, and get an error instead.
        """
        if self._open and torch._C._current_graph_task_id() == -1:
            try:
                self._announce_once()
                self._exchange(ABANDONED, [False] * len(self._parameters), async_op=False)
            finally:
                self._reset()

    def _take_in(self, position: int) -> None:
        bucket = self._bucket_of[position]
        if bucket.launched:
            raise ValueError(
                f"{self._names[position]!r} got a second gradient in one backward after its first was sent, as "
                "happens with parameters shared between checkpointed parts; use "
                "torch.utils.checkpoint(..., use_reentrant=False) or GradSyncStrategy.SYNCHRONOUS"
            )
        bucket.put(position, as_view=self._as_view)
        while self._overlaps and self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._launch(self._buckets[self._next], async_op=True)
            self._next += 1

    def _launch(self, bucket: Bucket | LargeGradient, *, async_op: bool) -> None:
        bucket.launched = True
        bucket.pack()
        work = self._group.all_reduce(bucket.wire, ReduceOp.AVERAGE, async_op)
        if work is not None:
            self._works.append(work)

    def _announce_once(self) -> None:
        if self.announce is not None and not self._announced:
            try:
                self.announce("gradients")
            except BaseException:
                self._reset()  # all ranks raise this together, so none waits for the end of this backward
                raise
        self._announced = True

    @outside_compile
    def _finish(self) -> None:
        try:
            self._announce_once()
            self._reduce_rest(async_op=self._overlaps)
        finally:
            self._reset()

    # ---- reducing -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Reduce gradients that have changed since they were last reduced, if there are any; collective."""
        self.settle()
        if self.announce is not None:
            self.announce("by hand")
        if self._anything_changed():
            try:
                self._reduce_rest(async_op=False)
            finally:
                self._reset()

    def shadow(self, *, by_hand: bool) -> None:
        """Take part in a synchronisation of the other ranks without gradients of the own; collective."""
        self._touched.clear()
        if by_hand and not self._anything_changed():
            return
        for bucket in self._buckets:
            bucket.clear()
        try:
            self._exchange(COMPLETE, [False] * len(self._parameters), async_op=self._overlaps and not by_hand)
        finally:
            self._reset()

    def _anything_changed(self) -> bool:
        changed = self._flags([bool(self._touched)])
        self._group.all_reduce(changed, ReduceOp.MAX)
        return bool(changed.item())

    @torch.no_grad()
    def _reduce_rest(self, *, async_op: bool) -> None:
        """Reduce the buckets that have not gone yet, compare notes, and write the averages back."""
        for bucket in self._buckets:
            if not bucket.launched:
                for position in sorted(bucket.pending):
                    bucket.put(position, as_view=self._as_view)
        own = [
            position in self._touched or parameter.grad is not None
            for position, parameter in enumerate(self._parameters)
        ]
        state = COMPLETE if len(self._touched) == len(self._parameters) else PARTIAL
        worst, used = self._exchange(state, own, async_op)
        for bucket in self._buckets:
            bucket.unpack(used, as_view=self._as_view, scale=self.scale)
        if self.learns and self.announce is None and worst == COMPLETE:
            self._learn()

    def _exchange(self, state: int, own: list[bool], async_op: bool) -> tuple[int, list[bool]]:
        """Send what has not gone yet, and how backward ended here.

        Returns:
            How it ended at worst, and which parameters are used on any rank.
        """
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket, async_op=async_op)
        flags = self._flags([state, *own] if self._find_unused else [state])
        work = self._group.all_reduce(flags, ReduceOp.MAX, async_op)
        _wait_all(self._works if work is None else [*self._works, work], self._group.backend.timeout)
        worst, *used = flags.tolist()
        if worst == ABANDONED or (worst == PARTIAL and not self._find_unused):
            self._raise_together(state)
        return worst, [bool(flag) for flag in used] if self._find_unused else [True] * len(own)

    def _flags(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.uint8, device=self.device)

    def _raise_together(self, state: int) -> None:
        """Raise what the ranks together find wrong, on all but those whose own backward has raised before."""
        missing = [name for position, name in enumerate(self._names) if position not in self._touched]
        notes = self._group.all_gather_object((state, missing if state == PARTIAL else []))
        abandoned = [rank for rank, (other, _) in enumerate(notes) if other == ABANDONED]
        if state == ABANDONED:
            return
        if abandoned:
            raise RankFailedError(
                f"gradients were not averaged: backward ended in an exception on {_ranks(abandoned)}, "
                "which then went on with another forward"
            )
        raise UnusedParameterError(_unused_message([names for _, names in notes]))

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients became ready on rank 0."""
        order = torch.tensor(list(self._touched), dtype=torch.int64, device=self.device)
        self._group.broadcast(order, 0)
        self.learns = False
        self._lay_out(order.tolist())
        if self._as_view:  # or the old buckets would live as long as the gradients in them
            for bucket in self._buckets:
                bucket.adopt()

    def _share_memory(self, direct: Collection[Tensor]) -> list[ReusedMemory]:
        """Have large gradients computed where the ranks of a node can reduce them without a copy; collective."""
        if self._group.size == 1 or any(parameter.device.type != "cpu" for parameter in self._parameters):
            return []
        told = {id(parameter) for parameter in direct}
        shared = self._flags([self._as_view and id(parameter) in told for parameter in self._parameters])
        self._group.all_reduce(shared, ReduceOp.MIN)
        memories = []
        for parameter, is_shared in zip(self._parameters, shared.tolist(), strict=True):
            if is_shared and is_large(parameter, self._reduce_dtype):
                memory = ReusedMemory(self._group.symmetric_empty((parameter.nbytes,), torch.uint8).numpy().data)
                set_gradient_memory(parameter, memory)
                memories.append(memory)
        return memories

    def _lay_out(self, order: list[int]) -> None:
        self._buckets = make_buckets(
            self._parameters, order, self._cap_bytes, self._reduce_dtype, self._group, in_place=self._as_view
        )
        self._bucket_of = {member: bucket for bucket in self._buckets for member in bucket.members}
        self._reset()

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._touched.clear()
        self._works.clear()
        self._next = 0
        self._open = False
        self._announced = False


def _make_hook(owner: weakref.ref[Reducer], position: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.on_gradient(position, parameter)

    return hook


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _kind(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, parameter.shape


def _wait_all(works: Sequence[Work], timeout: float | None) -> None:
    """Wait for all, also after one has failed, so that none still writes into a bucket; raise the first failure."""
    errors: list[Exception] = []
    for work in works:
        try:
            work.wait(timeout)
        except CollectiveTimeoutError:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unused_message(names_of: Sequence[Sequence[str]]) -> str:
    """Name the parameters without a gradient, and the ranks; `names_of` has the names of each rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(names_of):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    listed = [f"{name} ({_ranks(ranks)})" for name, ranks in ranks_of.items()][:_NAMED_PARAMETERS]
    more = len(ranks_of) - len(listed)
    return (
        f"{len(ranks_of)} parameter{'s' if len(ranks_of) > 1 else ''} got no gradient in this backward: "
        f"{', '.join(listed)}{f' and {more} more' if more else ''}. Use every parameter in every forward, freeze "
        "those that are not trained with requires_grad_(False), or wrap with find_unused_parameters=True."
    )
