"""torch's reductions as this library's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch import distributed as dist

from ..types import ReduceOp

__all__ = ["Factor", "reduction_of", "scale", "scaled"]

Factor = float | Tensor | None
"""What PREMUL_SUM multiplies each rank's values by before they are added; None: nothing."""

_PREMUL_SUM = dist.ReduceOp.PREMUL_SUM
_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
    _PREMUL_SUM: ReduceOp.SUM,
}


def reduction_of(op: Any) -> tuple[ReduceOp, Factor]:
    """Return the reduction, and the factor that values are multiplied by before; local.

    Args:
        op: A `torch.distributed.ReduceOp`.
    """
    kind = op.op
    return _OPS[kind], op.__getstate__()[1] if kind == _PREMUL_SUM else None


def scaled(tensor: Tensor, factor: Factor) -> Tensor:
    """Return a tensor times the factor, the tensor itself without one; local."""
    return tensor if factor is None else (tensor * factor).to(tensor.dtype)


def scale(tensors: Iterable[Tensor], factor: Factor) -> None:
    """Multiply tensors by the factor, in place, if there is one; local."""
    if factor is not None:
        for tensor in tensors:
            tensor.copy_(tensor * factor)
