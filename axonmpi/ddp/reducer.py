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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..errors import UnusedParameterError
from ..group import ProcessGroup
from ..types import GradSyncStrategy, ReduceOp, Work
from .buckets import Bucket, make_buckets

__all__ = ["Reducer"]


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
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
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
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(position))
            for position, parameter in enumerate(self._parameters)
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced."""
        return self._parameters

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket, in the order in which they are reduced."""
        return [bucket.flat.numel() for bucket in self._buckets]

    def detach(self) -> None:
        """Take the hooks off the parameters; local."""
        for hook in self._hooks:
            hook.remove()

    # ---- during backward ----------------------------------------------------------------------------------

    def _make_hook(self, position: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._on_gradient(position, parameter)

        return hook

    def _on_gradient(self, position: int, parameter: Tensor) -> None:
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
        if self._open or not self.enabled or self._strategy is GradSyncStrategy.NO_SYNC:
            return
        self._open = True
        Variable._execution_engine.queue_callback(self._finish)

    def forget_backward(self) -> None:
        """Start afresh if an earlier backward ended in an exception; local."""
        if self._open and torch._C._current_graph_task_id() == -1:
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

    def _launch(self, bucket: Bucket, *, async_op: bool) -> None:
        bucket.launched = True
        bucket.pack()
        work = self._group.all_reduce(bucket.wire, ReduceOp.AVERAGE, async_op)
        if work is not None:
            self._works.append(work)

    def _announce_once(self) -> None:
        if self.announce is not None and not self._announced:
            self.announce("gradients")
        self._announced = True

    def _finish(self) -> None:
        try:
            if self._touched or self._find_unused:
                self._announce_once()
                self._reduce_rest(async_op=self._overlaps)
        finally:
            self._reset()

    # ---- reducing -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Reduce gradients that have changed since they were last reduced, if there are any; collective."""
        if self.announce is not None:
            self.announce("by hand")
        changed = torch.tensor([int(bool(self._touched))], dtype=torch.int32)
        self._group.all_reduce(changed, ReduceOp.MAX)
        if int(changed):
            try:
                self._reduce_rest(async_op=False)
            finally:
                self._reset()

    def shadow(self, *, by_hand: bool) -> None:
        """Take part in a synchronisation of the other ranks without gradients of the own; collective."""
        self._touched.clear()
        if by_hand:
            nothing = torch.zeros(1, dtype=torch.int32)
            self._group.all_reduce(nothing, ReduceOp.MAX)
            if not int(nothing):
                return
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.pending.clear()
        self._exchange(self._overlaps and not by_hand, own=[True] * len(self._parameters))
        self._reset()

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
        missing = [i for i in range(len(own)) if i not in self._touched] if not self._find_unused else []
        used = self._exchange(async_op, own, missing)
        for bucket in self._buckets:
            bucket.unpack(used, as_view=self._as_view, scale=self.scale)
        if self.learns and self.announce is None and len(self._touched) == len(self._parameters):
            self._learn()

    def _exchange(self, async_op: bool, own: list[bool], missing: Sequence[int] = ()) -> list[bool]:
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket, async_op=async_op)
        used = self._status(own, missing, async_op)
        for work in self._works:
            work.wait()
        return used()

    def _status(self, own: list[bool], missing: Sequence[int], async_op: bool) -> Callable[[], list[bool]]:
        """Ask what the other ranks had; the answer comes when the returned function is called."""
        asked = own if self._find_unused else [bool(missing)]
        flags = torch.tensor(asked, dtype=torch.uint8)
        work = self._group.all_reduce(flags, ReduceOp.MAX, async_op)

        def answer() -> list[bool]:
            if work is not None:
                work.wait()
            if self._find_unused:
                return [bool(flag) for flag in flags.tolist()]
            if int(flags):
                self._raise_unused(missing)
            return [True] * len(self._parameters)

        return answer

    def _raise_unused(self, missing: Sequence[int]) -> None:
        unused = self._group.all_gather_object([self._names[position] for position in missing])
        ranks_of: dict[str, list[int]] = {}
        for rank, names in enumerate(unused):
            for name in names:
                ranks_of.setdefault(name, []).append(rank)
        listed = [
            f"{name} (rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))})" for name, r in ranks_of.items()
        ]
        raise UnusedParameterError(
            f"{len(listed)} parameters got no gradient in this backward: {', '.join(listed[:10])}"
            + (", ..." if len(listed) > 10 else "")
            + ". Use every parameter in every forward, freeze those that are not trained with "
            "requires_grad_(False), or wrap with find_unused_parameters=True."
        )

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients became ready on rank 0."""
        order = torch.tensor(list(self._touched), dtype=torch.int64)
        self._group.broadcast(order, 0)
        self.learns = False
        self._lay_out(order.tolist())

    def _lay_out(self, order: list[int]) -> None:
        self._buckets = make_buckets(self._parameters, order, self._cap_bytes, self._reduce_dtype)
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
