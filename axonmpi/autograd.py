"""Collectives that autograd can follow, in pairs that are each other's transpose.

    forward                               backward                       Megatron-LM calls it
    copy             x on all ranks       sum of the gradients           f
    reduce           sum over ranks       copy of the gradient           g
    scatter          own slice            concatenation                  scatter to region
    gather           concatenation        own slice                      gather from region
    reduce_scatter   own slice of sum     concatenation                  g with sequence parallelism
    all_gather       concatenation        own slice of the sum           its transpose
    all_to_all       exchanged slices     exchanged back                 expert and Ulysses parallelism
    scan             sum of ranks 0 to r  sum of ranks r to the last
    fetch            rows of other ranks  added to their owners' rows  halo exchange

`gather` and `all_gather` compute the same value and differ in backward. After `gather` all ranks compute the same
result with it, so each gradient is complete; after `all_gather` each rank computes a result of its own, so
gradients are summed. `scatter`, whose input is the same on all ranks, and `reduce_scatter` differ in the same way.

Forward and backward are collective. Each backward is the other function of its pair, so gradients of gradients
work. Source: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022.

The file is long because it is the reference of each of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from .backends import check_sizes, check_tensor, wrap_dim
from .errors import DtypeError
from .groups.process_group import ProcessGroup
from .groups.world import chosen_group
from .types import ReduceOp, Work
from .utils import partition
from .utils.arguments import integer
from .utils.rows import MODES, RowPlan, row_plan

_Operation = Callable[[Tensor], Tensor]

__all__ = ["all_gather", "all_to_all", "copy", "fetch", "gather", "reduce", "reduce_scatter", "scan", "scatter"]


def copy(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensor; backward sums the ranks' gradients. Local forward, collective backward.

    Args:
        tensor: Floating-point or complex, any shape, the same on all ranks.
        group: The ranks whose gradients are summed; None means all.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
    """
    group = _checked_group(tensor, group)
    return _apply(_Pair, tensor, _same, partial(_summed, group=group))


def reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over all ranks; backward passes the gradient on. Collective forward, local backward.

    Args:
        tensor: Floating-point or complex, the same shape on all ranks; not changed.
        group: The ranks summed over; None means all.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
    """
    group = _checked_group(tensor, group)
    return _apply(_Pair, tensor, partial(_summed, group=group), _same)


def scatter(
    tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's slice along `dim`; backward concatenates the ranks' gradients.

    Args:
        tensor: The same on all ranks.
        group: The ranks; None means all.
        dim: Dimension to cut.
        sizes: Size of each rank's slice, the same on all ranks; None: as `torch.tensor_split` cuts.

    Raises:
        ValueError: `sizes` are not as many as the ranks, or do not add up to the tensor's.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    slices = _slices(tensor, group, dim, sizes)
    return _apply(_Pair, tensor, slices.own, slices.joined)


def gather(
    tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return all ranks' tensors concatenated along `dim`; backward takes this rank's slice of the gradient.

    Args:
        tensor: The ranks may differ in size along `dim`. A 0-d tensor counts as one of shape [1].
        group: The ranks; None means all.
        dim: Dimension to concatenate along.
        sizes: Size of each rank's tensor there, the same on all ranks, which then need not tell each other.

    Raises:
        ValueError: `sizes` are not as many as the ranks, or this rank's size is another.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    tensor, slices = _gathered(tensor, group, dim, sizes)
    return _apply(_Pair, tensor, slices.joined, slices.own)


def reduce_scatter(
    tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's slice of the sum over all ranks; backward concatenates the ranks' gradients.

    Args:
        tensor: The same shape on all ranks.
        group: The ranks; None means all.
        dim: Dimension to cut.
        sizes: Size of each rank's slice, the same on all ranks; None: as `torch.tensor_split` cuts.

    Raises:
        ValueError: `sizes` are not as many as the ranks, or do not add up to the tensor's.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    slices = _slices(tensor, group, dim, sizes)
    return _apply(_Pair, tensor, slices.own_of_sum, slices.joined)


def all_gather(
    tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return all ranks' tensors concatenated along `dim`; backward sums the gradients and takes this rank's slice.

    Args:
        tensor: The ranks may differ in size along `dim`. A 0-d tensor counts as one of shape [1].
        group: The ranks; None means all.
        dim: Dimension to concatenate along.
        sizes: Size of each rank's tensor there, the same on all ranks, which then need not tell each other.

    Raises:
        ValueError: `sizes` are not as many as the ranks, or this rank's size is another.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    tensor, slices = _gathered(tensor, group, dim, sizes)
    return _apply(_Pair, tensor, slices.joined, slices.own_of_sum)


def all_to_all(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cut along `split_dim`, send slice i to rank i, concatenate received slices along `concat_dim`; collective.

    Args:
        tensor: The ranks may differ in size along `concat_dim` only.
        group: The ranks; None means all.
        split_dim: Dimension to cut.
        concat_dim: Dimension to concatenate along.
        split_sizes: Size of the slice for each rank, the same on all ranks unless `split_dim` is `concat_dim`;
            None: as `torch.tensor_split` cuts.

    Raises:
        ValueError: `split_sizes` are not as many as the ranks, or do not add up to the tensor's.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: A dimension is out of range.
        CollectiveMismatchError: The ranks differ in dtype, shape or dimensions.
    """
    group = _checked_group(tensor, group)
    split_dim = wrap_dim(split_dim, tensor.dim(), "split_dim")
    concat_dim = wrap_dim(concat_dim, tensor.dim(), "concat_dim")
    sizes = _checked_sizes("split_sizes", split_sizes, tensor.shape[split_dim], group)
    return _apply(_AllToAll, tensor, group, split_dim, concat_dim, sizes)


def scan(tensor: Tensor, group: ProcessGroup | None = None, *, exclusive: bool = False) -> Tensor:
    """Return the sum over ranks 0 to this one; backward sums gradients of this rank to the last; collective.

    Args:
        tensor: Floating-point or complex, the same shape and dtype on all ranks; not changed.
        group: The ranks; None means all.
        exclusive: Leave this rank out of both sums; rank 0 gets zeros.

    Raises:
        TypeError: `exclusive` is no bool.
        DtypeError: The tensor has no gradient (integers, bool).
        CollectiveMismatchError: The ranks differ in dtype, shape or `exclusive`.
    """
    scanned = partial(_scanned, group=_checked_group(tensor, group), exclusive=exclusive)
    return _apply(_Pair, tensor, partial(scanned, reverse=False), partial(scanned, reverse=True))


def fetch(
    tensor: Tensor,
    start: int,
    stop: int,
    group: ProcessGroup | None = None,
    dim: int = 0,
    *,
    mode: str = "zeros",
    value: float = 0.0,
) -> Tensor:
    """Return rows `start` to `stop` of the tensor that all ranks have in parts; backward adds them at their owners.

    Rows are counted along `dim` of the ranks' tensors, concatenated. Ranks may ask for any ranges, which may
    overlap, be empty, lie on other ranks or beyond the ends. Gradients of one row are added in rank order.
    Collective forward and backward.

    Args:
        tensor: This rank's part; the ranks may differ in size along `dim` only, which may be 0.
        start: First row, counted over all ranks; below 0: before the first one.
        stop: Row after the last, at least `start`.
        group: The ranks; None means all.
        dim: Dimension along which the ranks' parts follow each other.
        mode: Rows beyond the ends, the same on all ranks: "zeros" (each is `value`), "circular" (from the other
            end), "reflect" (mirrored, without the last row twice) or "replicate" (the last row).
        value: The constant of mode "zeros", such as `-inf` for a maximum.

    Returns:
        [..., stop - start, ...], a new contiguous tensor.

    Raises:
        TypeError: `start`, `stop` or `dim` is no integer, or `value` no number.
        ValueError: `stop` is below `start`, `mode` is another, `value` is given with another mode than "zeros", or
            no rank has a row that could stand for one beyond the ends.
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
        CollectiveMismatchError: The ranks differ in dtype, in `dim`, in another dimension, or in `mode`.
    """
    start, stop = integer("start", start), integer("stop", stop)
    if stop < start:
        raise ValueError(f"stop: expected at least start={start}, got {stop}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"value: expected a number, got {value!r}")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if value and mode != "zeros":
        raise ValueError(f"value: expected 0 with mode {mode!r}, got {value}")
    group = _checked_group(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    control = group.backend.control
    numbers = [[0, 0, 0]] * group.size
    numbers[group.rank] = [tensor.shape[dim], start, stop]
    told = torch.tensor(numbers, device=control.place)  # a sum is the quickest way to gather few numbers
    others = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    control.all_reduce(told, label=f"fetch, mode {mode!r}, dim {dim}, {tensor.dtype}, other sizes {others}")
    numbers = told.tolist()
    plan = row_plan(tuple(size for size, _, _ in numbers), tuple((low, high) for _, low, high in numbers), mode)
    return fetch_rows(tensor, plan, group, dim, value)


def fetch_rows(tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int, value: float = 0.0) -> Tensor:
    """Return this rank's rows by a plan; `fetch` without its checks; collective forward and backward."""
    fetched, returned = (
        partial(_fetched, plan=plan, group=group, dim=dim),
        partial(_returned, plan=plan, group=group, dim=dim),
    )
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    result = _apply(_Pair, tensor, fetched, returned) if needs_grad else fetched(tensor)
    if value:
        with torch.no_grad():
            for low, high in plan.beyond(group.rank):
                result.narrow(dim, low, high - low).fill_(value)
    return result


def begin_rows(
    tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int, start: int, stop: int, *, async_op: bool = False
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Begin `fetch_rows`, for functions that use the rows apart from the tensor's own; collective, backward, too.

    Autograd runs the node that was made last first. So if rows travel meanwhile, computation hides their way, and
    in backward that of their gradients:

        forward     begin    compute with own rows      wait     compute with the rows
        backward    wait     gradient of that           begin    gradient of that

    Args:
        tensor: This rank's part.
        plan: The plan.
        group: The ranks.
        dim: The dimension along which the ranks' parts follow each other.
        start: The first of the tensor's own rows that are used.
        stop: The end of them.
        async_op: Let rows travel meanwhile. Else they are here when this returns, and their gradients are sent
            after those of the own rows are computed.

    Returns:
        The own rows, which share memory with the tensor, to be used by one function whose gradient is memory of its
        own; and a function that waits for the rows and returns them.
    """
    passage = _Passage(plan, group, dim, start, stop, async_op)
    rows, own = _Begun.apply(tensor, passage)  # type: ignore[no-untyped-call]
    return own, lambda: _apply(_Ended, rows, passage)


def return_rows(tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int) -> Tensor:
    """Return rows to their owners, who add them: the transpose of `fetch_rows`; collective forward and backward."""
    fetched, returned = (
        partial(_fetched, plan=plan, group=group, dim=dim),
        partial(_returned, plan=plan, group=group, dim=dim),
    )
    return _apply(_Pair, tensor, returned, fetched)


def _checked_group(tensor: Tensor, group: ProcessGroup | None) -> ProcessGroup:
    """Return the group, the default group for None, if the tensor can have a gradient and be sent; local."""
    group = chosen_group(group)
    backend = group.backend
    check_tensor(tensor, backend.name, backend.device_types)
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise DtypeError(
            f"tensors of dtype {tensor.dtype} have no gradient; use the function of this purpose in axonmpi.comm"
        )
    return group


def _slices(tensor: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None) -> _Slices:
    """Return the ranks' slices of a tensor that all ranks have; local."""
    group = _checked_group(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _Slices(group, dim, _checked_sizes("sizes", sizes, tensor.shape[dim], group))


def _checked_sizes(name: str, sizes: Sequence[int] | None, total: int, group: ProcessGroup) -> tuple[int, ...]:
    """Return the size of each rank's slice of `total` rows; local."""
    if sizes is None:
        return partition.split_sizes(total, group.size)
    checked = check_sizes(sizes, group.size)
    if checked.total != total:
        raise ValueError(f"{name}: expected {total} in all, as the tensor has, got {list(checked)}")
    return checked


def _gathered(
    tensor: Tensor, group: ProcessGroup | None, dim: int, given: Sequence[int] | None
) -> tuple[Tensor, _Slices]:
    """Return the tensor with at least one dimension, and the slices of the concatenated tensor.

    Collective, unless the sizes are given.
    """
    group = _checked_group(tensor, group)
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    dim = wrap_dim(dim, tensor.dim())
    if given is not None:
        checked = check_sizes(given, group.size)
        if checked[group.rank] != tensor.shape[dim]:
            raise ValueError(f"sizes: expected {tensor.shape[dim]} for this rank, got {checked[group.rank]}")
        return tensor, _Slices(group, dim, checked)
    control = group.backend.control
    sizes: list[int] = control.all_gather(torch.tensor([tensor.shape[dim]], device=control.place)).tolist()
    return tensor, _Slices(group, dim, tuple(sizes))


@dataclass(frozen=True)
class _Slices:
    """The ranks' slices of a tensor.

    Attributes:
        group: The ranks.
        dim: Dimension along which the tensor is cut.
        sizes: Size of each rank's slice along `dim`.
    """

    group: ProcessGroup
    dim: int
    sizes: tuple[int, ...]

    def own(self, tensor: Tensor) -> Tensor:
        """Return a copy of this rank's slice; local."""
        own: Tensor = tensor.split(list(self.sizes), self.dim)[self.group.rank]
        return own.clone(memory_format=torch.contiguous_format)

    def joined(self, tensor: Tensor) -> Tensor:
        """Return the ranks' slices concatenated; collective."""
        result: Tensor = self.group.backend.all_gather(tensor, self.dim, sizes=self.sizes)
        return result

    def own_of_sum(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of the sum over all ranks; collective."""
        if self.sizes == partition.split_sizes(tensor.shape[self.dim], self.group.size):
            result: Tensor = self.group.reduce_scatter(tensor, ReduceOp.SUM, self.dim)
            return result
        rows = tensor.movedim(self.dim, 0)
        own = tensor.new_empty((self.sizes[self.group.rank], *rows.shape[1:]))
        row = rows.shape[1:].numel()
        self.group.backend.reduce_scatter_into(
            own.view(-1), [rows.reshape(-1)], [size * row for size in self.sizes]
        )
        return own.movedim(0, self.dim).contiguous()


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, ReduceOp.SUM)
    return total


def _scanned(tensor: Tensor, group: ProcessGroup, *, exclusive: bool, reverse: bool) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.backend.scan(total, ReduceOp.SUM, exclusive=exclusive, reverse=reverse)
    return total


def _fetched(tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's rows; zeros beyond the ends; collective."""
    return _begin_fetched(tensor, plan, group, dim)[0]


def _begin_fetched(
    tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int, *, async_op: bool = False
) -> tuple[Tensor, Work | None]:
    """Return memory for this rank's rows, and how to wait for those of other ranks; collective."""
    rank, rows = group.rank, _rows_first(tensor.detach(), dim)
    shape = (*tensor.shape[:dim], plan.rows(rank), *tensor.shape[dim + 1 :])
    result = tensor.new_empty(shape)
    target = _rows_first(result, dim)
    for low, high in plan.beyond(rank):
        target.narrow(0, low, high - low).zero_()
    for run in plan.own(rank):
        target.narrow(0, run.at, run.size).copy_(rows.narrow(0, run.start, run.size))
    if group.size == 1:
        return result, None
    shown = [rows.narrow(0, low, high - low) for low, high in plan.shown[rank]] or [rows[:0]]
    taken = [target.narrow(0, run.at, run.size) for run in plan.foreign(rank)]
    label = f"{plan.mode} of {sum(plan.sizes)} rows"
    return result, group.backend.exchange_rows(shown, taken, plan.forward, async_op=async_op, label=label)


def _rows_first(tensor: Tensor, dim: int) -> Tensor:
    """Return a view whose first dimension is `dim`; local."""
    return tensor.movedim(dim, 0) if dim else tensor


def _returned(tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int) -> Tensor:
    """Return the sum of what ranks got of each of this rank's rows; collective."""
    return _begin_returned(tensor, plan, group, dim)(None)


def _begin_returned(
    tensor: Tensor, plan: RowPlan, group: ProcessGroup, dim: int, *, async_op: bool = False
) -> Callable[[Tensor | None], Tensor]:
    """Begin to return rows; the result waits for those of other ranks and adds them to a tensor; collective."""
    rank, rows = group.rank, _rows_first(tensor.detach(), dim)
    runs = plan.returned(rank)
    taken = [rows.new_empty((run.size, *rows.shape[1:])) for run in runs]
    work: Work | None = None
    if group.size > 1:
        shown = [rows.narrow(0, run.at, run.size) for run in plan.foreign(rank)] or [rows[:0]]
        label = f"{plan.mode} of {sum(plan.sizes)} rows, back"
        work = group.backend.exchange_rows(shown, taken, plan.transposed, async_op=async_op, label=label)

    def finish(result: Tensor | None) -> Tensor:
        if work is not None:
            work.wait()
        # In rank order: runs of lower ranks, own ones, those of higher ranks.
        gradients = list(zip(runs, taken, strict=True))
        own = [(run, rows.narrow(0, run.at, run.size)) for run in plan.own(rank)]
        before = sum(len([run for run in plan.runs[other] if run.owner == rank]) for other in range(rank))
        gradients[before:before] = own
        if result is None:
            result = tensor.new_empty((*tensor.shape[:dim], plan.sizes[rank], *tensor.shape[dim + 1 :]))
            if before < 2 and len(own) == 1:  # a sum of two is the same in any order
                run, part = gradients.pop(before)
                result.narrow(dim, 0, run.start).zero_()
                result.narrow(dim, run.stop, plan.sizes[rank] - run.stop).zero_()
                _rows_first(result, dim).narrow(0, run.start, run.size).copy_(part)
            else:
                result.zero_()
        target = _rows_first(result, dim)
        for run, part in gradients:
            target.narrow(0, run.start, run.size).add_(part)
        return result

    return finish


@dataclass
class _Passage:
    """Rows, or their gradients, on their way.

    Attributes:
        plan: The plan.
        group: The ranks.
        dim: The dimension along which the rows lie.
        start: The first of the tensor's own rows that are used.
        stop: The end of them.
        async_op: True if they travel during computation.
        work: How to wait for the rows.
        finish: Waits for the gradients, and adds them to a tensor; None: they have not been sent.
    """

    plan: RowPlan
    group: ProcessGroup
    dim: int
    start: int
    stop: int
    async_op: bool
    work: Work | None = None
    finish: Callable[[Tensor | None], Tensor] | None = None

    def send_back(self, gradient: Tensor) -> None:
        """Begin to return the gradients of rows to their owners."""
        self.finish = _begin_returned(gradient, self.plan, self.group, self.dim, async_op=self.async_op)

    def placed(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the own rows as that of the tensor."""
        behind = self.plan.sizes[self.group.rank] - self.stop
        if not self.start and not behind:
            return gradient
        return pad(gradient, [0, 0] * (gradient.dim() - 1 - self.dim) + [self.start, behind])


class _Begun(Function):
    """Rows that are on their way, and own rows of a tensor; backward waits for the gradients of the rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passage: _Passage) -> Any:
        ctx.passage = passage
        options = passage.plan, passage.group, passage.dim
        rows, passage.work = _begin_fetched(tensor, *options, async_op=passage.async_op)
        return rows, tensor.narrow(passage.dim, passage.start, passage.stop - passage.start)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        passage: _Passage = ctx.passage
        of_rows, of_own = grads
        if torch.is_grad_enabled():  # for gradients of gradients, which do not travel meanwhile
            returned = return_rows(of_rows, passage.plan, passage.group, passage.dim)
            return returned + passage.placed(of_own), None
        if passage.finish is None:
            passage.send_back(of_rows)
        assert passage.finish is not None
        finish, passage.finish = passage.finish, None
        return finish(passage.placed(of_own)), None


class _Ended(Function):
    """Rows that have come; backward sends their gradients to the owners, if they travel during computation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, passage: _Passage) -> Tensor:
        ctx.passage, work = passage, passage.work
        passage.work = None  # which has the tensor's memory
        if work is not None:
            work.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.passage.async_op and not torch.is_grad_enabled():
            ctx.passage.send_back(grads[0])
        return grads[0], None


class _Pair(Function):
    """Two operations that are each other's transpose: forward is the first, backward the second."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, first: _Operation, second: _Operation) -> Tensor:
        ctx.transposed = second, first
        return first(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Pair, grads[0], *ctx.transposed), None, None


class _AllToAll(Function):
    """The exchange of slices; backward is the exchange with both dimensions swapped."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int, sizes: tuple[int, ...]
    ) -> Tensor:
        shape = (*tensor.shape[:concat_dim], -1, *tensor.shape[concat_dim + 1 :])
        parts = tensor.split(list(sizes), split_dim)
        received = group.backend.all_to_all(parts, cut_from=(tensor.dtype, shape, split_dim))
        ctx.options = group, concat_dim, split_dim, tuple(part.shape[concat_dim] for part in received)
        return torch.cat(received, concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_AllToAll, grads[0], *ctx.options), None, None, None, None


def _apply(function: type[Function], tensor: Tensor, *options: Any) -> Tensor:
    result: Tensor = function.apply(tensor, *options)
    return result
