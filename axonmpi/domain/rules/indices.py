"""Rules of indices: x[2, :, None], x[..., tensor], x[2:5] = 0, gather, scatter.

Indices along a cut dimension: each rank takes its own elements, and zeros in place of the others. The sum over the
ranks is the result, and the gradient of each element reaches its owner once.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ...utils.torch_internals import plain_tensors
from ..domain_tensor import DomainTensor, composed, made, refused, rule
from ..layout import Factor
from ..movement import layout_of
from .elementwise import check_change, mesh_of
from .functions import named, tensors_in, with_parts
from .pieces import alike, sliced
from .shapes import result_of

_ALL = slice(None)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _items(func: Any, x: DomainTensor, index: Any) -> list[Any]:
    """Return an index as integers, slices and integer tensors, one for each dimension, and None; local."""
    given = [
        torch.as_tensor(item, device=x.device) if isinstance(item, list | tuple | range) else item
        for item in (index if isinstance(index, tuple) else (index,))
    ]
    if any(isinstance(item, bool | DomainTensor) or (_is_mask(item) and not item.dim()) for item in given):
        raise refused(func, "takes elements by a tensor that is cut, or by True or False", x, *given)
    taken = sum(item.dim() if _is_mask(item) else item is not None and item is not ... for item in given)
    at = next((place for place, item in enumerate(given) if item is ...), len(given))
    given[at : at + 1] = [_ALL] * (x.dim() - taken)
    items: list[Any] = []
    for item in given:
        dim = sum(item is not None for item in items)
        if _is_mask(item) and item.shape != x.whole.shape[dim : dim + item.dim()]:
            raise IndexError(f"expected a mask of {x.whole.shape} from dimension {dim} on, got {item.shape}")
        items += item.nonzero(as_tuple=True) if _is_mask(item) else [item]
    items = [int(item) if isinstance(item, Tensor) and not item.dim() else item for item in items]
    result_of(Tensor.__getitem__, x, tuple(_ALL if isinstance(item, Tensor) else item for item in items))
    return items


@composed(Tensor.__getitem__)
def _getitem(func: Any, x: Tensor, index: Any) -> Tensor:
    if not isinstance(x, DomainTensor):
        raise refused(func, "takes elements of an ordinary tensor by one that is cut", index)
    result: Tensor = x
    key: list[Any] = []
    for item in _items(func, x, index):
        dim = len(key)
        if item is None:
            result = result.unsqueeze(dim)
        elif isinstance(item, slice):
            with plain_tensors():
                result = sliced(result, dim, range(*item.indices(layout_of(result).shape[dim])))
        elif not isinstance(item, Tensor):
            result = result.select(dim, item)
            continue
        key.append(item)
    return _picked(result, {dim: item for dim, item in enumerate(key) if isinstance(item, Tensor)})


def _picked(x: Tensor, indices: dict[int, Tensor]) -> Tensor:
    """Return elements by indices along some dimensions, which become one dimension first; may be collective."""
    if not indices:
        return x
    sizes, lead = [x.shape[dim] for dim in indices], range(len(indices))
    places = torch.arange(prod(sizes), device=x.device).view(sizes)[tuple(indices.values())]
    rows = x.movedim(tuple(indices), tuple(lead)).flatten(0, lead[-1]).index_select(0, places.flatten())
    # Torch puts the dimensions of indices first unless those that they replace follow each other.
    first = min(indices) if max(indices) - min(indices) < len(indices) else 0
    new = range(places.dim())
    return torch.movedim(rows.unflatten(0, places.shape), tuple(new), tuple(first + dim for dim in new))


@composed(Tensor.__setitem__)
def _setitem(func: Any, x: Tensor, index: Any, value: Any) -> None:
    if not isinstance(x, DomainTensor):
        raise refused(func, "would write a part into an ordinary tensor", x, index, value)
    is_mask = _is_mask(index) and index.shape == x.shape
    items = [] if is_mask else [item for item in _items(func, x, index) if item is not None]
    if not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, DomainTensor)):
        # The mask has size 1 along dimensions that the index takes as they are.
        mask = torch.zeros([1 if item == _ALL else n for item, n in zip(items, x.shape, strict=False)]).bool()
        mask[tuple(items)] = True
        x.masked_fill_(index if is_mask else mask.to(x.device), value)
    elif is_mask or any(
        isinstance(item, Tensor) or (x.whole.is_cut(dim) and item != _ALL) for dim, item in enumerate(items)
    ):
        raise refused(
            func, "would write more than one number by indices, or along a dimension that is cut", x, value
        )
    else:
        x[index].copy_(value)


@rule(*named("gather take_along_dim scatter scatter_add scatter_reduce scatter_ scatter_add_ scatter_reduce_"))
def _along(func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Take or put elements along a dimension that no axis cuts, by an index that is cut as the tensor is."""
    operands = tensors_in([input, *args, *options.values()])
    dim = options.get("dim", next((arg for arg in args if isinstance(arg, int)), None))
    if dim is None or any(layout_of(tensor).is_cut(dim) for tensor in operands):
        raise refused(func, "takes or puts elements along a dimension that is cut", *operands)
    size = result_of(func, input, *args, **options).shape[dim]
    dim %= len(layout_of(input).dims)
    layouts = [layout_of(tensor).replaced({dim: ()}) for tensor in operands]
    if len({layout.shape for layout in layouts}) > 1:
        raise refused(func, "has a tensor and an index of different shapes", *operands)
    in_place = func.__name__.endswith("_")
    if in_place:
        check_change(func, operands, layouts)
    whole, parts = alike(func, operands, dim)
    replaced = dict(zip(map(id, operands), parts, strict=True))
    result = func(*with_parts((input, *args), replaced), **with_parts(options, replaced))
    return input if in_place else made(result, whole.replaced({dim: [Factor(size)]}), mesh_of(func, operands))
