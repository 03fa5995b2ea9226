"""Rules of functions that take, join, or move rows: slices, cat, pad, roll, flip, sliding windows.

All of them take a range of rows, which may reach beyond the ends or run backwards:

    x[2:9:3]            range(2, 9, 3)
    flip                range(n − 1, −1, −1)
    pad by 1 and 2      range(−1, n + 2)
    roll by 1           range(−1, n − 1), circular

Along a cut dimension this is one exchange; the result's rows are dealt as `torch.tensor_split` deals them. A single
row, x[:, 3], goes to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.partition import split_bounds
from ...utils.torch_internals import compiled_functions
from ..domain_tensor import DomainTensor, as_domain_tensor, composed, made, refused, rule
from ..layout import Factor, Layout
from ..movement import fetched, gathered, layout_of, simplified
from .elementwise import beside, common, mesh_of
from .functions import each, named
from .shapes import as_view, result_of


def rows_of(x: DomainTensor, dim: int, rows: range, mode: str = "zeros", value: float = 0.0) -> DomainTensor:
    """Return some rows of a tensor, as a copy; collective along a cut dimension.

    Args:
        x: A tensor.
        dim: The dimension.
        rows: The rows of the whole. If no axis cuts the dimension: all of them backwards, or in steps of 1.
        mode: Rows beyond the ends, see `fetched`.
        value: The constant of mode "zeros".
    """
    size, axis = x.whole.shape[dim], None
    if x.whole.is_cut(dim):
        x = simplified(x, dim)
        axis = x.whole.axes_of(dim)[0]
        owned = [rows[low:high] for low, high in split_bounds(len(rows), x.mesh.size(axis))]
        ranges = [(min(part[0], part[-1]), max(part[0], part[-1]) + 1) if part else (0, 0) for part in owned]
        part = fetched(x, x.mesh, axis, dim, size, ranges, mode, value)
        part = part[(slice(None),) * dim + (slice(None, None, abs(rows.step)),)]
        part = part.flip(dim) if rows.step < 0 else part
    elif rows.step < 0:
        part = x.flip(dim)
    elif mode == "zeros":
        part = functional.pad(x, [0, 0] * (x.dim() - dim - 1) + [-rows.start, rows.stop - size], value=value)
    else:  # torch pads the last dimension of tensors whose first one may be empty
        lines = x.movedim(dim, -1)
        padded = functional.pad(lines.reshape(-1, 1, size), [-rows.start, rows.stop - size], mode)
        part = padded.view(*lines.shape[:-1], len(rows)).movedim(-1, dim)
    return as_domain_tensor(part, x.whole.replaced({dim: [Factor(len(rows), axis)]}), x.mesh)


# ---- slices -----------------------------------------------------------------------------------------------------


def sliced(x: Tensor, dim: int, rows: range) -> Tensor:
    """Return some rows in ascending order, as a view unless rows move; collective along a cut dimension."""
    if isinstance(x, DomainTensor) and x.whole.is_cut(dim) and rows != range(x.whole.shape[dim]):
        moved = rows_of(x, dim, rows)
        moved.is_copy = True
        return moved
    part = x[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
    if not isinstance(x, DomainTensor):
        return as_view(part, x)
    whole = x.whole if x.whole.is_cut(dim) else x.whole.replaced({dim: [Factor(len(rows))]})
    return as_view(as_domain_tensor(part, whole, x.mesh), x)


def row_of(x: Tensor, dim: int, row: int) -> Tensor:
    """Return one row, without the dimension and its cut; collective along a cut dimension."""
    one = sliced(x, dim, range(row, row + 1))
    if not isinstance(one, DomainTensor):
        return as_view(one.select(dim, 0), one)
    whole = as_view(gathered(one, one.whole.axes_of(dim)), one)
    dims = layout_of(whole).dims
    return as_view(made(whole.select(dim, 0), Layout(dims[:dim] + dims[dim + 1 :]), one.mesh), whole)


@rule(*named("narrow"))
def _narrow(func: Any, x: DomainTensor, dim: int, start: Any, length: int) -> Tensor:
    result_of(func, x, dim, start, length)
    first = range(x.whole.shape[dim] + 1)[int(start)] - (int(start) < 0)
    return sliced(x, dim % x.dim(), range(first, first + length))


@rule(*named("select"))
def _select(func: Any, x: DomainTensor, dim: int, index: Any) -> Tensor:
    result_of(func, x, dim, index)
    return row_of(x, dim % x.dim(), int(index) % x.whole.shape[dim])


@rule(*named("split chunk tensor_split unsafe_split unsafe_chunk split_with_sizes unsafe_split_with_sizes"))
def _split(func: Any, x: DomainTensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    dim = options.get("dim", args[1] if len(args) > 1 else 0) % x.dim()
    sizes = [piece.shape[dim] for piece in result_of(func, x, *args, **options)]
    ends = zip(sizes, accumulate(sizes), strict=True)
    return tuple(sliced(x, dim, range(stop - size, stop)) for size, stop in ends)


@rule(*named("unbind __iter__"))
def _unbind(func: Any, x: DomainTensor, dim: int = 0) -> Any:
    count = len(result_of(torch.unbind, x, dim))
    whole = as_view(gathered(x, x.whole.axes_of(dim)), x)  # one exchange for all rows, which all ranks get
    rows = [row_of(whole, dim % x.dim(), row) for row in range(count)]
    return iter(rows) if func is Tensor.__iter__ else tuple(rows)


@composed(functional.unfold)
def _unfold(
    func: Any, input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    shape = result_of(func, input, kernel_size, dilation, padding, stride).shape
    (rows, columns), (down, right), steps, sides = (each(n, 2) for n in (kernel_size, dilation, stride, padding))
    x = functional.pad(input, [sides[1], sides[1], sides[0], sides[0]])
    # Row i of all windows: every row that has i rows before it, and the others of its window behind it.
    lines = [x[..., i * down : x.shape[-2] - (rows - 1 - i) * down : steps[0], :] for i in range(rows)]
    pixels = [
        line[..., i * right : x.shape[-1] - (columns - 1 - i) * right : steps[1]]
        for line in lines
        for i in range(columns)
    ]
    return torch.stack(pixels, -3).reshape(shape)


# ---- joined -----------------------------------------------------------------------------------------------------


def alike(func: Any, operands: Sequence[Tensor], dim: int) -> tuple[Layout, list[Tensor]]:
    """Return tensors with one layout in all dimensions but one; may be collective.

    Args:
        func: The function, for messages.
        operands: Tensors of one shape, but for this dimension.
        dim: The dimension.

    Returns:
        The common layout, with size 1 in the dimension, cut there if an operand is; the parts, all cut as it is.
    """
    layouts = [layout_of(tensor) for tensor in operands]
    whole = common([one.replaced({dim: [Factor(1, *one.axes_of(dim)[:1])]}) for one in layouts])
    targets = [whole.replaced({dim: [Factor(one.shape[dim], *whole.axes_of(dim))]}) for one in layouts]
    return whole, beside(mesh_of(func, operands), operands, targets, whole.axes)


@rule(*named("cat concat concatenate"))
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    shape = result_of(torch.cat, list(tensors), dim).shape
    operands = [tensor for tensor in tensors if tensor.dim() == len(shape)]  # torch skips those of shape [0]
    dim %= len(shape)
    sizes, mesh = [layout_of(tensor).shape[dim] for tensor in operands], mesh_of(func, operands)
    whole, parts = alike(func, operands, dim)
    for name in whole.axes_of(dim):
        ends = split_bounds(shape[dim], mesh.size(name))
        for place, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
            first = stop - size
            ranges = [(min(max(low - first, 0), size), min(max(high - first, 0), size)) for low, high in ends]
            parts[place] = fetched(parts[place], mesh, name, dim, size, ranges)
    return made(torch.cat(parts, dim), whole.replaced({dim: [Factor(shape[dim], *whole.axes_of(dim))]}), mesh)


@composed(*named("stack"))
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim = dim % len(result_of(func, list(tensors), dim).shape)
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


@composed(*named("hstack vstack row_stack dstack column_stack"))
def _stack_along(func: Any, tensors: Sequence[Tensor]) -> Tensor:
    shapes = [result_of(func, [tensor]).shape for tensor in tensors]  # with dimensions that the function adds
    dim = {torch.vstack: 0, torch.row_stack: 0, torch.dstack: 2}.get(func, min(len(shapes[0]) - 1, 1))
    return torch.cat([tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)], dim)


# ---- rows that move ---------------------------------------------------------------------------------------------


@rule(functional.pad, compiled_functions.pad)
def _pad(func: Any, input: DomainTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    result_of(func, input, list(pad), mode, value)
    if mode == "circular" and min(pad) < 0:  # torch pads with the rows that are left
        cropped = _pad(func, input, [min(side, 0) for side in pad])
        return _pad(func, cropped, [max(side, 0) for side in pad], mode)
    x, beyond = input, mode.replace("constant", "zeros")
    for dim, before, after in zip(range(x.dim() - 1, -1, -1), pad[::2], pad[1::2], strict=False):
        if before or after:
            x = rows_of(x, dim, range(-before, x.whole.shape[dim] + after), beyond, value or 0.0)
    return made(x.clone(), x.whole, x.mesh) if x is input else x


@rule(*named("roll"))
def _roll(func: Any, input: DomainTensor, shifts: Any, dims: Any = ()) -> Tensor:
    result_of(func, input, shifts, dims)
    if dims in ((), [], None):
        raise refused(func, "without dims rolls all elements", input)
    x = input
    for shift, dim in zip(each(shifts, 1), [dim % x.dim() for dim in each(dims, 1)], strict=True):
        if x.whole.is_cut(dim) and (size := x.whole.shape[dim]):
            x = rows_of(x, dim, range(-shift % size, -shift % size + size), "circular")
        else:
            x = as_domain_tensor(x.roll(shift, dim), x.whole, x.mesh)
    return x


@rule(*named("flip"))
def _flip(func: Any, x: DomainTensor, *args: Any, dims: Any = None) -> Tensor:
    given = each((dims if args == () else args[0]) if len(args) < 2 else args, 1)
    result_of(func, x, given)
    for dim in given:
        x = rows_of(x, dim % x.dim(), range(x.whole.shape[dim])[::-1])
    return x


composed(*named("fliplr flipud"))(lambda func, x: x.flip(0 if func.__name__ == "flipud" else 1))


@composed(*named("rot90"))
def _rotated(func: Any, input: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    turned: Tensor = input.flip([(), dims[1:], dims, dims[:1]][k % 4])
    return turned.transpose(*dims) if k % 2 else turned


@composed(*named("tril triu"))
def _triangle(func: Any, input: Tensor, diagonal: int = 0) -> Tensor:
    result_of(func, input, diagonal)
    kept = func(torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device), diagonal)
    return input.masked_fill(~kept, 0)
