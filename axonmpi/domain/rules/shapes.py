"""Rules of functions that give a tensor another shape: reshapes, permutations, repetitions.

Merging, splitting, and permuting dimensions move nothing, because a dimension is a product of factors. Rows move if
a cut factor is divided, as in Swin's windows. Torch's own function, called with tensors without data, gives the
shape of a result, and its errors on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...utils.torch_internals import plain_tensors
from ..domain_tensor import CopiedRows, DomainTensor, as_domain_tensor, composed, made, refused, rule
from ..layout import Dim, Factor, Layout, part_shape, reshaped
from ..movement import dealt, gathered, layout_of
from .functions import named, properties


def without_data(args: Any) -> Any:
    """Return arguments with tensors that have the whole's shape, but no data; local."""
    if isinstance(args, Tensor):
        return torch.empty(layout_of(args).shape, dtype=args.dtype, device="meta")
    return type(args)(map(without_data, args)) if type(args) in (list, tuple) else args


def result_of(func: Any, *args: Any, **options: Any) -> Any:
    """Return a function's result for tensors that have the whole's shape, but no data; local."""
    return func(*without_data(args), **{name: without_data(value) for name, value in options.items()})


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor in another shape; collective if a cut factor is divided.

    If a new dimension ends in the middle of a cut factor, which it does not divide, the parts are gathered.
    """
    found, mark = None, False
    while isinstance(x, DomainTensor) and (found := reshaped(x.whole, shape)) is None:
        x, mark = gathered(x, x.whole.axes[-1:]), True
    if not isinstance(x, DomainTensor) or found is None:
        return x.reshape(shape)
    before, after = found
    for dim, factors in enumerate(before.dims):
        if factors != x.whole.dims[dim]:
            x, mark = cast(DomainTensor, dealt(x, dim, factors)), True  # a cut factor is divided in two
    result = as_domain_tensor(
        unshared(x.reshape(part_shape(x.mesh, after)), x, partial(Tensor.reshape, shape=shape)), after, x.mesh
    )
    result.is_copy = mark
    return result


def unshared(part: Tensor, x: DomainTensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function's result of a part, copied if the whole's result would not share memory with `x`; local.

    They differ if the part has one row of several: then more permutations of it are contiguous.
    """
    if all(own > 1 or own == size for own, size in zip(x.shape, x.whole.shape, strict=True)):
        return part
    order = sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
    like = torch.empty([x.whole.shape[dim] for dim in order], device="meta")
    return part if function(like.permute([*map(order.index, range(x.dim()))]))._is_view() else part.clone()


def as_view(result: Tensor, x: Tensor) -> Tensor:
    """Return a result that torch gives as a view of `x`, marked if it is a copy; local."""
    shares = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    is_copy = any(getattr(each, "is_copy", False) for each in (result, x)) or (result.numel() > 0 and not shares)
    if isinstance(result, DomainTensor):
        result.is_copy = is_copy
        return result
    return Tensor.as_subclass(result, CopiedRows) if is_copy else result


@rule(*named("reshape reshape_as flatten ravel"))
def _reshape(func: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return reshape(x, result_of(func, x, *args, **options).shape)


rule(*named("contiguous"))(
    lambda func, x, **options: made(unshared(func(x, **options), x, partial(func, **options)), x.whole, x.mesh)
)


@rule(*named("view view_as unflatten squeeze"))
def _view(func: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    if any(isinstance(value, torch.dtype) for value in (*args, *options.values())):
        raise refused(func, "would give elements another dtype", x)
    return as_view(_reshape(func, x, *args, **options), x)


@rule(*named("permute transpose t movedim moveaxis swapaxes swapdims adjoint unsqueeze"), *properties("T mT H mH"))
def _permute(func: Any, x: DomainTensor, *args: Any, **options: Any) -> Tensor:
    # Dimension d of a tensor of shape [2, 3, 4 ...] has size d + 2 wherever it goes; new ones have size 1.
    sizes = func(torch.empty(tuple(range(2, len(x.whole.dims) + 2)), device="meta"), *args, **options).shape
    whole = Layout(tuple(x.whole.dims[size - 2] if size > 1 else () for size in sizes))
    return as_view(made(func(x, *args, **options), whole, x.mesh), x)


@composed(torch.view_as_real, torch.view_as_complex)
def _pairs(func: Any, x: DomainTensor) -> Tensor:
    numbers = torch.stack([x.real, x.imag], -1) if func is torch.view_as_real else torch.complex(*x.unbind(-1))
    with plain_tensors():
        return as_view(numbers, x)


# ---- repetitions ------------------------------------------------------------------------------------------------


@rule(*named("expand expand_as broadcast_to"))
def _expand(func: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    shape = result_of(func, x, *args, **options).shape
    if not isinstance(x, DomainTensor):
        return x.expand(shape)
    mesh, offset = x.mesh, len(shape) - len(x.whole.dims)
    same = [dim for dim, size in enumerate(x.whole.shape, offset) if size == shape[dim]]
    x = gathered(x, [axis for axis in x.whole.axes if x.whole.dim_of(axis) + offset not in same])
    dims = layout_of(x).dims
    whole = Layout.of(dims[dim - offset] if dim in same else (Factor(size),) for dim, size in enumerate(shape))
    return made(x.expand(part_shape(mesh, whole)), whole, mesh)


@composed(*named("broadcast_tensors"))
def _broadcast_tensors(func: Any, *tensors: Tensor) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [tensor if tensor.shape == shape else tensor.expand(shape) for tensor in tensors]


@rule(*named("repeat tile"))
def _repeat(func: Any, x: DomainTensor, *args: Any, **options: Any) -> Tensor:
    counts = func(torch.empty([1] * len(x.whole.dims), device="meta"), *args, **options).shape
    dims: list[Dim] = [()] * (len(counts) - len(x.whole.dims)) + list(x.whole.dims)
    whole = Layout.of((Factor(count), *dim) for count, dim in zip(counts, dims, strict=True))
    return made(func(x, *args, **options), whole, x.mesh)


@rule(*named("repeat_interleave"))
def _repeat_interleave(
    func: Any, x: DomainTensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if not isinstance(repeats, int) or dim is None:
        raise refused(func, "repeats elements by different numbers, or without `dim`", x, repeats)
    dim %= result_of(func, x, repeats, dim).dim()
    whole = x.whole.replaced({dim: (*x.whole.dims[dim], Factor(repeats))})
    return made(func(x, repeats, dim), whole, x.mesh)


# ---- pixels and channels ----------------------------------------------------------------------------------------


@composed(*named("pixel_shuffle"))
def _pixel_shuffle(func: Any, x: Tensor, upscale_factor: int) -> Tensor:
    shape, r = result_of(func, x, upscale_factor).shape, upscale_factor
    opened = x.reshape(*shape[:-2], r, r, *x.shape[-2:])
    return opened.permute(*range(len(shape) - 2), -2, -4, -1, -3).reshape(shape)


@composed(*named("pixel_unshuffle"))
def _pixel_unshuffle(func: Any, x: Tensor, downscale_factor: int) -> Tensor:
    shape, r = result_of(func, x, downscale_factor).shape, downscale_factor
    opened = x.reshape(*x.shape[:-2], shape[-2], r, shape[-1], r)
    return opened.permute(*range(len(shape) - 2), -3, -1, -4, -2).reshape(shape)


@composed(*named("channel_shuffle native_channel_shuffle"))
def _channel_shuffle(func: Any, x: Tensor, groups: int) -> Tensor:
    if x.shape[1] % groups:
        raise RuntimeError(f"channel_shuffle: expected channels that {groups} groups divide, got {x.shape[1]}")
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
