"""The arithmetic of each `ReduceOp` on the CPU: tensors of all ranks combined in rank order.

Every backend reduces with the functions below, so that all of them give the same bits: the parts are taken in
the order of the ranks, one after the other, and 16-bit and 8-bit floating-point types accumulate in
float32 (complex32 in complex64) and are rounded once, at the end.

    fold      total = (((part[0] ∘ part[1]) ∘ part[2]) ∘ …)      ∘ = + · min max & | ^
    finish    out = total, rounded; of AVERAGE total / ranks     an average is a sum until then

A reduction of no tensors at all is the identity of its operation: 0, 1, the largest value, the smallest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DtypeError
from ..types import ReduceOp
from ..utils.arguments import member
from ..utils.cache import BoundedCache
from ..utils.device import device_at
from .tuning import MAX_PLANS, WIDE_ELEMENTS

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *_FLOAT8,
)

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES if hasattr(torch, name))
"""Every dtype that backends carry; the position in the tuple is the dtype's number on the wire."""

_ACCUMULATE_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{getattr(torch, name): torch.float32 for name in _FLOAT8 if hasattr(torch, name)},
}
_WITHOUT_INFINITY = {getattr(torch, name) for name in _FLOAT8 if name != "float8_e5m2" and hasattr(torch, name)}
_ROUNDED_ONCE = (torch.float16, torch.bfloat16)
"""Torch computes a single operation on two of these in float32 and rounds the result: the same bits."""
_thread = threading.local()
_SIGNED_TWIN = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FEW_ROWS = 16
"""Up to so many tensors are reduced by a call of torch for each; numpy's one call takes a copy and a conversion."""
_IN_NUMPY = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BINARY: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_LOGICAL = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), torch.logical_or),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), torch.logical_and),
    ReduceOp.BXOR: torch.logical_xor,
}


def check_reducible(dtype: torch.dtype, op: object) -> None:
    """Raise unless tensors of `dtype` can be reduced with `op`.

    Raises:
        TypeError: `op` is no `ReduceOp`.
        DtypeError: the dtype is unknown, unordered (MIN, MAX), integral (AVERAGE) or not (BAND, BOR, BXOR).
    """
    if not isinstance(op, ReduceOp):
        op = member("op", ReduceOp, op)
    if dtype not in DTYPES:
        raise DtypeError(f"cannot reduce tensors of dtype {dtype}; convert them first, to float32 for example")
    if op is ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(
            f"ReduceOp.AVERAGE needs a floating-point or complex tensor, got {dtype}; "
            "convert it with .float() or use ReduceOp.SUM"
        )
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"ReduceOp.{op.name} needs an integer or bool tensor, got {dtype}")
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise DtypeError(f"ReduceOp.{op.name} needs an ordered dtype, got {dtype}; reduce .abs() or .real")


def reduce_in_rank_order(parts: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Reduce `parts` (one tensor a rank, in rank order) into `out`; local.

    Args:
        parts: Tensors of the shape and dtype of `out`; none of them shares memory with `out`. Of none at all, `out`
            gets the identity of SUM, PRODUCT, MIN or MAX.
        op: A reduction that `check_reducible` allows for the dtype.
        out: Overwritten with the result; any strides.
    """
    choose_reduction(out.dtype, op, len(parts)).run(parts, out)


class Reduction(NamedTuple):
    """How tensors of one dtype and a number of ranks are reduced.

    Attributes:
        run: Called with the parts, one a rank in rank order, and the memory for the result.
        in_place: Whether the result may overwrite one of the parts.
    """

    run: Callable[[Sequence[Tensor], Tensor], None]
    in_place: bool


@cache
def choose_reduction(dtype: torch.dtype, op: ReduceOp, ranks: int) -> Reduction:
    """Return how tensors of as many ranks are reduced; local. For small ones finding that out takes as long."""
    if not ranks:
        return Reduction(partial(_fill_with_identity, op=op), True)
    if dtype is torch.bool:
        return Reduction(partial(_fold, binary=_LOGICAL[op]), ranks == 2)
    if dtype in _SIGNED_TWIN:
        return Reduction(partial(_reduce_unsigned, op=op, signed=_SIGNED_TWIN[dtype]), False)
    is_rounded_once = ranks == 2 and dtype in _ROUNDED_ONCE and op is not ReduceOp.AVERAGE
    if dtype in _ACCUMULATE_IN and not is_rounded_once:
        return Reduction(partial(_reduce_wide, op=op, wide=_ACCUMULATE_IN[dtype]), False)
    binary = partial(_fold, binary=_binary(dtype, op))
    return Reduction(partial(_average, combine=binary) if op is ReduceOp.AVERAGE else binary, ranks == 2)


def reduce_wide_into(parts: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Reduce `parts` as `reduce_in_rank_order` does, but leave the result in the dtype of the sums; local.

    Args:
        parts: One tensor a rank, in rank order.
        op: The reduction.
        out: Overwritten with the result; of the parts' dtype, or of the wider one that sums are taken in.
    """
    if out.dtype == parts[0].dtype:
        reduce_in_rank_order(parts, op, out)
    else:
        fold(parts, op, out)
        finish(out, op, len(parts), out)


def sum_of(op: ReduceOp) -> ReduceOp:
    """Return the reduction before `finish`: the sum for an average."""
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


def fold(parts: Sequence[Tensor], op: ReduceOp, total: Tensor) -> None:
    """Reduce `parts` without rounding or division, which `finish` adds; local.

    Args:
        parts: Tensors of one shape, in the order in which they are combined.
        op: The reduction.
        total: Overwritten with the result, in `wide_dtype` of the parts.
    """
    op = sum_of(op)
    if total.dtype == parts[0].dtype:
        reduce_in_rank_order(parts, op, total)
        return
    binary = _binary(total.dtype, op)
    total.copy_(parts[0])
    term = _workspace(total, total.dtype)[1] if len(parts) > 1 else total
    for part in parts[1:]:
        term.copy_(part)
        binary(total, term, out=total)


def fold_rows(rows: Tensor, op: ReduceOp, total: Tensor) -> None:
    """Fold the rows of a contiguous matrix, [rows, numel]; many rows in a single call; local. See `fold`."""
    if len(rows) <= _FEW_ROWS:
        fold(rows.unbind(0), op, total)
        return
    combine, matrix = _IN_NUMPY[sum_of(op)], rows.to(total.dtype).numpy()
    if matrix.shape[1] == 1:  # numpy would add a single column in pairs
        total.copy_(torch.from_numpy(combine.accumulate(matrix, dtype=matrix.dtype)[-1]))
    else:
        combine.reduce(matrix, out=total.numpy())


def finish(total: Tensor, op: ReduceOp, ranks: int, out: Tensor) -> None:
    """Make a result of a folded sum: divide an average by the number of ranks, and round; local.

    Args:
        total: The folded values; an average is divided in place.
        op: The reduction.
        ranks: Number of ranks whose values were folded.
        out: Overwritten with the result, in its dtype; may be `total`.
    """
    if op is ReduceOp.AVERAGE:
        total.div_(ranks)
    if out is not total:
        out.copy_(total)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of `dtype` are accumulated in."""
    return _ACCUMULATE_IN.get(dtype, dtype)


def is_plain_sum(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return True if a single call of `torch.add` adds two tensors."""
    special = dtype is torch.bool or dtype.is_complex or dtype in _ACCUMULATE_IN or dtype in _SIGNED_TWIN
    return op is ReduceOp.SUM and not special


def _fill_with_identity(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Fill `out` with the value that leaves others as they are: of MIN the largest that there is."""
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        out.fill_(int(op is ReduceOp.PRODUCT))
        return
    assert op in (ReduceOp.MIN, ReduceOp.MAX), op
    if out.dtype is torch.bool:
        out.fill_(op is ReduceOp.MIN)
    elif out.dtype in _SIGNED_TWIN:  # torch cannot fill uint64 with more than int64 holds
        out.view(_SIGNED_TWIN[out.dtype]).fill_(-1 if op is ReduceOp.MIN else 0)
    elif not out.dtype.is_floating_point:
        bounds = torch.iinfo(out.dtype)
        out.fill_(bounds.max if op is ReduceOp.MIN else bounds.min)
    else:
        largest = torch.finfo(out.dtype).max if out.dtype in _WITHOUT_INFINITY else torch.inf
        out.fill_(largest if op is ReduceOp.MIN else -largest)


def _fold(parts: Sequence[Tensor], out: Tensor, binary: Callable[..., Tensor]) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    binary(parts[0], parts[1], out=out)
    for part in parts[2:]:
        binary(out, part, out=out)


def _binary(dtype: torch.dtype, op: ReduceOp) -> Callable[..., Tensor]:
    """Return the function that combines two tensors."""
    return _add_complex if dtype.is_complex and _BINARY[op] is torch.add else _BINARY[op]


def _add_complex(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
    """Add real and imaginary parts: `torch.add` computes `first + 1 * second`, NaN for an infinite `second`."""
    parts = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if out.is_conj():
        return out.copy_(torch.view_as_complex(torch.add(*parts)))
    return torch.add(*parts, out=torch.view_as_real(out))


def _average(parts: Sequence[Tensor], out: Tensor, combine: Callable[[Sequence[Tensor], Tensor], None]) -> None:
    combine(parts, out)
    finish(out, ReduceOp.AVERAGE, len(parts), out)


def _reduce_wide(parts: Sequence[Tensor], out: Tensor, op: ReduceOp, wide: torch.dtype) -> None:
    if out.numel() > WIDE_ELEMENTS and out.dim() and out.shape[0] > 1:
        rows = max(1, WIDE_ELEMENTS * out.shape[0] // out.numel())
        for at in range(0, out.shape[0], rows):
            _reduce_wide([part[at : at + rows] for part in parts], out[at : at + rows], op, wide)
        return
    total, term = _workspace(out, wide)
    binary = _binary(wide, op)
    total.copy_(parts[0])
    for part in parts[1:]:
        term.copy_(part)
        binary(total, term, out=total)
    finish(total, op, len(parts), out)


def _workspace(out: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors of the shape of `out`, in memory that each thread keeps for this, if no stream is late."""
    if out.numel() > WIDE_ELEMENTS or device_at(out.device).is_asynchronous:
        return torch.empty_like(out, dtype=wide), torch.empty_like(out, dtype=wide)
    views: BoundedCache[Any, tuple[Tensor, Tensor]] | None = getattr(_thread, "views", None)
    if views is None:
        views = _thread.views = BoundedCache(MAX_PLANS)
        with torch.inference_mode(False):
            _thread.memory = torch.empty(2, WIDE_ELEMENTS * 8, dtype=torch.uint8, device="cpu")
    found = views.get((out.shape, wide))
    if found is None:
        with torch.inference_mode(False):
            first, second = _thread.memory[:, : out.numel() * wide.itemsize].view(wide).unbind(0)
            found = views.add((out.shape, wide), (first.view(out.shape), second.view(out.shape)))
    return found


def _reduce_unsigned(parts: Sequence[Tensor], out: Tensor, op: ReduceOp, signed: torch.dtype) -> None:
    """Torch has few kernels for these dtypes: wrap-around arithmetic is that of the signed twin."""
    twins = [part.view(signed) for part in parts]
    result = torch.empty_like(out).view(signed)
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        _fold(twins, result, _BINARY[op])
    else:
        # Flipping the sign bit maps unsigned order onto signed order.
        flip = torch.iinfo(signed).min
        _fold([twin ^ flip for twin in twins], result, _BINARY[op])
        result ^= flip
    out.copy_(result.view(out.dtype))
