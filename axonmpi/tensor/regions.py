"""Functions of autograd at the edges of a tensor-parallel region, in which each rank has its own features.

    replicated ────── enter ──── each rank has its own features ──── leave ──── replicated
    sequence shard ── enter ──── each rank has its own features ──── leave ──── sequence shard

    function         forward           backward           with sequence parallelism
    enter            nothing           sum                all-gather           reduce-scatter
    leave            sum               nothing            reduce-scatter       all-gather
    split_sequence   own slice         all-gather
    join_sequence    all-gather        own slice
    shared           nothing           sum, for several small tensors in one all-reduce

With sequence parallelism each rank has a slice of the sequence between regions, so norms and dropout are computed
once instead of on every rank. `enter` and `leave` are each other's transpose, and so are `split_sequence` and
`join_sequence`.

Sources: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import autograd
from ..backends import Backend, wrap_dim
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group
from ..types import ReduceOp
from ..utils.arguments import check_flags
from .overlapped_linear import InputGather, apply, gathered, is_differentiated
from .shards import Shard


def enter(
    tensor: Tensor, group: ProcessGroup | None = None, *, sequence_parallel: bool = False, sequence_dim: int = 1
) -> Tensor:
    """Begin a region: return the full input of column layers, whose outputs are sharded over the ranks.

    Forward is local, backward one all-reduce. With sequence parallelism they are one all-gather and one
    reduce-scatter, and one more all-gather for the weights of the layers, which keep only this rank's slice.

    Layers that get the result, or a function of it, are made with `input_is_entered=True`: queries, keys and
    values, or a gate and its values, then share their input, whose gradient is summed once.

    Args:
        tensor: The same on all ranks; with sequence parallelism this rank's slice, as long on each of them.
        group: The ranks; None means all.
        sequence_parallel: Whether the tensor is a slice of the sequence.
        sequence_dim: Dimension of the sequence.

    Raises:
        DimensionError: `sequence_dim` is out of range.
        ValueError: The ranks' slices are not of the same length.
    """
    group = chosen_group(group)
    check_flags(sequence_parallel=sequence_parallel)
    dim = wrap_dim(sequence_dim, tensor.dim()) if sequence_parallel else None
    if group.size == 1:
        return tensor
    if dim is None:
        return autograd.copy(tensor, group) if is_differentiated(tensor) else tensor
    full = apply(_GatherSequence, tensor, group, dim)
    InputGather(group, dim).mark(full, tensor)
    return full


def leave(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    bias: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """End a region: return the sum over the ranks, with sequence parallelism this rank's slice of it; collective.

    Backward is local, or one all-gather. The gradient of `bias` is complete on all ranks without further messages.

    Args:
        tensor: This rank's summand, of the same shape on all ranks.
        group: The ranks; None means all.
        sequence_parallel: Whether to return a slice of the sequence.
        sequence_dim: Dimension of the sequence.
        bias: [tensor.shape[-1]] the same on all ranks, added once.
        in_place: Whether the tensor's memory may be used for the result; the tensor must not be used afterwards.

    Raises:
        DimensionError: `sequence_dim` is out of range.
        ValueError: The sequence cannot be divided.
    """
    group = chosen_group(group)
    check_flags(sequence_parallel=sequence_parallel, in_place=in_place)
    dim = check_sequence(tensor.shape, group, sequence_dim) if sequence_parallel else None
    if group.size == 1:
        return tensor if bias is None else tensor + bias
    return sum_parts(tensor, bias, group, dim, in_place=in_place)


def sum_parts(
    tensor: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int | None, *, in_place: bool
) -> Tensor:
    """End a region of several ranks, as `leave` does, without checks; collective.

    Args:
        tensor: This rank's summand.
        bias: [tensor.shape[-1]] or None.
        group: The ranks.
        dim: Dimension that is cut into slices; None for the full sum.
        in_place: Whether the tensor's memory may be used.
    """
    if dim is None and (not in_place or tensor._is_view()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return apply(_LeaveRegion, tensor, bias, group, dim)


def split_sequence(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """Return this rank's slice of the sequence; local, and backward is one all-gather.

    Args:
        tensor: The same on all ranks.
        group: The ranks; None means all.
        dim: Dimension of the sequence.

    Raises:
        DimensionError: `dim` is out of range.
        ValueError: The sequence cannot be divided.
    """
    group = chosen_group(group)
    dim = check_sequence(tensor.shape, group, dim)
    if group.size == 1:
        return tensor
    return cut(tensor, group, Shard.even(dim, tensor.shape[dim], group.size))


def join_sequence(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """Return the full sequence, for a computation that is the same on all ranks; one all-gather, local backward.

    Args:
        tensor: This rank's slice, of the same shape on all ranks.
        group: The ranks; None means all.
        dim: Dimension of the sequence.

    Raises:
        DimensionError: `dim` is out of range.
        ValueError: The ranks' slices are not of the same length.
    """
    group = chosen_group(group)
    dim = wrap_dim(dim, tensor.dim())
    if group.size == 1:
        return tensor
    return join(tensor, group, Shard.even(dim, tensor.shape[dim] * group.size, group.size))


def cut(tensor: Tensor, group: ProcessGroup, shard: Shard) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have; local, and backward is one all-gather.

    Args:
        tensor: The same on all ranks.
        group: The ranks.
        shard: The shards of the dimension that is cut.
    """
    return apply(_CutShard, tensor, group, shard)


def join(tensor: Tensor, group: ProcessGroup, shard: Shard) -> Tensor:
    """Return the full tensor, for a computation that is the same on all ranks; one all-gather, backward is local.

    Args:
        tensor: This rank's shard.
        group: The ranks.
        shard: The shards of the dimension that is cut.
    """
    return apply(_JoinShards, tensor, group, shard)


def shared(tensors: Sequence[Tensor], group: ProcessGroup | Backend) -> list[Tensor]:
    """Return the tensors; backward sums their gradients over the ranks, in one all-reduce for each dtype.

    For replicated parameters that each rank uses with its own slice of the data.

    Args:
        tensors: Any shapes; tensors that need no gradient are returned as they are. If backward reaches only some
            tensors, the gradients of the others count as zeros.
        group: The ranks.
    """
    differentiated = [tensor for tensor in tensors if is_differentiated(tensor)]
    if group.size == 1 or not differentiated:
        return list(tensors)
    sharing: type[Function] = _SharedParameters
    results = iter(sharing.apply(group, *differentiated))
    return [next(results) if is_differentiated(tensor) else tensor for tensor in tensors]


def check_sequence(shape: Sequence[int], group: ProcessGroup, dim: int) -> int:
    """Raise unless a sequence can be divided, and return its dimension, from 0; local.

    Raises:
        DimensionError: `dim` is out of range.
        ValueError: The length is no multiple of the number of ranks.
    """
    dim = wrap_dim(dim, len(shape))
    if shape[dim] % group.size:
        raise ValueError(
            f"expected a sequence whose length is a multiple of the {group.size} ranks of the group, got "
            f"{shape[dim]} (dim {dim} of shape {list(shape)}) on rank {group.rank}; pad it"
        )
    return dim


class _GatherSequence(Function):
    """This rank's slice of the sequence -> the full sequence, for computations that differ on the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.options = group, dim
        return gathered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return autograd.reduce_scatter(grads[0], *ctx.options), None, None


class _LeaveRegion(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int | None) -> Tensor:
        ctx.group, ctx.dim = group, dim
        if dim is None:
            group.all_reduce(tensor, ReduceOp.SUM)
            ctx.mark_dirty(tensor)
            result = tensor
        else:
            result = group.reduce_scatter(tensor, ReduceOp.SUM, dim)
        return result if bias is None else result.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, group, dim = grads[0], ctx.group, ctx.dim
        if torch.is_grad_enabled():  # gradients of gradients are wanted
            parts = autograd.copy(grad, group) if dim is None else autograd.all_gather(grad, group, dim)
            full = grad if dim is None else autograd.gather(grad, group, dim)
        else:
            parts = full = grad if dim is None else gathered(grad, group, dim)
        of_bias = full.reshape(-1, full.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return parts, of_bias, None, None


class _JoinShards(Function):
    """This rank's shard of one dimension -> the full tensor, for a computation that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, shard: Shard) -> Tensor:
        ctx.options = group, shard
        full = gathered(tensor, group, shard.dim)
        return full if shard.is_plain else shard.join(full.tensor_split(group.size, shard.dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return apply(_CutShard, grads[0], *ctx.options), None, None


class _CutShard(Function):
    """The full tensor, the same on all ranks -> this rank's shard of one dimension; transpose of `_JoinShards`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, shard: Shard) -> Tensor:
        ctx.options = group, shard
        return shard.cut(tensor, group.rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return apply(_JoinShards, grads[0], *ctx.options), None, None


class _SharedParameters(Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | Backend, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        summing: type[Function] = _SumOverRanks
        return None, *summing.apply(ctx.group, *grads)


class _SumOverRanks(Function):
    """The sums over the ranks of several tensors, in one all-reduce for each dtype."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | Backend, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        sums: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[index].reshape(-1) for index in chosen])
            group.all_reduce(flat, ReduceOp.SUM)
            parts = flat.split([tensors[index].numel() for index in chosen])
            sums |= {index: part.view(tensors[index].shape) for index, part in zip(chosen, parts, strict=True)}
        return tuple(sums[index] for index in range(len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *shared(grads, ctx.group)
