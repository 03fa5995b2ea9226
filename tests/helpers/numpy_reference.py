"""What collectives have to give: known values of every dtype, and their reduction by numpy.

Any rank can make the values of all others, so that each rank compares its result with numpy by itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axonmpi import ReduceOp

Shape = tuple[int, ...]

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if hasattr(torch, name)
)
"""What the docs say that collectives take."""

WIDE_SUM = {
    dtype
    for dtype in DTYPES
    if dtype.itemsize <= 2 * (1 + dtype.is_complex) and (dtype.is_floating_point or dtype.is_complex)
}
"""Dtypes whose reductions are made in a wider one and rounded once: 8 and 16 bits for each real number."""

UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def reductions(dtype: torch.dtype) -> list[ReduceOp]:
    """The reductions that a dtype allows."""
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVERAGE]
    others = [ReduceOp.AVERAGE] if dtype.is_floating_point else _BITWISE
    return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *others]


@functools.lru_cache(maxsize=512)
def values(dtype: torch.dtype, shape: Shape, owner: int, seed: int) -> Tensor:
    """What world rank `owner` contributes; integers over their whole range. Shared: copy before changing it."""
    generator = np.random.default_rng([seed, owner, DTYPES.index(dtype), *shape])
    if dtype is torch.bool:
        return torch.from_numpy(np.asarray(generator.random(shape) < 0.5))
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        kind = str(dtype).removeprefix("torch.")
        return torch.from_numpy(np.asarray(generator.integers(limits.min, limits.max, shape, kind, endpoint=True)))
    numbers = generator.standard_normal(shape)
    if dtype.is_complex:
        numbers = numbers + 1j * generator.standard_normal(shape)
    return torch.from_numpy(np.asarray(numbers)).to(dtype)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values without rounding: integers as they are, the others in 64 bits for each real number."""
    tensor = tensor.cpu()
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).resolve_conj().numpy()
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).resolve_neg().numpy()


@dataclass(frozen=True)
class Expected:
    """A result and how far from it rounding may lead."""

    dtype: torch.dtype
    value: np.ndarray
    tolerance: np.ndarray

    def difference(self, got: Tensor) -> str | None:
        """Say what is wrong with a result, if anything."""
        if (got.dtype, tuple(got.shape)) != (self.dtype, self.value.shape):
            return f"{got.dtype} {tuple(got.shape)}, expected {self.dtype} {self.value.shape}"
        away = np.asarray(to_numpy(got) != self.value)
        if self.tolerance.any():
            away = np.asarray(~(np.abs(to_numpy(got) - self.value) <= self.tolerance))
        if not away.any():
            return None
        where = tuple(int(index[0]) for index in np.nonzero(away)) if away.ndim else ()
        return f"at {where}: got {to_numpy(got)[where]}, expected {self.value[where]} ({away.sum()} are wrong)"

    def slice(self, parts: int, dim: int, index: int) -> Expected:
        """One of the parts that `torch.tensor_split` makes."""
        value, tolerance = (np.array_split(array, parts, dim)[index] for array in (self.value, self.tolerance))
        return Expected(self.dtype, value, tolerance)


@functools.lru_cache(maxsize=512)
def reduced(
    dtype: torch.dtype,
    shape: Shape,
    owners: tuple[int, ...],
    seed: int,
    op: ReduceOp,
    *,
    rounds_each_step: bool = False,
) -> Expected:
    """The reduction of what the owners contribute: exact for integers and choices, else in a wider type.

    `rounds_each_step`: small floats are rounded at each step on the way, as NCCL does, and not once at the end.
    """
    parts = [to_numpy(values(dtype, shape, owner, seed)) for owner in owners]
    if dtype is torch.bool and op not in _BITWISE:
        combine = np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
        return _exactly(dtype, functools.reduce(combine, parts))
    if not (dtype.is_floating_point or dtype.is_complex) or op in (ReduceOp.MIN, ReduceOp.MAX):
        return _exactly(dtype, functools.reduce(UFUNCS[op], parts))
    widest = {torch.float64: np.longdouble, torch.complex128: np.clongdouble}
    wide = [part.astype(widest.get(dtype, part.dtype)) for part in parts]
    value = functools.reduce(UFUNCS[op], wide)
    magnitude = functools.reduce(UFUNCS[op], [np.abs(part) for part in wide])
    if op is ReduceOp.AVERAGE:
        value, magnitude = value / len(parts), magnitude / len(parts)
    tolerance = _rounding(dtype, len(parts), np.abs(value), magnitude, rounds_each_step)
    return Expected(dtype, np.asarray(value), np.asarray(tolerance))


def identity(dtype: torch.dtype, shape: Shape, op: ReduceOp) -> Tensor:
    """What a reduction of no tensors is: of MIN and MAX, of which there is no such number, the outermost ones."""
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return torch.full(shape, float(op is ReduceOp.PRODUCT)).to(dtype)
    if dtype is torch.bool:
        return torch.full(shape, op is ReduceOp.MIN)
    if dtype.is_floating_point:
        limits = torch.tensor([-torch.inf, torch.inf]).to(dtype).float()
        info = torch.finfo(dtype)
        ends = [info.min, info.max] if limits.isnan().any() else limits.tolist()
        return torch.full(shape, ends[op is ReduceOp.MIN]).to(dtype)
    ends = [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    return torch.tensor(ends[op is ReduceOp.MIN], dtype=dtype).expand(shape).clone()


def _exactly(dtype: torch.dtype, value: np.ndarray) -> Expected:
    return Expected(dtype, np.asarray(value), np.zeros((1,) * np.ndim(value)))


def _rounding(
    dtype: torch.dtype, count: int, size: np.ndarray, magnitude: np.ndarray, rounds_each_step: bool
) -> np.ndarray:
    """How far rounding may lead: one unit in the last place for each step, or for the last step only."""
    info = torch.finfo(torch.float16 if dtype is torch.complex32 else dtype)
    steps = (2 * count + 1) * (2 if dtype.is_complex else 1)
    if dtype not in WIDE_SUM:
        return steps * info.eps * magnitude
    tiny = info.smallest_normal * info.eps
    at_each_step = count * (info.eps * magnitude + tiny) if rounds_each_step and count > 1 else 0.0
    return info.eps * size + tiny + steps * 2.0**-23 * magnitude + at_each_step


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, not-a-numbers included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # The sign first: torch 2.11 loses it where it copies a negated view from a GPU.
    first, second = (torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1).resolve_neg()) for t in (a, b))
    return not len(first) or torch.equal(first.view(torch.uint8), second.view(torch.uint8))
