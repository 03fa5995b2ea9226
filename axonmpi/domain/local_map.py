"""Functions of a user's own on parts with rows of the neighbours, for stencils that torch has no function for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..utils.arguments import integer
from ..utils.partition import split_bounds
from ..utils.rows import MODES
from ..utils.torch_internals import plain_tensors
from .domain_tensor import DomainTensor, as_domain_tensor, check_parameters, part_of
from .layout import Factor, part_shape
from .movement import fetched, shared, simplified
from .rules.elementwise import mesh_of


def local_map(
    function: Callable[..., Tensor],
    x: DomainTensor,
    *tensors: Tensor,
    halo: Mapping[int, tuple[int, int]] | None = None,
    mode: str = "zeros",
) -> DomainTensor:
    """Call a function on this rank's part and its halo; collective over the axes that cut `x`.

    The function is called on every rank, also for an empty part, which has the halo's rows alone. In backward,
    gradients of halos return to their owners, and those of ordinary tensors are added over the ranks.

    Args:
        function: Called with the part of `x`, its halo around it, and with `tensors`. Returns as many rows as the
            part has without its halo along each cut dimension; other dimensions are free.
        x: The tensor.
        tensors: Other arguments: ordinary tensors, which all ranks have alike, or tensors cut as `x`, given as
            their parts.
        halo: Rows before and behind along some cut dimensions of `x`, such as `{2: (1, 1)}`.
        mode: Rows beyond the ends: "zeros", "circular", "reflect" or "replicate".

    Returns:
        The whole's result, cut as `x` is.

    Raises:
        TypeError: `x` is an ordinary tensor, or a number of rows is no integer.
        ValueError: A dimension of `halo` is not cut, `mode` is another, a tensor is cut in another way than `x`, or
            the result has other rows than the part.
    """
    if not isinstance(x, DomainTensor):
        raise TypeError(f"x: expected a DomainTensor, got {type(x).__name__}; call the function itself")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if any(isinstance(tensor, DomainTensor) and tensor.whole != x.whole for tensor in tensors):
        raise ValueError(f"tensors: expected ordinary ones, or cut as x is, {x.whole}")
    mesh_of(function, [x, *tensors])  # or the error of two meshes
    check_parameters([x], tensors)
    with plain_tensors():
        for dim in halo or {}:
            if not -len(x.whole.dims) <= dim < len(x.whole.dims) or not x.whole.is_cut(dim):
                raise ValueError(f"halo: expected dimensions that are cut, {x.whole}, got {dim}")
            number = dim % len(x.whole.dims)
            x = simplified(x, number)
            tensors = tuple(simplified(t, number) if isinstance(t, DomainTensor) else t for t in tensors)
        part: Tensor = part_of(x)
        for dim, (before, after) in (halo or {}).items():
            number = dim % len(x.whole.dims)
            axis, size = x.whole.axes_of(number)[0], x.whole.shape[number]
            edges = integer("halo", before, minimum=0), integer("halo", after, minimum=0)
            ranges = [(low - edges[0], high + edges[1]) for low, high in split_bounds(size, x.mesh.size(axis))]
            part = fetched(part, x.mesh, axis, number, size, ranges, mode)
        ordinary = iter(shared(x.mesh, x.whole.axes, [t for t in tensors if not isinstance(t, DomainTensor)]))
        given = [part_of(t) if isinstance(t, DomainTensor) else next(ordinary) for t in tensors]
    result = function(part, *given)
    own = part_shape(x.mesh, x.whole)
    cut = [number for number in range(len(own)) if x.whole.is_cut(number)]
    if result.dim() != len(own) or any(result.shape[number] != own[number] for number in cut):
        raise ValueError(
            f"function: expected a result of {len(own)} dimensions, with the part's sizes {[own[n] for n in cut]} "
            f"along dimensions {cut}, without the halo, got {list(result.shape)}"
        )
    free = {n: [Factor(result.shape[n])] for n in range(len(own)) if n not in cut}
    return as_domain_tensor(torch.Tensor.view_as(result, result), x.whole.replaced(free), x.mesh)
