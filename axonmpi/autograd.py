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

`gather` and `all_gather` compute the same value and differ in what follows: after `gather` all ranks compute
the same thing with it, so each gradient is complete; after `all_gather` each rank does work of its own with it, so
the gradients are summed. The same holds for `scatter` (its input is the same on all ranks) and `reduce_scatter`.

Forward and backward are collective. Each backward is the other function of its pair, so gradients of
gradients work. Source: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

_Operation = Callable[[Tensor, "_Slices"], Tensor]

__all__ = ["all_gather", "all_to_all", "copy", "gather", "reduce", "reduce_scatter", "scan", "scatter"]


def copy(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the tensor; backward sums the ranks' gradients. Local forward, collective backward.

    Args:
        tensor: Floating-point or complex, any shape, the same on all ranks.
        group: The ranks whose gradients are summed; None means all.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
    """
    group = chosen_group(group)
    _check(tensor, group)
    return _apply(_Pair, tensor, _same, _summed, _Slices(group))


def reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over all ranks; backward passes the gradient on. Collective forward, local backward.

    Args:
        tensor: Floating-point or complex, the same shape on all ranks; not changed.
        group: The ranks summed over; None means all.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
    """
    group = chosen_group(group)
    _check(tensor, group)
    return _apply(_Pair, tensor, _summed, _same, _Slices(group))


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
    return _apply(_Pair, tensor, _own_slice, _joined, _slices(tensor, chosen_group(group), dim))


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
    tensor, slices = _gathered(tensor, chosen_group(group), dim)
    return _apply(_Pair, tensor, _joined, _own_slice, slices)


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
    return _apply(_Pair, tensor, _own_slice_of_sum, _joined, _slices(tensor, chosen_group(group), dim))


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
    tensor, slices = _gathered(tensor, chosen_group(group), dim)
    return _apply(_Pair, tensor, _joined, _own_slice_of_sum, slices)


def all_to_all(
    tensor: Tensor, group: ProcessGroup | None = None, split_dim: int = 0, concat_dim: int = 0
) -> Tensor:
    """Cut along `split_dim`, send slice i to rank i, concatenate what arrives along `concat_dim`; collective.

    Args:
        tensor: Cut as `torch.tensor_split` does; dtype and shape the same on all ranks, but for `concat_dim`.
        group: The ranks; None means all.
        split_dim: Dimension to cut.
        concat_dim: Dimension to concatenate along.

    Raises:
        DtypeError: The tensor has no gradient (integers, bool).
        DimensionError: A dimension is out of range.
        CollectiveMismatchError: The ranks differ in dtype, shape or dimensions.
    """
    group = chosen_group(group)
    _check(tensor, group)
    split_dim = wrap_dim(split_dim, tensor.dim(), "split_dim")
    concat_dim = wrap_dim(concat_dim, tensor.dim(), "concat_dim")
    sizes = split_sizes(tensor.shape[split_dim], group.size)
    return _apply(_AllToAll, tensor, group, split_dim, concat_dim, sizes)


def scan(tensor: Tensor, group: ProcessGroup | None = None, *, exclusive: bool = False) -> Tensor:
    """Return the sum over ranks 0 to this one; backward sums gradients over this rank and those behind; collective.

    Args:
        tensor: Floating-point or complex, the same shape and dtype on all ranks; not changed.
        group: The ranks; None means all.
        exclusive: Sum the ranks before this one only, in backward those behind it; rank 0 gets zeros.

    Raises:
        TypeError: `exclusive` is no bool.
        DtypeError: The tensor has no gradient (integers, bool).
        CollectiveMismatchError: The ranks differ in dtype, shape or `exclusive`.
    """
    group = chosen_group(group)
    _check(tensor, group)
    return _apply(_Scan, tensor, group, exclusive, False)


def _check(tensor: Tensor, group: ProcessGroup) -> None:
    backend = group.backend
    check_tensor(tensor, backend.name, backend.device_types)
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise DtypeError(
            f"tensors of dtype {tensor.dtype} have no gradient; use the function of this purpose in axonmpi.comm"
        )


def _slices(tensor: Tensor, group: ProcessGroup, dim: int) -> _Slices:
    """Return where the ranks' slices of a tensor that all have are; local."""
    _check(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _Slices(group, dim, split_sizes(tensor.shape[dim], group.size))


def _gathered(tensor: Tensor, group: ProcessGroup, dim: int) -> tuple[Tensor, _Slices]:
    """Return the tensor with at least one dimension, and where it will be in the joined one; collective."""
    _check(tensor, group)
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
    dim: int = 0
    sizes: tuple[int, ...] = ()


def _same(tensor: Tensor, slices: _Slices) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, slices: _Slices) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    slices.group.all_reduce(total, ReduceOp.SUM)
    return total


def _own_slice(tensor: Tensor, slices: _Slices) -> Tensor:
    own: Tensor = tensor.split(list(slices.sizes), slices.dim)[slices.group.rank]
    return own.clone(memory_format=torch.contiguous_format)


def _joined(tensor: Tensor, slices: _Slices) -> Tensor:
    result: Tensor = slices.group.backend.all_gather(tensor, slices.dim, sizes=slices.sizes)
    return result


def _own_slice_of_sum(tensor: Tensor, slices: _Slices) -> Tensor:
    if slices.sizes != split_sizes(tensor.shape[slices.dim], slices.group.size):
        return _own_slice(_summed(tensor, slices), slices)
    result: Tensor = slices.group.reduce_scatter(tensor, ReduceOp.SUM, slices.dim)
    return result


class _Pair(Function):
    """Two operations that are each other's transpose: forward is the first one, backward the other one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, first: _Operation, other: _Operation, slices: _Slices) -> Tensor:
        ctx.transposed = other, first, slices
        return first(tensor, slices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Pair, grads[0], *ctx.transposed), None, None, None


class _AllToAll(Function):
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


class _Scan(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, exclusive: bool, reverse: bool) -> Tensor:
        ctx.options = group, exclusive, not reverse
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.backend.scan(total, ReduceOp.SUM, exclusive=exclusive, reverse=reverse)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Scan, grads[0], *ctx.options), None, None, None


def _apply(function: type[Function], tensor: Tensor, *options: Any) -> Tensor:
    result: Tensor = function.apply(tensor, *options)
    return result
