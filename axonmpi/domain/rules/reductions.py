"""Rules of reductions over dimensions: over cut ones they are the whole's, with the ranks' different counts.

    sums, counts          added over the ranks
    products, norms       the same function of the ranks' results, which all ranks gather
    variances             merged from counts, means and squared deviations: Chan, Golub and LeVeque 1983
    largest, smallest     the largest of the ranks' values; with places, along a whole dimension

A result that no axis cuts is an ordinary tensor, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...mesh import DeviceMesh
from ...utils.torch_internals import written_out
from ..domain_tensor import DomainTensor, as_domain_tensor, composed, made, refused, rule
from ..layout import Layout, over, part_numels
from ..movement import apply, joined, total
from .along import along
from .functions import named

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which results of ranks are added, if it is not their own."""


@rule(*named("sum nansum mean"))
def _sum(
    func: Any, input: DomainTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, whole, axes = over(input.whole, dim, keepdim=keepdim)
    of_mean, wanted = func.__name__ == "mean", dtype or input.dtype
    if of_mean and not (wanted.is_floating_point or wanted.is_complex):
        raise RuntimeError(f"mean: expected a floating-point or complex dtype, got {wanted}")
    part = (torch.sum if of_mean else func)(input, dims, keepdim, dtype=WIDE.get(wanted, dtype))
    result = total(input.mesh, axes, part)
    if of_mean:
        result = result / prod(input.whole.shape[number] for number in dims)
    return made(result.to(wanted) if wanted in WIDE else result, whole, input.mesh)


composed(*named("count_nonzero"))(lambda func, x, dim=None: torch.sum(x != 0, dim))
composed(*named("nanmean"))(
    lambda func, x, dim=None, keepdim=False, **options: (
        torch.nansum(x, dim, keepdim, **options) / torch.sum(~torch.isnan(x), dim, keepdim)
    )
)


@composed(*named("logsumexp"))
def _logsumexp(func: Any, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    input = torch.add(input, 0.0)  # of integers, too
    largest = torch.amax(input.detach(), dim, True)
    largest = largest.masked_fill(torch.isinf(largest), 0)
    return (input - largest).exp().sum(dim, keepdim).log() + largest.sum(dim, keepdim)


# ---- the same function of the ranks' results --------------------------------------------------------------------


@rule(*named("prod"))
def _prod(func: Any, input: DomainTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    dims, whole, _ = over(input.whole, dim, keepdim=keepdim)
    given = () if dim is None else (dim, keepdim)
    rows, _ = _of_parts(input, dims, lambda part: func(part, *given, **options))
    return made(func(rows, 0, **options), whole, input.mesh)


@rule(*named("vector_norm"))
def _vector_norm(
    func: Any,
    x: DomainTensor,
    ord: float = 2,  # noqa: A002  torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dims, whole, _ = over(x.whole, dim, keepdim=keepdim)
    if abs(ord) == inf:  # gradients are divided among equal ones
        sizes = as_domain_tensor(x.to(dtype or x.dtype).abs(), x.whole, x.mesh)
        return _extreme(torch.amax if ord > 0 else torch.amin, sizes, dims, keepdim)
    norms, _ = _of_parts(x, dims, partial(func, ord=ord, dim=dims, keepdim=keepdim, dtype=dtype))
    return made(norms.sum(0) if ord == 0 else func(norms, ord, 0), whole, x.mesh)


composed(torch.norm, Tensor.norm)(lambda func, *args, **options: written_out(func)(*args, **options))


@composed(torch.linalg.norm)
def _vector_or_matrix_norm(
    func: Any,
    A: DomainTensor,  # noqa: N803  torch's name
    ord: Any = None,  # noqa: A002  torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    of_vector = len(over(A.whole, dim, keepdim=False)[0]) == 1
    if ord not in (None, "fro") and (not of_vector or isinstance(ord, str)):
        raise refused(func, f"is the norm of order {ord!r} of a matrix", A)
    return torch.linalg.vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


def _of_parts(
    x: DomainTensor, dims: Sequence[int], compute: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[int]]:
    """Return `of_ranks` of a function's results of parts; collective over the axes that cut the dimensions.

    Args:
        x: The tensor that is reduced.
        dims: The dimensions.
        compute: The function, of a part with elements to reduce.
    """
    is_empty = 0 in [x.shape[number] for number in dims]
    part = x.sum(list(dims), keepdim=True, dtype=x.dtype) if is_empty else x
    return of_ranks(x.mesh, Layout(tuple(x.whole.dims[number] for number in dims)), compute(part))


def of_ranks(mesh: DeviceMesh, cut: Layout, result: Tensor) -> tuple[Tensor, list[int]]:
    """Return the results of those ranks that have elements, [ranks, ...], and how many elements each has.

    Collective over the axes that cut the elements; backward is local.
    """
    counts, rows = part_numels(cut, mesh), result.unsqueeze(0)
    if cut.axes:
        rows = joined(rows, mesh.group(*cut.axes), 0, [1] * len(counts))
    if 0 in counts:
        rows, counts = rows[[rank for rank, count in enumerate(counts) if count]], [each for each in counts if each]
    return rows, counts


# ---- variances --------------------------------------------------------------------------------------------------


@rule(*named("var std var_mean std_mean"))
def _variance(
    func: Any,
    input: DomainTensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims, whole, _ = over(input.whole, dim, keepdim=keepdim)
    torch.finfo(input.dtype)  # or the error of integers, on ranks without elements as well

    def moments(part: Tensor) -> Tensor:
        wide = part.to(WIDE.get(part.dtype, part.dtype))
        if part.numel():
            return torch.stack(torch.var_mean(wide, dims, correction=0, keepdim=keepdim))
        return torch.stack([wide.sum(dims, keepdim)] * 2)

    rows, counts = _of_parts(input, dims, moments)
    variance, mean = merged(rows, counts)
    count, less = sum(counts), int(unbiased) if correction is None else correction
    result = variance * count / max(count - less, 0)
    if func.__name__.startswith("std"):  # its gradient at 0 is 0, as torch's
        zero = result == 0
        result = result.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    found = result.to(input.dtype.to_real()), mean.to(input.dtype)
    results = tuple(made(each, whole, input.mesh) for each in found)
    return results if func.__name__.endswith("mean") else results[0]


def merged(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the biased variance and the mean of all elements, float64; local.

    Args:
        rows: [ranks, 2, ...] the biased variance and the mean of each rank's elements.
        counts: [ranks] their numbers.
    """
    weights = torch.tensor(counts, dtype=torch.float64, device=rows.device).view(-1, *[1] * (rows.dim() - 2))
    variances, means = rows.unbind(1)
    mean = (means * weights).sum(0) / weights.sum()
    return ((variances.real + (means - mean).abs().square()) * weights).sum(0) / weights.sum(), mean


# ---- the largest and the smallest -------------------------------------------------------------------------------


@rule(*named("amax amin"))
def _extreme(func: Any, input: DomainTensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims, whole, axes = over(input.whole, dim, keepdim=keepdim)
    with torch.no_grad():
        value = func(_of_parts(input, dims, lambda part: func(part, dims, True))[0], 0)
    if input.requires_grad and torch.is_grad_enabled():
        equal = (input == value).to(input.dtype)
        value = apply(_Selected, input, value, equal / total(input.mesh, axes, equal.sum(dims, keepdim=True)))
    return made(value if keepdim else value.squeeze(tuple(dims)), whole, input.mesh)


class _Selected(Function):
    """Values that were selected from elements; backward gives the elements their shares of a value's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None, None


@composed(*named("all any"))
def _all_or_any(func: Any, input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    wanted = func.__name__ == "any"  # any element that is not 0; all: no element that is 0
    found: Tensor = (input != 0) == wanted
    # Without dimensions torch reduces over none, while other functions reduce over all.
    found = (found if dim in ((), []) else torch.sum(found, dim, keepdim) > 0) == wanted
    return found.to(torch.uint8) if input.dtype is torch.uint8 else found


composed(*named("aminmax"))(
    lambda func, x, dim=None, keepdim=False: torch.return_types.aminmax(
        (torch.amin(x, dim, keepdim), torch.amax(x, dim, keepdim))
    )
)


@composed(*named("max min"))
def _max(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    largest = func.__name__ == "max"
    if isinstance(dim, Tensor) or other is not None:
        return (torch.maximum if largest else torch.minimum)(input, dim if other is None else other)
    if dim is None:
        return (torch.amax if largest else torch.amin)(input)
    dims, _, _ = over(input.whole, dim, keepdim=keepdim)
    return along(input, dims, lambda part: func(part, dim, keepdim))
