"""Translation of torch's reductions into this library's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..types import ReduceOp

Factor = float | Tensor | None
"""The factor of each rank's values in a PREMUL_SUM; None for other reductions."""

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
    dist.ReduceOp.PREMUL_SUM: ReduceOp.SUM,
}
_BY_HASH = {hash(kind): op for kind, op in _OPS.items()}
"""A reduction of torch's hashes as its kind does; a lookup of the reduction itself takes ten times as long."""
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)


def reduction_of(op: Any) -> tuple[ReduceOp, Factor]:
    """Return the reduction, and the factor of each rank's values; local.

    Args:
        op: A `torch.distributed.ReduceOp`.
    """
    kind = hash(op)
    return _BY_HASH[kind], op.__getstate__()[1] if kind == _PREMUL_SUM else None


def scaled(tensor: Tensor, factor: Factor) -> Tensor:
    """Return a tensor times the factor, or the tensor itself without a factor; local."""
    return tensor if factor is None else (tensor * factor).to(tensor.dtype)


def scale(tensors: Iterable[Tensor], factor: Factor) -> None:
    """Multiply tensors by the factor, in place, if there is one; local."""
    if factor is not None:
        for tensor in tensors:
            tensor.copy_(tensor * factor)


def summed(op: ReduceOp, *tensors: Tensor) -> ReduceOp:
    """Return SUM for the AVERAGE of integers, which `divide` completes, and other reductions unchanged; local."""
    if op is ReduceOp.AVERAGE and any(map(_is_integral, tensors)):
        return ReduceOp.SUM
    return op


def divide(sums: Iterable[Tensor], op: ReduceOp, ranks: int) -> None:
    """Turn sums of integers into averages, in place, rounded towards zero, if `op` is AVERAGE; local.

    Source: NCCL, whose `ncclAvg` does so.
    """
    if op is ReduceOp.AVERAGE:
        for tensor in sums:
            if _is_integral(tensor):
                tensor.div_(ranks, rounding_mode="trunc")


def _is_integral(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
