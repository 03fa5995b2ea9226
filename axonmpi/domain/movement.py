"""Movement of rows between ranks, forward and back: edges, cuts that come, go or change their dimension.

Two invariants hold between functions. The gradient of a part is complete on the rank that has the part. A tensor
that an axis does not cut is the same on all ranks of the axis, and so is its gradient. Functions here keep them:

    fetched      rows of other ranks         backward adds them to their owners' rows
    own_part     a whole tensor is cut       backward concatenates
    gathered     a cut goes                  backward takes the own part
    recut        another dimension is cut    backward cuts the first one again
    shared       a whole tensor meets parts  backward adds over the axes, all tensors of a call in one all-reduce
    total        sums of parts               backward passes the gradient on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import all_to_all, fetch_rows, gather, reduce, scatter
from ..groups.process_group import ProcessGroup
from ..mesh import DeviceMesh
from ..types import ReduceOp
from ..utils.partition import split_bounds, split_sizes
from ..utils.rows import row_plan
from .domain_tensor import DomainTensor, as_domain_tensor, made
from .layout import Dim, Factor, Layout, bounds, part_size


def layout_of(tensor: Tensor) -> Layout:
    """Return how a tensor is cut: an ordinary one is not; local."""
    return tensor.whole if isinstance(tensor, DomainTensor) else Layout.cut(tensor.shape, {})


# ---- cuts that come, go, or change their dimension --------------------------------------------------------------


def _around(
    mesh: DeviceMesh, tensor: DomainTensor | Tensor, whole: Layout, axis: str
) -> tuple[Tensor, int, Factor]:
    """Return a part with the factor that an axis cuts as a dimension of its own, its number, the factor; local."""
    dim = whole.dim_of(axis)
    place = next(i for i, factor in enumerate(whole.dims[dim]) if factor.axis == axis)
    factors = whole.dims[dim]
    sizes = [part_size(mesh, part) for part in (factors[:place], factors[place : place + 1], factors[place + 1 :])]
    return unflattened(tensor, dim, sizes), dim + 1, factors[place]


def unflattened(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return a tensor with a dimension divided; local."""
    return tensor.view_as(tensor) if not sizes else torch.unflatten(tensor, dim, list(sizes))


def gathered(x: DomainTensor, axes: Iterable[str]) -> Tensor:
    """Return the tensor without the cuts of some axes; collective over these."""
    part: Tensor = x
    whole, mesh = x.whole, x.mesh
    for axis in axes:
        dim = whole.dim_of(axis)
        opened, at, factor = _around(mesh, part, whole, axis)
        opened = joined(opened, mesh.group(axis), at, split_sizes(factor.size, mesh.size(axis)))
        part = opened.flatten(dim, dim + 2)
        whole = whole.replaced({dim: [Factor(f.size, None if f.axis == axis else f.axis) for f in whole.dims[dim]]})
    return made(part, whole, mesh)


def own_part(mesh: DeviceMesh, tensor: Tensor, dim: int, factors: Dim) -> Tensor:
    """Return this rank's part of a dimension that no axis cuts yet; local, collective backward.

    Args:
        mesh: The ranks.
        tensor: A part or a whole.
        dim: The dimension.
        factors: Its factors.
    """
    opened = unflattened(tensor, dim, [factor.size for factor in factors])
    for number, factor in enumerate(factors, dim):
        if factor.axis is not None and tensor.requires_grad and torch.is_grad_enabled():
            opened = scatter(opened, mesh.group(factor.axis), number)
        elif factor.axis is not None:
            low, high = bounds(mesh, factor)
            opened = opened.narrow(number, low, high - low)
    return opened.flatten(dim, dim + len(factors) - 1)


def recut(x: DomainTensor, axis: str, dim: int) -> Tensor:
    """Return the tensor with an axis's cut along another dimension, which no axis cuts; collective."""
    whole, mesh, old = x.whole, x.mesh, x.whole.dim_of(axis)
    opened, at, _factor = _around(mesh, x, whole, axis)
    new = dim if dim < old else dim + 2
    opened = _exchanged(opened, mesh.group(axis), new, at)
    changes = {
        old: [Factor(f.size, None if f.axis == axis else f.axis) for f in whole.dims[old]],
        dim: [Factor(whole.shape[dim], axis)],
    }
    return made(opened.flatten(old, old + 2), whole.replaced(changes), mesh)


def simplified(x: DomainTensor, dim: int) -> DomainTensor:
    """Return the tensor with a dimension that one axis at most cuts, as `torch.tensor_split` does; collective."""
    factors, axes = x.whole.dims[dim], x.whole.axes_of(dim)
    if len(factors) < 2 or not axes:
        return x
    simple = (Factor(x.whole.shape[dim], axes[0]),)
    whole = gathered(x, axes if factors[0].axis is None else axes[1:])
    if isinstance(whole, DomainTensor) and (moved := dealt(whole, dim, simple)) is not None:
        return moved
    part = own_part(x.mesh, whole, dim, simple)  # from among all rows: those of a part did not follow each other
    return as_domain_tensor(part, layout_of(whole).replaced({dim: simple}), x.mesh)


def dealt(x: DomainTensor, dim: int, factors: Dim) -> DomainTensor | None:
    """Return the tensor with the rows of a dimension dealt as other factors deal them; collective.

    A cut factor and the uncut one behind it may be divided at another place: (10 y · 3) becomes (5 y · 6). Nothing
    else can change; the result is None, on all ranks, if the factors differ in other ways.
    """
    now, then = _segments(x.whole.dims[dim]), _segments(factors)
    if [(axis, size * behind) for axis, size, behind in now] != [(axis, a * b) for axis, a, b in then]:
        return None
    mesh = x.mesh
    own = [part_size(mesh, (Factor(size, axis), Factor(behind))) for axis, size, behind in now]
    part = unflattened(x, dim, own)
    for at, ((axis, size, behind), (_, pieces, piece)) in enumerate(zip(now, then, strict=True), dim):
        if axis is None:
            continue
        ranks = mesh.size(axis)
        has = tuple((low * behind, high * behind) for low, high in split_bounds(size, ranks))
        gets = tuple((low * piece, high * piece) for low, high in split_bounds(pieces, ranks))
        if has != gets:
            plan = row_plan(tuple(high - low for low, high in has), gets, "zeros")
            part = fetch_rows(part, plan, mesh.group(axis), at)
    return as_domain_tensor(part.flatten(dim, dim + len(own) - 1), x.whole.replaced({dim: factors}), mesh)


def _segments(dim: Dim) -> list[tuple[str | None, int, int]]:
    """Return a dimension's cut factors, each with the uncut one behind it: axis, size, size behind; local."""
    found: list[tuple[str | None, int, int]] = [(None, 1, 1)]
    for factor in dim:
        if factor.axis is not None:
            found.append((factor.axis, factor.size, 1))
        else:
            axis, size, behind = found[-1]
            found[-1] = axis, size, behind * factor.size
    return found


def joined(part: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the ranks' parts one after the other, of integers as well; collective."""
    if part.dtype.is_floating_point or part.dtype.is_complex:
        return gather(part, group, dim, sizes=sizes)
    joined: Tensor = group.backend.all_gather(part, dim, sizes=sizes)
    return joined


def _exchanged(part: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    """Return the part cut along `split_dim` and joined along `concat_dim`, of integers as well; collective."""
    if part.dtype.is_floating_point or part.dtype.is_complex:
        return all_to_all(part, group, split_dim, concat_dim)
    return torch.cat(group.all_to_all(part.tensor_split(group.size, split_dim)), concat_dim)


# ---- rows of other ranks ----------------------------------------------------------------------------------------


def fetched(
    x: Tensor,
    mesh: DeviceMesh,
    axis: str,
    dim: int,
    rows: int,
    ranges: Sequence[tuple[int, int]],
    mode: str = "zeros",
    value: float = 0.0,
) -> Tensor:
    """Return rows of a tensor that an axis cuts along a dimension as `torch.tensor_split` does; collective over it.

    Args:
        x: A part.
        mesh: The ranks.
        axis: The axis.
        dim: The dimension.
        rows: The whole's size there.
        ranges: [ranks of the axis] the first row of each rank's result and the row after the last.
        mode: Rows beyond the ends.
        value: The constant of mode "zeros".
    """
    plan = row_plan(split_sizes(rows, mesh.size(axis)), tuple(ranges), mode)
    return fetch_rows(x, plan, mesh.group(axis), dim, value)


# ---- whole tensors beside parts ---------------------------------------------------------------------------------


def shared(mesh: DeviceMesh, axes: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that ranks of some axes have alike, to be used with parts; collective backward."""
    needed = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
    if not axes or not needed:
        return list(tensors)
    taken = iter(apply(_Shared, mesh.group(*axes), *needed))
    return [next(taken) if tensor.requires_grad else tensor for tensor in tensors]


class _Shared(Function):
    """Tensors as they are; backward adds their gradients over the ranks, in one all-reduce for each dtype."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(True)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *apply(_Added, ctx.group, *grads)


class _Added(Function):
    """Sums over the ranks, in one all-reduce for each dtype; backward passes the gradients on."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> Any:
        results: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
            flat = torch.cat([tensors[place].reshape(-1) for place in places])
            group.all_reduce(flat, ReduceOp.SUM)
            for place, part in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
                results[place] = part.view(tensors[place].shape)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads


def apply(function: type[Function], *args: Any) -> Any:
    """Apply a differentiable function, which torch gives no types; local or collective as it is."""
    return function.apply(*args)


def total(mesh: DeviceMesh, axes: Sequence[str], tensor: Tensor) -> Tensor:
    """Return the sum over the ranks of some axes, of integers as well; collective over these."""
    if not axes:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return reduce(tensor, mesh.group(*axes))
    summed = tensor.clone()
    mesh.group(*axes).all_reduce(summed)
    return summed
