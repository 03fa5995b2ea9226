"""Rules of normalizations: statistics over cut dimensions are the whole's.

Each rank computes the mean and variance of its part. One all-gather brings these of all ranks, which every rank
merges in float64 (Chan, Golub and LeVeque 1983): sums of squares would lose all digits of a pressure in Pa. One
all-reduce in backward adds the sums for the statistics, the weight and the bias. Running statistics are the
whole's, the same on all ranks.

    batch_norm       [N, C, ...]         a statistic for each channel
    group_norm       [1, N * C, ...]     the same function, with common statistics of neighbouring channels
    instance_norm    group_norm with a group for each channel
    layer_norm       torch's own function, or the functions that it consists of if normalized dimensions are cut
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...groups.process_group import ProcessGroup
from ...utils.torch_internals import plain_tensors, written_out
from ..domain_tensor import DomainTensor, as_domain_tensor, composed, made, part_of, refused, rule
from ..layout import Factor, Layout
from ..movement import apply, gathered
from .elementwise import beside
from .reductions import WIDE, merged, of_ranks

_CACHED = 2**17
"""Elements of an intermediate result that stay in a core's cache."""

composed(functional.batch_norm, functional.instance_norm, functional.group_norm, functional.local_response_norm)(
    lambda func, *args, **options: written_out(func)(*args, **options)
)
composed(functional.normalize)(
    lambda func, x, p, dim, eps: x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps)
)


@rule(torch.batch_norm, torch.instance_norm)
def _batch_norm(
    func: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    x = _checked(func, input, running_mean, running_var, weight, bias)
    channels = Layout(x.whole.dims[1:2])
    if not training:
        given = _beside(x, channels, x.whole.axes, running_mean, running_var, weight, bias)
        return made(_applied(x, eps, *given), x.whole, x.mesh)
    if func is torch.instance_norm and running_mean is None:
        return _group_norm(torch.group_norm, x, x.whole.shape[1], weight, bias, eps)
    if func is torch.instance_norm:
        raise refused(func, "would average running statistics over samples", input)
    affine, cut = _beside(x, channels, (), weight, bias), Layout(x.whole.dims[:1] + x.whole.dims[2:])
    result, statistics = _normalized(x, x, cut, affine, eps)
    found = as_domain_tensor(statistics, Layout(((Factor(2),), *channels.dims)), x.mesh)
    for running, new in zip((running_mean, running_var), gathered(found, channels.axes), strict=True):
        if running is not None:
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
    return result


@rule(torch.group_norm)
def _group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    x = _checked(func, input, weight, bias)
    channels = Layout(x.whole.dims[1:2])
    neighbours = torch.empty(x.whole.shape[1], device="meta").view(num_groups, -1).shape[1]  # or torch's own error
    if neighbours > 1 and channels.axes:
        raise refused(func, "has groups of channels, which are cut", x)
    own = _beside(x, channels, x.whole.axes_of(0), weight, bias)
    affine = [each if each is None else each.repeat(len(x)) for each in own]
    part, cut = x.flatten(0, 1).unsqueeze(0), Layout(x.whole.dims[2:])
    return _normalized(x, part, cut, affine, eps, neighbours)[0]


@composed(functional.layer_norm, functional.rms_norm)
def _layer_norm(
    func: Any, input: Tensor, normalized_shape: Sequence[int], *, eps: float | None, **affine: Tensor | None
) -> Tensor:
    x, dims = _checked(func, input), list(range(-len(normalized_shape), 0))
    if not any(map(x.whole.is_cut, dims)):
        with plain_tensors():
            own = _beside(x, Layout(x.whole.dims[dims[0] :]), x.whole.axes, *affine.values())
            result: Tensor = func(x, normalized_shape, eps=eps, **dict(zip(affine, own, strict=True)))
            return made(result, x.whole, x.mesh)
    if list(x.whole.shape[dims[0] :]) != list(normalized_shape):
        raise RuntimeError(f"expected the last sizes {list(normalized_shape)}, got {list(x.whole.shape)}")
    wide = x.to(WIDE.get(x.dtype, x.dtype))
    if func is functional.layer_norm:
        wide = wide - wide.mean(dims, True)
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    result = (wide * (wide.square().mean(dims, True) + small).rsqrt()).to(x.dtype)
    weight, bias = affine["weight"], affine.get("bias")
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


# ---- arguments --------------------------------------------------------------------------------------------------


def _checked(func: Any, x: Tensor, *others: Tensor | None) -> DomainTensor:
    if not isinstance(x, DomainTensor) or any(isinstance(other, DomainTensor) for other in others):
        raise refused(func, "has a weight or a statistic that is cut", x, *others)
    torch.finfo(x.dtype)  # or the error of integers, on ranks without elements as well
    return x


def _beside(x: DomainTensor, target: Layout, axes: Sequence[str], *tensors: Tensor | None) -> list[Tensor | None]:
    """Return the parts of ordinary tensors that are used with a part; None for None; collective backward.

    Args:
        x: The tensor that they meet.
        target: The layout of each.
        axes: Axes over which gradients are added.
        tensors: The tensors.
    """
    present = [each for each in tensors if each is not None]
    parts = iter(beside(x.mesh, present, [target] * len(present), axes))
    return [each if each is None else next(parts) for each in tensors]


def _applied(part: Tensor, eps: float, *given: Tensor | None) -> Tensor:
    """Return `batch_norm` by a mean, a variance, a weight and a bias; local.

    With a part of no elements, too, the weight and the bias take part in backward.
    """
    if part.numel():
        mean, variance, weight, bias = given
        return functional.batch_norm(part, mean, variance, weight, bias, False, 0.0, eps)
    return part * sum(each.sum() for each in given[2:] if each is not None)


# ---- statistics of all ranks ------------------------------------------------------------------------------------


def _normalized(
    x: DomainTensor,
    part: Tensor,
    cut: Layout,
    affine: Sequence[Tensor | None],
    eps: float,
    neighbours: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the normalized tensor, and the means and unbiased variances; collective over the axes of `cut`.

    Args:
        x: The tensor.
        part: [n, channels, ...] this rank's part; each channel has statistics of its own.
        cut: The layout of a channel's elements.
        affine: [channels] weight and bias, or None.
        eps: Added to variances.
        neighbours: The number of channels with common statistics.

    Returns:
        The tensor, and float64 [2, channels / neighbours].
    """
    part, wide = part_of(part), part.detach().to(WIDE.get(x.dtype, x.dtype))
    found = [wide.new_zeros(part.shape[1] // neighbours, dtype=torch.float64)] * 2
    if part.numel():
        opened = wide.unflatten(1, (-1, neighbours))
        found = [torch.cat(each) for each in zip(*(_statistics(*each) for each in _in_cache(opened)), strict=True)]
    variance, mean = merged(*of_ranks(x.mesh, cut, torch.stack(found)))
    both = torch.stack([mean, variance]).to(wide.dtype).repeat_interleave(neighbours, 1)
    weight, bias = (each if each is None else each.to(wide.dtype) for each in affine)
    group, count = x.mesh.group(*cut.axes) if cut.axes else None, cut.shape.numel() * neighbours
    result: Tensor = apply(_Normalized, part, weight, bias, both, group, count, neighbours, eps)
    unbiased = variance * (count / max(count - 1, 1))
    return made(result.view(x.shape), x.whole, x.mesh), torch.stack([mean, unbiased])


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float64 variances and means of dimension 1; local."""
    dims = [0, *range(2, x.dim())]
    near = x.mean(dims, keepdim=True)  # two passes take a fifth of torch.batch_norm_update_stats
    apart = x - near
    rest = apart.mean(dims).double()  # of the mean, which is rounded
    return (apart.square_().mean(dims) - rest.square()).clamp_(min=0), near.flatten() + rest


def _in_cache(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors along dimension 1 into slices whose intermediate results stay in a core's cache; local."""
    first, channels = tensors[0], tensors[0].shape[1]
    if first.is_cpu and first.is_contiguous():
        channels = max(_CACHED * channels // max(first.numel(), 1), 1)
    return zip(*(tensor.split(channels, 1) for tensor in tensors), strict=True)


class _Normalized(Function):
    """`batch_norm` in training, by statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        group: ProcessGroup | None,
        count: int,
        neighbours: int,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(part, weight, statistics)
        ctx.group, ctx.count, ctx.neighbours, ctx.eps = group, count, neighbours, eps
        return _applied(part, eps, *statistics, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part, weight, (mean, variance) = ctx.saved_tensors
        gradient, own = torch.empty_like(part), mean.new_zeros(2, len(mean))
        if part.numel():  # torch divides by zero otherwise
            _, *sums = torch.ops.aten.native_batch_norm_backward(
                grads[0], part, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
            own = torch.stack(sums)
        if ctx.group is not None:
            ctx.group.all_reduce(own)
        sums = (own if weight is None else own * weight).view(2, -1, ctx.neighbours).sum(2)
        scale = (variance + ctx.eps).rsqrt()
        slope, less = sums.repeat_interleave(ctx.neighbours, 1) * (scale / ctx.count)
        factors = mean, slope * scale, less, scale if weight is None else scale * weight
        of_channels = (each.view(1, -1, *[1] * (part.dim() - 2)) for each in factors)
        for to, grad, x, near, steep, constant, factor in _in_cache(gradient, grads[0], part, *of_channels):
            torch.mul(grad, factor, out=to).sub_((x - near).mul_(steep).add_(constant))
        affine = [each if needed else None for each, needed in zip(own, ctx.needs_input_grad[1:3], strict=True)]
        return gradient, *affine, None, None, None, None, None
