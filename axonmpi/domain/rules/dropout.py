"""Rules of dropout and of random tensors: masks do not depend on the number of ranks.

Each rank draws one number from the default CPU generator, as many as the others, and rank 0's counts. A number
and a block's place seed the generator of the block. A rank draws the blocks that overlap its part:

    rows 0 to 95 | 96 to 191       blocks along a dimension that one axis cuts, at most 192
    dims by two axes or more       a grid of at most 24 blocks along each

So default generators that are in step on all ranks stay in step. They have to be: tensors that no axis cuts are
dropped by torch itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.partition import split_bounds
from ...wrapping.seeds import block_seed, draw_number
from ..domain_tensor import DomainTensor, composed, made, rule
from ..layout import Layout, bounds, part_shape
from .functions import named

_BLOCKS, _BLOCKS_OF_GRIDS = 192, 24
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_LEAST = -1.7580993408473766
"""The limit of `selu` towards −∞."""
_SPATIAL_DIMS = {functional.dropout1d: 1, functional.dropout3d: 3}
"""Dimensions of a channel; other functions of channels have the channels in dimension 1."""


@composed(*(getattr(functional, name) for name in _DROPOUTS.split()))
def _dropout(func: Any, input: DomainTensor, *, p: float, training: bool, inplace: bool = False) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"{func.__name__}: expected a probability from 0 to 1, got {p}")
    if not training or p == 0:
        return input
    # Elements with the same index along the first dimensions are dropped together.
    count = {functional.dropout: 0, functional.alpha_dropout: 0}.get(func, input.dim() - 2)
    count = input.dim() - _SPATIAL_DIMS.get(func, count)
    whole = Layout(tuple(dim if number < count else () for number, dim in enumerate(input.whole.dims)))
    kept = _drawn(input, whole, input.dtype, partial(Tensor.bernoulli_, p=1 - p))
    # Dropped elements become `least`; then all are scaled to the variance that they had, or else to the mean.
    is_alpha = "alpha" in func.__name__
    least = _LEAST if is_alpha else 0.0
    scale = 0.0 if p == 1 else ((1 - p) * (1 + p * least**2)) ** (-0.5 if is_alpha else -1)
    result = input.mul_(kept * scale) if inplace else input * (kept * scale)
    return result.add_((1 - kept - p) * (least * scale)) if is_alpha else result


rule(torch.rand_like)(lambda func, x, dtype=None: _drawn(x, x.whole, dtype or x.dtype, Tensor.uniform_))
rule(torch.randn_like)(lambda func, x, dtype=None: _drawn(x, x.whole, dtype or x.dtype, Tensor.normal_))
composed(*named("bernoulli"))(
    lambda func, x, p=None: (torch.rand_like(x, dtype=torch.float64) < (x if p is None else p)).to(x.dtype)
)


def _drawn(x: DomainTensor, whole: Layout, dtype: torch.dtype, fill: Callable[..., object]) -> Tensor:
    """Return a random tensor, the same whatever the number of ranks; collective over `x`'s axes.

    Args:
        x: A tensor of the ranks.
        whole: The layout of the random tensor.
        dtype: Its dtype.
        fill: Fills a block in place, by a generator.
    """
    control = x.mesh.group(*x.whole.axes).backend.control
    number = torch.tensor(draw_number(None), device=control.place)
    control.broadcast(number, 0)
    generator, factors = torch.Generator(x.device), [factor for dim in whole.dims for factor in dim]
    most = _BLOCKS if len(whole.axes) == 1 else _BLOCKS_OF_GRIDS
    own = [bounds(x.mesh, factor) for factor in factors]
    grid = [split_bounds(factor.size, min(max(factor.size, 1), most) if factor.axis else 1) for factor in factors]
    result = torch.empty([high - low for low, high in own], dtype=dtype, device=x.device)
    for place, ranges in enumerate(itertools.product(*grid)):
        common = [range(max(a, low), min(b, high)) for (a, b), (low, high) in zip(ranges, own, strict=True)]
        if all(common):
            block = torch.empty([b - a for a, b in ranges], dtype=dtype, device=x.device)
            fill(block, generator=generator.manual_seed(block_seed(int(number), place)))
            target, taken = (
                tuple(slice(rows.start - a, rows.stop - a) for rows, (a, _) in zip(common, starts, strict=True))
                for starts in (own, ranges)
            )
            result[target] = block[taken]
    return made(result.view(part_shape(x.mesh, whole)), whole, x.mesh)
