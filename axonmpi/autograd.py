"""Collectives that autograd can follow, in pairs that are each other's transpose.

    forward                               backward                       Megatron-LM calls it
    copy             x on all ranks       sum of the gradients           f
    reduce           sum over ranks       copy of the gradient           g
    scatter          own slice            concatenation                  scatter to region
    gather           concatenation        own slice                      gather from region
    reduce_scatter   own slice of sum     concatenation                  g with sequence parallelism
    all_gather       concatenation        own slice of the sum           its transpose
    all_to_all       exchanged slices     exchanged back                 expert and Ulysses parallelism

`gather` and `all_gather` compute the same value and differ in what follows: after `gather` all ranks compute
the same thing with it, so each gradient is complete; after `all_gather` each rank does work of its own with it, so
the gradients are summed. The same holds for `scatter` (its input is the same on all ranks) and `reduce_scatter`.

Forward and backward are collective. Each backward is the other function of its pair, so gradients of
gradients work. Source: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .backends import check_tensor, wrap_dim
from .errors import DtypeError
from .groups.world import ProcessGroup, chosen_group
from .types import ReduceOp
from .utils.arguments import either_group_name
from .utils.partition import split_sizes

__all__ = ["all_gather", "all_to_all", "copy", "gather", "reduce", "reduce_scatter", "scatter"]


@either_group_name
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
    return _apply(_Copy, tensor, group)


@either_group_name
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
    return _apply(_Reduce, tensor, group)


@either_group_name
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
    group = chosen_group(group)
    _check(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _apply(_Scatter, tensor, group, dim, split_sizes(tensor.shape[dim], group.size))


@either_group_name
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
    group = chosen_group(group)
    tensor = _check_joined(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _apply(_Gather, tensor, group, dim, _sizes_here(tensor, group, dim))


@either_group_name
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
    group = chosen_group(group)
    _check(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _apply(_ReduceScatter, tensor, group, dim, split_sizes(tensor.shape[dim], group.size))


@either_group_name
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
    group = chosen_group(group)
    tensor = _check_joined(tensor, group)
    dim = wrap_dim(dim, tensor.dim())
    return _apply(_AllGather, tensor, group, dim, _sizes_here(tensor, group, dim))


@either_group_name
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


def _check(tensor: Tensor, group: ProcessGroup) -> None:
    backend = group.backend
    check_tensor(tensor, backend.name, backend.device_types)
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise DtypeError(
            f"tensors of dtype {tensor.dtype} have no gradient; use the function of this purpose in axonmpi.comm"
        )


def _check_joined(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Check a tensor that is joined with those of other ranks and return it with at least one dimension."""
    _check(tensor, group)
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _sizes_here(tensor: Tensor, group: ProcessGroup, dim: int) -> tuple[int, ...]:
    """Return every rank's size along `dim`; collective."""
    sizes: list[int] = group.all_gather(torch.tensor([tensor.shape[dim]])).tolist()
    return tuple(sizes)


def _own(tensor: Tensor, group: ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
    own: Tensor = tensor.split(list(sizes), dim)[group.rank]
    return own


def _apply(function: type[Function], tensor: Tensor, group: ProcessGroup, *options: Any) -> Tensor:
    result: Tensor = function.apply(tensor, group, *options)
    return result


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Reduce, grads[0], ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, ReduceOp.SUM)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Copy, grads[0], ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.options = group, dim, sizes
        return _own(tensor, group, dim, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Gather, grads[0], *ctx.options), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.options = group, dim, sizes
        result: Tensor = group.all_gather(tensor, dim)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Scatter, grads[0], *ctx.options), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.options = group, dim, sizes
        if sizes == split_sizes(tensor.shape[dim], group.size):
            result: Tensor = group.reduce_scatter(tensor, ReduceOp.SUM, dim)
            return result
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, ReduceOp.SUM)
        return _own(total, group, dim, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_AllGather, grads[0], *ctx.options), None, None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.options = group, dim, sizes
        result: Tensor = group.all_gather(tensor, dim)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_ReduceScatter, grads[0], *ctx.options), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int, sizes: tuple[int, ...]
    ) -> Tensor:
        shape = (*tensor.shape[:concat_dim], -1, *tensor.shape[concat_dim + 1 :])
        parts = tensor.split(list(sizes), split_dim)
        received = group.operations.all_to_all(parts, cut_from=(tensor.dtype, shape, split_dim))
        ctx.options = group, concat_dim, split_dim, tuple(part.shape[concat_dim] for part in received)
        return torch.cat(received, concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_AllToAll, grads[0], *ctx.options), None, None, None, None
