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

`gather` and `all_gather` compute the same value and differ in backward. After `gather` all ranks compute the same
result with it, so each gradient is complete; after `all_gather` each rank computes a result of its own, so
gradients are summed. `scatter`, whose input is the same on all ranks, and `reduce_scatter` differ in the same way.

Forward and backward are collective. Each backward is the other function of its pair, so gradients of gradients
work. Source: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .backends import check_tensor, wrap_dim
from .errors import DtypeError
from .groups.process_group import ProcessGroup
from .groups.world import chosen_group
from .types import ReduceOp
from .utils.partition import split_sizes

_Operation = Callable[[Tensor], Tensor]

__all__ = ["all_gather", "all_to_all", "copy", "gather", "reduce", "reduce_scatter", "scan", "scatter"]


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


def scatter(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0) -> Tensor:
    """Return this rank's slice along `dim`; backward concatenates the ranks' gradients.

    Args:
        tensor: The same on all ranks; cut as `torch.tensor_split` does.
        group: The ranks; None means all.
        dim: Dimension to cut.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    slices = _slices(tensor, group, dim)
    return _apply(_Pair, tensor, slices.own, slices.joined)


def gather(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0) -> Tensor:
    """Return all ranks' tensors concatenated along `dim`; backward takes this rank's slice of the gradient.

    Args:
        tensor: The ranks may differ in size along `dim`. A 0-d tensor counts as one of shape [1].
        group: The ranks; None means all.
        dim: Dimension to concatenate along.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    tensor, slices = _gathered(tensor, group, dim)
    return _apply(_Pair, tensor, slices.joined, slices.own)


def reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0) -> Tensor:
    """Return this rank's slice of the sum over all ranks; backward concatenates the ranks' gradients.

    Args:
        tensor: The same shape on all ranks; cut as `torch.tensor_split` does.
        group: The ranks; None means all.
        dim: Dimension to cut.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    slices = _slices(tensor, group, dim)
    return _apply(_Pair, tensor, slices.own_of_sum, slices.joined)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 0) -> Tensor:
    """Return all ranks' tensors concatenated along `dim`; backward sums the gradients and takes this rank's slice.

    Args:
        tensor: The ranks may differ in size along `dim`. A 0-d tensor counts as one of shape [1].
        group: The ranks; None means all.
        dim: Dimension to concatenate along.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: `dim` is out of range.
    """
    tensor, slices = _gathered(tensor, group, dim)
    return _apply(_Pair, tensor, slices.joined, slices.own_of_sum)


def all_to_all(
    tensor: Tensor, group: ProcessGroup | None = None, split_dim: int = 0, concat_dim: int = 0
) -> Tensor:
    """Cut along `split_dim`, send slice i to rank i, concatenate received slices along `concat_dim`; collective.

    Args:
        tensor: Cut as `torch.tensor_split` does; the ranks may differ in size along `concat_dim` only.
        group: The ranks; None means all.
        split_dim: Dimension to cut.
        concat_dim: Dimension to concatenate along.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: A dimension is out of range.
        CollectiveMismatchError: The ranks differ in dtype, shape or dimensions.
    """
    group = _checked_group(tensor, group)
    split_dim = wrap_dim(split_dim, tensor.dim(), "split_dim")
    concat_dim = wrap_dim(concat_dim, tensor.dim(), "concat_dim")
    sizes = split_sizes(tensor.shape[split_dim], group.size)
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


def _slices(tensor: Tensor, group: ProcessGroup | None, dim: int) -> _Slices:
    """Return the ranks' slices of a tensor that all ranks have; local."""
    group = _checked_group(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _Slices(group, dim, split_sizes(tensor.shape[dim], group.size))


def _gathered(tensor: Tensor, group: ProcessGroup | None, dim: int) -> tuple[Tensor, _Slices]:
    """Return the tensor with at least one dimension, and the slices of the concatenated tensor; collective."""
    group = _checked_group(tensor, group)
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    dim = wrap_dim(dim, tensor.dim())
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
        if self.sizes != split_sizes(tensor.shape[self.dim], self.group.size):
            return self.own(_summed(tensor, self.group))
        result: Tensor = self.group.reduce_scatter(tensor, ReduceOp.SUM, self.dim)
        return result


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
