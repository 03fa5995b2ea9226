"""Averaging gradients while backward runs.

Autograd calls a hook on each parameter's node when its gradient is complete, after all hooks on the parameter
itself, whenever they were registered. It puts the gradient into its bucket; a full bucket is reduced, in the
buckets' order, which is the same on all ranks whatever order gradients come in:

    backward     ── grad ── grad ── grad ── grad ── grad ──┐ end of backward
    bucket 0         └──── full ─▶ all-reduce ─────────────┤
    bucket 1                        └──── full ─▶ all-reduce ┤ wait for all, write back
    status                                                   └▶ did every rank have every gradient?

Where ranks have no core to spare for a thread that communicates, the reductions all come at the end.
After the first backward the buckets are laid out anew, in the order in which gradients became ready on rank 0.

The gradients of a backward are reduced if any forward that it goes through was outside `no_sync()`: hooks on the
outputs say so, which run first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ..collectives.divided_parameters import Axis, axes_of, replicate
from ..errors import CollectiveTimeoutError, RankFailedError, UnusedParameterError
from ..groups.world import ProcessGroup
from ..types import GradSyncStrategy, ReduceOp, Work
from ..utils.text import name_ranks
from ..utils.torch_internals import after_backward, in_backward, outside_compile
from ..wrapping.autograd import hook_gradient
from ..wrapping.partial import mark_gradients
from .buckets import Bucket, LargeGradient, make_buckets, share_memory
from .unused import unused_message

__all__ = ["Reducer"]

COMPLETE, PARTIAL, ABANDONED = range(3)
"""How a backward ended on a rank: with every gradient, without some, or with an exception."""


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
        enabled: False within `no_sync()`.
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
        self._axis = Axis(group, group.size)
        replicate(self._parameters, self._axis)
        self._divided = [parameter for parameter in self._parameters if axes_of(parameter)]
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
        self._open = False  # a backward is under way that is reduced
        self._accumulates = False  # one is under way that is not
        self._announced = False
        self._works: list[Work] = []
        self._buckets: list[Bucket | LargeGradient] = []
        told = {id(parameter) for parameter in direct} if as_view else set()
        wanted = [id(parameter) in told for parameter in self._parameters]
        self._memories = share_memory(self._parameters, wanted, reduce_dtype, group)  # for as long as this lives
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self._nodes: dict[int, Node] = {}  # autograd forgets a node that nobody holds, and its hooks
        self._hooks: dict[int, Any] = {}
        for position in range(len(self._parameters)):
            self._hook(position)
        # A module can be wrapped again after its wrapper was dropped.
        self._remove_hooks = weakref.finalize(self, _remove, self._hooks)
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

    def _hook(self, position: int) -> None:
        hook = _make_hook(weakref.ref(self), position)
        self._nodes[position], self._hooks[position] = hook_gradient(self._parameters[position], hook)

    def _follow_nodes(self, positions: Sequence[int]) -> None:
        """Hook parameters that were converted to another dtype and back since: they have got new nodes; local."""
        for position in positions:
            parameter = self._parameters[position]
            if parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[position]:
                self._hook(position)
                if parameter.grad is not None:
                    self._touched[position] = None

    def take_over(self, before: Reducer) -> list[nn.Parameter]:
        """Go on in place of `before`, which reduced other parameters; local.

        Returns:
            The parameters that `before` did not have.

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
        known = {id(parameter) for parameter in before._parameters}
        return [parameter for parameter in self._parameters if id(parameter) not in known]

    # ---- during backward ----------------------------------------------------------------------------------

    @outside_compile
    def on_gradient(self, position: int) -> None:
        """Take note of a gradient that is complete; called by autograd."""
        gradient = self._parameters[position].grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self._names[position]!r} is sparse, which cannot be averaged over ranks; "
                "build its module with sparse=False"
            )
        self._touched[position] = None
        if not (self._open or self._accumulates):  # no forward of the wrapper leads here
            self.begin_backward(reduces=self.enabled)
        if self._open and self._strategy is GradSyncStrategy.OVERLAPPED:
            self._announce_once()
            self._take_in(position)

    def begin_backward(self, *, reduces: bool) -> None:
        """Arrange for what is to be done when the outermost backward under way ends; local.

        Args:
            reduces: Whether the forward that it goes through was outside `no_sync()`. One such forward is enough.
        """
        if self._open or self._strategy is GradSyncStrategy.NO_SYNC or not self._parameters:
            return
        if reduces:
            self._open = True
            after_backward(self._finish)
        elif not self._accumulates:
            self._accumulates = True
            after_backward(self._end_accumulation)

    def _end_accumulation(self) -> None:
        self._accumulates = False

    def settle(self) -> None:
        """Let the other ranks know if an earlier backward ended in an exception; collective in that case.

        They wait for this rank's gradients, and get an error instead.
        """
        if in_backward():
            return
        self._accumulates = False
        if self._open:
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
        self._follow_nodes(range(len(self._parameters))[:1])  # of one that was converted and back, all are
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
        own = [parameter.grad is not None for parameter in self._parameters]
        self._follow_nodes([position for position in range(len(own)) if position not in self._touched])
        state = COMPLETE if len(self._touched) == len(self._parameters) else PARTIAL
        worst, used = self._exchange(state, own, async_op)
        for bucket in self._buckets:
            bucket.unpack(used, as_view=self._as_view, scale=self.scale)
        if self.learns and self.announce is None and worst == COMPLETE:
            self._learn()
        mark_gradients(self._divided)

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
                f"gradients were not averaged: backward ended in an exception on {name_ranks(abandoned)}, "
                "which then went on with another forward"
            )
        raise UnusedParameterError(unused_message([names for _, names in notes]))

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients became ready on rank 0."""
        order = torch.tensor(list(self._touched), dtype=torch.int64, device=self.device)
        self._group.broadcast(order, 0)
        self.learns = False
        self._lay_out(order.tolist())
        if self._as_view:  # or the old buckets would live as long as the gradients in them
            for bucket in self._buckets:
                bucket.adopt()

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


def _make_hook(owner: weakref.ref[Reducer], position: int) -> Callable[[object, object], None]:
    def hook(_inputs: object, _gradients: object) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.on_gradient(position)

    return hook


def _remove(hooks: Mapping[int, Any]) -> None:
    for hook in hooks.values():
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
