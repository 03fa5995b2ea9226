"""Rules of resampling and of pools with given output sizes.

cut dimension       a rank fetches the rows of its outputs, and adds them up with their weights
other dimension     torch's own function
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.partition import split_bounds
from ...utils.torch_internals import written_out
from ..domain_tensor import DomainTensor, as_domain_tensor, composed, rule
from ..layout import Factor
from ..movement import fetched
from ..window_arithmetic import Resample
from .along import along
from .functions import each, named
from .reductions import WIDE
from .windows import checked_input

_SMALL = 128
"""Height and width together up to which torch resamples images by another kernel."""
# Compiled functions, and the mode of each.
_MODES = {
    "nearest-exact": "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "linear": "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    "cubic": "upsample_bicubic2d",
    "": "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
}


composed(functional.interpolate, functional.lp_pool1d, functional.lp_pool2d, functional.lp_pool3d)(
    lambda func, *args, **options: written_out(func)(*args, **options)
)


def _upsample(func: Any, input: DomainTensor, output_size: Any, *options: Any, mode: str) -> Any:
    *corners, factors = options
    shape = input.whole.shape[2:]
    sizes = output_size or [int(n * factor) for n, factor in zip(shape, factors, strict=True)]
    spatial = list(range(2, len(sizes) + 2))
    if not mode or not input.is_floating_point() or min(*shape, *sizes) < 1:
        return along(input, spatial, lambda part: func(part, output_size, *options))
    x = checked_input(func, input, len(sizes), channels_are_cut=True)
    steps = dict(zip(spatial, factors or [None] * len(sizes), strict=True))
    changed = [dim for dim in spatial if x.whole.shape[dim] != sizes[dim - 2] or steps[dim] not in (None, 1)]
    # Nearest rows are picked here in all dimensions: torch would choose its kernel by the size of the part.
    own = [dim for dim in changed if mode.startswith("nearest") or x.whole.is_cut(dim)]
    small = len(sizes) == 2 and sum(sizes) <= _SMALL
    whole, part = x.whole, x.view_as(x)
    for dim in own:
        resample = Resample(mode, sizes[dim - 2], steps[dim], corners == [True], WIDE.get(x.dtype, x.dtype), small)
        part = _resampled(part, x, dim, resample)
        whole = whole.replaced({dim: [Factor(sizes[dim - 2], whole.axis_of(dim))]})
    result, rest = as_domain_tensor(part, whole, x.mesh), [dim for dim in changed if dim not in own]
    if not rest:
        return result
    scales = [steps[dim] if dim in rest else None for dim in spatial]
    size_of = {dim: sizes[dim - 2] for dim in rest}
    return along(
        result,
        rest,
        lambda part: func(part, [size_of.get(dim, part.shape[dim]) for dim in spatial], *corners, *scales),
    )


for _mode, _names in _MODES.items():
    rule(*named(_names))(partial(_upsample, mode=_mode))


def _resampled(part: Tensor, x: DomainTensor, dim: int, resample: Resample) -> Tensor:
    """Return this rank's outputs along a dimension of a part of `x`; collective if an axis cuts the dimension."""
    n, axis = x.whole.shape[dim], x.whole.axis_of(dim)
    first, (low, high) = 0, (0, resample.size(n))
    if axis is not None:
        outputs = split_bounds(high, x.mesh.size(axis))
        ranges = [resample.needs(n, low, high - 1) if low < high else (0, 0) for low, high in outputs]
        part = fetched(part, x.mesh, axis, dim, n, ranges)
        first, (low, high) = ranges[x.mesh.rank(axis)][0], outputs[x.mesh.rank(axis)]
    rows, weights = resample.sources(n, torch.arange(low, high))
    rows, weights = (rows - first).to(part.device), weights.to(part.device)
    if rows.shape[1] == 1:
        return part.index_select(dim, rows[:, 0])
    shape = [-1, *[1] * (part.dim() - dim - 1)]
    wide = part.to(weights.dtype)
    terms = [
        wide.index_select(dim, row) * weight.view(shape)
        for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True)
    ]
    return reduce(torch.add, terms).to(part.dtype)


# ---- pools ------------------------------------------------------------------------------------------------------


@composed(
    *named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    *named("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    *named("adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices"),
)
def _adaptive_pool(func: Any, input: DomainTensor, output_size: Any, *args: Any, **options: Any) -> Any:
    average, count = "avg" in func.__name__, int(func.__name__.split("_pool")[1][0])
    first = len(input.whole.dims) - count
    shape = input.whole.shape[first:]
    sizes = [n if size is None else size for n, size in zip(shape, each(output_size, count), strict=True)]
    changed = [dim for dim, (n, size) in enumerate(zip(shape, sizes, strict=True), first) if n != size]
    means = [dim for dim in changed if average and sizes[dim - first] == 1 and input.whole.is_cut(dim)]
    if means:
        return func(torch.mean(input, means, keepdim=True), sizes)
    dims = changed if average else list(range(first, first + count))  # indices of maxima count the whole's rows
    size_of = {dim: sizes[dim - first] for dim in dims}
    spatial = range(first, first + count)
    return along(
        input, dims, lambda part: func(part, [size_of.get(d, part.shape[d]) for d in spatial], *args, **options)
    )
