"""Dtypes and reductions of NCCL, and substitutes for those that it does not have.

    dtype                                          sent as                reduced as
    float16 32 64, bfloat16, int8 32 64,           itself                 itself
    uint8 32 64, float8_e4m3fn, float8_e5m2
    bool                                           bytes                  bytes: MAX for or, MIN for and
    complex64, complex128                          bytes                  twice as many real numbers
    int16, uint16, complex32, other float8         bytes                  int32, complex64, float32, and back

Products of complex numbers and bitwise reductions are computed here from all ranks' tensors, in rank order. Sums of
16-bit and 8-bit floats are rounded at each step on the way, other than on the CPU.

Source: ncclDataType_t and ncclRedOp_t, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...types import ReduceOp

_NATIVE_NAMES = (
    *("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2"),
)
NATIVE = frozenset(getattr(torch, name) for name in _NATIVE_NAMES)
"""Dtypes that NCCL knows."""

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.complex32: torch.complex64,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.AVERAGE: "AVG",
}
_LOGICAL = {ReduceOp.SUM: "MAX", ReduceOp.MAX: "MAX", ReduceOp.PRODUCT: "MIN", ReduceOp.MIN: "MIN"}


def is_native_reduction(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return True if NCCL can reduce tensors of a dtype, seen as `reducible_view` shows them; local."""
    return op in _OPS and not (dtype.is_complex and op is ReduceOp.PRODUCT)


def reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors are reduced; local."""
    return _WIDER.get(dtype, dtype)


def reducible_view(tensor: Tensor) -> Tensor:
    """Return contiguous memory of a dtype that `reduced_dtype` gives as one that NCCL reduces; local."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def nccl_op(core: Any, dtype: torch.dtype, op: ReduceOp, ranks: int) -> Any:
    """Return NCCL's name of a reduction of tensors of a dtype, in a group of so many ranks; local."""
    if ranks == 1:
        op = ReduceOp.SUM  # the same result, and NCCL refuses the average of float8 on one rank
    return core.NcclRedOp[(_LOGICAL if dtype is torch.bool else _OPS)[op]]


def bytes_or_native(tensor: Tensor) -> Tensor:
    """Return contiguous memory as one that NCCL can copy; local."""
    return tensor if tensor.dtype in NATIVE else as_bytes(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is contiguous memory in the order of its elements, with their values; local."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_memory(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, such that its contiguous memory has its values: NCCL sees no views; local."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return contiguous memory as bytes; local."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one element, any stride is contiguous
