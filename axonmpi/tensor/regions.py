"""Where a region in which the ranks' activations differ begins and ends (layer 5).

    replicated ──── enter ──── each rank its own features ──── leave ──── replicated          plain
    sequence shard ─ enter ─── each rank its own features ──── leave ──── sequence shard      with sequence parallelism

    function         forward, plain     backward      with sequence parallelism     backward
    enter            nothing            sum           all-gather                    reduce-scatter
    leave            sum                nothing       reduce-scatter                all-gather
    split_sequence                                    own slice                     all-gather
    join_sequence                                     all-gather                    own slice
    shared           nothing            sum of several small tensors' gradients in one all-reduce

With sequence parallelism each rank has a slice of the sequence between regions, so that norms and dropout are computed once
and not on every rank (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import autograd
from ..backends.base import Backend
from ..backends.checks import wrap_dim
from ..group import ProcessGroup

__all__ = ["enter", "join_sequence", "leave", "shared", "split_sequence"]


def enter(
    tensor: Tensor, group: ProcessGroup, *, sequence_parallel: bool = False, sequence_dim: int = 1
) -> Tensor:
    """Begin a region: return the whole input of layers whose outputs are divided."""
    if group.size == 1:
        return tensor
    if sequence_parallel:
        return autograd.all_gather(tensor, group, sequence_dim)
    return autograd.copy(tensor, group)


def leave(
    tensor: Tensor, group: ProcessGroup, *, sequence_parallel: bool = False, sequence_dim: int = 1
) -> Tensor:
    """End a region: return the sum over the ranks, or this rank's slice of it."""
    if group.size == 1:
        return tensor
    if sequence_parallel:
        check_sequence(tensor, group, sequence_dim)
        return autograd.reduce_scatter(tensor, group, sequence_dim)
    return autograd.reduce(tensor, group)


def split_sequence(tensor: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """Return this rank's slice of the sequence; the gradients of all slices are put together in backward."""
    check_sequence(tensor, group, dim)
    return tensor if group.size == 1 else autograd.scatter(tensor, group, dim)


def join_sequence(tensor: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """Return the whole sequence, with which all ranks do the same."""
    return tensor if group.size == 1 else autograd.gather(tensor, group, dim)


def check_sequence(tensor: Tensor, group: ProcessGroup, dim: int) -> None:
    """Raise unless the sequence can be divided; local.

    Raises:
        ValueError: Its length is no multiple of the number of ranks.
    """
    dim = wrap_dim(dim, tensor.dim())
    if tensor.shape[dim] % group.size:
        raise ValueError(
            f"expected a sequence (dim {dim}) whose length is a multiple of the {group.size} ranks of the group, got "
            f"shape {list(tensor.shape)} on rank {group.rank}; pad it"
        )


def shared(tensors: Sequence[Tensor], group: ProcessGroup | Backend) -> list[Tensor]:
    """Return the tensors; backward sums the gradients of all of them over the ranks, in one all-reduce."""
    if group.size == 1 or not torch.is_grad_enabled():
        return list(tensors)
    return list(_Shared.apply(group, *tensors))


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        ctx.group.all_reduce(flat)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))
