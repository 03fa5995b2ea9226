"""The reducer of `DistributedDataParallel`: fills buckets and averages them over ranks while backward runs.

Autograd calls a hook on each parameter's node when its gradient is complete, after all hooks on the parameter
itself. The hook puts the gradient into its bucket, and a full bucket is reduced. Buckets are reduced in one order,
the same on all ranks, independent of the order in which gradients become ready:

    backward     ── grad ── grad ── grad ── grad ── grad ──┐ end of backward
    bucket 0         └──── full ─▶ all-reduce ─────────────┤
    bucket 1                        └──── full ─▶ all-reduce ┤ wait for all, write back
    status                                                   └▶ did every rank have every gradient?

Without a spare core for a communicating thread, all reductions run at the end of backward. After the first backward
the buckets are laid out again, in the order in which gradients became ready on rank 0.

A backward is reduced if it passes through any forward outside `no_sync()`: hooks on the model's outputs, which run
first, call `begin_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..across_ranks.sharded_parameters import Axis, axes_of, mark_replicated
from ..errors import RankFailedError, UnusedParameterError
from ..groups.process_group import ProcessGroup
from ..record import Phase, enter_phase
from ..types import GradSyncStrategy, ReduceOp
from ..utils.text import name_ranks
from ..utils.torch_internals import after_backward, in_backward, outside_compile
from ..wrapping.gradient_hooks import check_gradient, hook_gradient, wait_for_all, watched_rank, weakly
from ..wrapping.optimizer_hooks import mark_gradients
from ..wrapping.steps import STEP_FLAGS, Steps
from .buckets import BUCKETS_BETWEEN_NODES, FIRST_BUCKET_BYTES, Bucket, assign_buckets

COMPLETE, PARTIAL, ABANDONED = range(3)
"""The end of a backward on a rank: with all gradients, with some missing, or with an exception."""
_NAMED_PARAMETERS = 10
"""Number of parameters that an error names; it counts the rest."""


class Reducer:
    """Averages the gradients of some parameters over a group.

    Args:
        named_parameters: The parameters that require grad, the same on all ranks.
        group: The ranks to average over.
        strategy: When to reduce.
        cap_bytes: Largest bucket, in bytes.
        as_view: True if `param.grad` becomes a view of its bucket.
        find_unused: True if a parameter without a gradient counts as zeros, False if it is an error.
        reduce_dtype: Dtype of communication; None for the gradients' own.

    Attributes:
        group: The ranks to average over.
        enabled: False within `no_sync()`.
        steps: Counts the model's steps.
        report_event: Set by `join`: called with the name of each synchronisation before it begins, returns the
            ranks that take part.
        scale: Factor on the averages; set by `join`.
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
    ) -> None:
        self.group = group
        self._axis = Axis(group, group.size)
        self._strategy = strategy
        self._control = group.backend.control
        self._cap_bytes = cap_bytes if strategy is GradSyncStrategy.OVERLAPPED else None
        self._as_view = as_view
        self._find_unused = find_unused
        self._reduce_dtype = reduce_dtype
        self._watched_rank = watched_rank(group)
        self.enabled = True
        self.steps = Steps()
        self.report_event: Callable[[str], list[int]] | None = None
        self.scale = 1.0
        self._hooks: dict[int, RemovableHandle] = {}
        self._take(named_parameters)

    def _take(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        mark_replicated(self._parameters, self._axis)
        self._divided = [parameter for parameter in self._parameters if axes_of(parameter)]
        self._kinds = [_kind(parameter) for parameter in self._parameters]
        self._buckets: list[Bucket] = []
        self._learns_order = self._strategy is GradSyncStrategy.OVERLAPPED and self.group.size > 1
        # Without a spare core, a communicating thread would only slow backward down.
        can_overlap = all(self.group.backend.on(parameter.device).overlaps for parameter in self._parameters)
        self._overlaps = self._strategy is GradSyncStrategy.OVERLAPPED and can_overlap
        self._changed: dict[int, None] = {}  # gradients changed since they were last reduced, in order
        self._reduces: bool | None = None  # True if the running backward is reduced; None if no backward runs
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self._nodes: dict[int, Node] = {}  # autograd drops a node without references, and its hooks
        for position in range(len(self._parameters)):
            self._hook(position)

    def follow(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        """Reduce the gradients of other parameters from now on; collective.

        Returns:
            The parameters that are new, or have a new shape, dtype or device.

        Raises:
            ValueError: A parameter is no longer trained and has a gradient that was not averaged.
        """
        position_of = {parameter: position for position, (_, parameter) in enumerate(named_parameters)}
        changed = [(self._names[position], self._parameters[position]) for position in self._changed]
        for name, parameter in changed:
            if parameter not in position_of and parameter.grad is not None:
                raise ValueError(
                    f"{name!r} was frozen while its gradient was not averaged; call sync_gradients() before, or "
                    "set its grad to None"
                )
        for hook in self._hooks.values():
            hook.remove()
        known = set(self._kinds)
        self._take(named_parameters)
        self._changed = {position_of[parameter]: None for _, parameter in changed if parameter in position_of}
        return [parameter for parameter in self._parameters if _kind(parameter) not in known]

    @property
    def averages(self) -> bool:
        """Whether a forward that begins now has a backward that averages gradients."""
        return self.enabled and self._strategy is not GradSyncStrategy.NO_SYNC

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket, in the order in which they are reduced."""
        return [bucket.flat.numel() for bucket in self._buckets]

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if these are the parameters to reduce, with unchanged shapes, dtypes and devices; local."""
        return self._kinds == [_kind(parameter) for parameter in parameters]

    def _hook(self, position: int) -> None:
        hook = partial(weakly(self.on_gradient), position)
        self._nodes[position], self._hooks[position] = hook_gradient(self._parameters[position], hook)

    def _hook_new_nodes(self, positions: Iterable[int]) -> None:
        """Hook parameters that have a new node, as after a conversion to another dtype and back; local."""
        for position in positions:
            parameter = self._parameters[position]
            if parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[position]:
                self._hook(position)
                if parameter.grad is not None:
                    self._changed[position] = None

    # ---- during backward ----------------------------------------------------------------------------------

    @outside_compile
    def on_gradient(self, position: int, *_: object) -> None:
        """Put a complete gradient into its bucket; called by autograd."""
        check_gradient(self._names[position], self._parameters[position].grad, self._watched_rank)
        self._changed[position] = None
        if self._reduces is None:  # the forward was a call of the module, which the wrapper has not seen
            self.begin_backward(reduces=self.enabled)
        if not self._reduces or self._strategy is not GradSyncStrategy.OVERLAPPED:
            return
        bucket = self._bucket_of[position]
        if bucket.launched:
            raise ValueError(
                f"{self._names[position]!r} got a second gradient in one backward after its first was sent, as "
                "happens with parameters shared between checkpointed parts; use "
                "torch.utils.checkpoint(..., use_reentrant=False) or GradSyncStrategy.SYNCHRONOUS"
            )
        bucket.put(position)
        if self._overlaps:
            self._launch_full()

    def _launch_full(self) -> None:
        for bucket in self._buckets:  # up to the first one that is not full, so that all ranks have one order
            if not bucket.launched:
                if bucket.pending:
                    break
                bucket.launch()

    def begin_backward(self, *, reduces: bool) -> None:
        """Schedule the work at the end of the outermost running backward; local, but collective within `join`.

        Args:
            reduces: True if its forward was outside `no_sync()`; of several forwards, one is enough.
        """
        is_known = self._reduces or self._reduces is reduces
        if is_known or self._strategy is GradSyncStrategy.NO_SYNC or not self._parameters:
            return
        if reduces and self.report_event is not None:
            self.report_event("gradients")
        self._reduces = reduces
        after_backward(self._end_backward)

    @outside_compile
    def _end_backward(self) -> None:
        enter_phase(Phase.OTHER)
        if self._reduces:
            self._reduce_rest()
        self._reduces = None

    def report_failed_backward(self) -> None:
        """Raise an error on the other ranks if an earlier backward ended in an exception; collective in that case.

        They wait in their own backward for this rank's gradients.
        """
        if in_backward():
            return
        if self._reduces:
            try:
                self._exchange(ABANDONED, [False] * len(self._parameters))
            finally:
                self._reset()
        self._reduces = None

    # ---- reducing -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Reduce gradients if any has changed since the last reduction; collective."""
        self.report_failed_backward()
        self._hook_new_nodes(range(len(self._parameters))[:1])  # a conversion gives all parameters new nodes
        if self.report_event is not None:
            self.report_event("by hand")
        if self._any_rank_changed():
            self._reduce_rest()

    def reduce_zeros(self, *, by_hand: bool) -> None:
        """Take part in a synchronisation with zeros in place of this rank's gradients; collective.

        Args:
            by_hand: True if the other ranks are in `sync()`, False if they are in backward.
        """
        self._changed.clear()
        if by_hand and not self._any_rank_changed():
            return
        for bucket in self._buckets:
            bucket.flat.zero_()
        try:
            self._exchange(COMPLETE, [False] * len(self._parameters), takes_part=False)
        finally:
            self._reset()

    def _any_rank_changed(self) -> bool:
        changed = self._flags([bool(self._changed)])
        self._control.all_reduce(changed, ReduceOp.MAX)
        return bool(changed.item())

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        """Reduce the buckets not yet launched and the status, and write the averages back; collective."""
        try:
            for bucket in self._buckets:
                for position in [] if bucket.launched else sorted(bucket.pending):
                    bucket.put(position)
            own = [parameter.grad is not None for parameter in self._parameters]
            self._hook_new_nodes(position for position in range(len(own)) if position not in self._changed)
            state = COMPLETE if len(self._changed) == len(self._parameters) else PARTIAL
            worst, used = self._exchange(state, own)
            for bucket in self._buckets:
                bucket.unpack(used, self.scale)
            if self._learns_order and self.report_event is None and worst == COMPLETE:
                self._learn_order()
            mark_gradients(self._divided)
        finally:
            self._reset()

    def _exchange(self, state: int, own: list[bool], *, takes_part: bool = True) -> tuple[int, list[bool]]:
        """Reduce the buckets not yet launched, and one status message; collective.

        Args:
            state: The end of this rank's backward.
            own: For each parameter, whether this rank has a gradient.
            takes_part: False on a rank without a batch of its own.

        Returns:
            The worst end of any rank; for each parameter, whether any rank has a gradient.
        """
        for bucket in self._buckets:
            if not bucket.launched:
                bucket.launch()
        step = self.steps.reduce() if takes_part else [0] * STEP_FLAGS
        flags = self._flags([*step, state, *own] if self._find_unused else [*step, state])
        status = self._control.all_reduce(flags, ReduceOp.MAX, async_op=self._overlaps)
        waits: list[Callable[[], object]] = [bucket.wait for bucket in self._buckets]
        wait_for_all(waits if status is None else [*waits, partial(status.wait, self._control.timeout)])
        maxima = flags.tolist()
        self.steps.check(maxima[:STEP_FLAGS], [self.group])
        worst, *used = maxima[STEP_FLAGS:]
        if worst == ABANDONED or (worst == PARTIAL and not self._find_unused):
            self._raise_on_all(state)
        return worst, [bool(flag) for flag in used] if self._find_unused else [True] * len(own)

    def _flags(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.uint8, device=self._control.place)

    def _raise_on_all(self, state: int) -> None:
        """Raise the same error on all ranks but the ranks whose backward has raised before; collective."""
        missing = [name for position, name in enumerate(self._names) if position not in self._changed]
        of_all = self.group.all_gather_object((state, missing if state == PARTIAL else []))
        abandoned = [rank for rank, (other, _) in enumerate(of_all) if other == ABANDONED]
        if state == ABANDONED:
            return
        if abandoned:
            raise RankFailedError(
                f"gradients were not averaged: backward ended in an exception on {name_ranks(abandoned)}, "
                "which then went on with another forward"
            )
        raise UnusedParameterError(_unused_message([names for _, names in of_all]))

    def _learn_order(self) -> None:
        """Lay the buckets out in the order in which gradients became ready on rank 0; collective."""
        order = torch.tensor(list(self._changed), dtype=torch.int64, device=self._control.place)
        self._control.broadcast(order, 0)
        self._learns_order = False
        self._lay_out(order.tolist())
        if self._as_view:  # else the old buckets would live as long as the gradients in them
            for bucket in self._buckets:
                bucket.adopt()

    def _lay_out(self, order: list[int]) -> None:
        """Make the buckets, unless they would not change; collective."""
        cap_bytes, backend = self._cap_bytes, self.group.backend
        crosses_nodes = backend.place.type == "cpu" and len(backend.control.node_ranks) < backend.size
        if cap_bytes is not None and self._overlaps and crosses_nodes:
            total = sum(parameter.nbytes for parameter in self._parameters)
            cap_bytes = min(cap_bytes, max(FIRST_BUCKET_BYTES, total // BUCKETS_BETWEEN_NODES))
        layout = assign_buckets(self._parameters, order, cap_bytes)
        if [set(positions) for positions in layout] == [set(bucket.parameters) for bucket in self._buckets]:
            return
        self._buckets = [self._bucket_with(positions) for positions in layout]
        self._bucket_of = {position: bucket for bucket in self._buckets for position in bucket.parameters}
        self._reset()

    def _bucket_with(self, positions: Iterable[int]) -> Bucket:
        return Bucket(
            {position: self._parameters[position] for position in positions},
            self.group,
            reduce_dtype=self._reduce_dtype,
            as_view=self._as_view,
            async_op=self._overlaps,
        )

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._changed.clear()
        self._reduces = None


def _kind(parameter: nn.Parameter) -> tuple[object, ...]:
    return id(parameter), parameter.dtype, parameter.device, parameter.shape


def _unused_message(names_of: Sequence[Sequence[str]]) -> str:
    """Return the error text for parameters without a gradient.

    Args:
        names_of: Their names on each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(names_of):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    listed = [f"{name} ({name_ranks(ranks)})" for name, ranks in ranks_of.items()][:_NAMED_PARAMETERS]
    more = len(ranks_of) - len(listed)
    return (
        f"{len(ranks_of)} parameter{'s' if len(ranks_of) > 1 else ''} got no gradient in this backward: "
        f"{', '.join(listed)}{f' and {more} more' if more else ''}. Use every parameter in every forward, freeze "
        "those that are not trained with requires_grad_(False), or wrap with find_unused_parameters=True."
    )
