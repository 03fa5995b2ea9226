"""Rules of functions along a whole dimension, such as `softmax`, `cumsum` and `fft`.

    [B, 100 y]      the cut goes to another dimension by an all-to-all
    [B y, 100]      each rank computes whole rows, and the cut goes back
    [B, 100 y]

If no other dimension can be cut, each rank computes all rows and keeps its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...utils.torch_internals import plain_tensors
from ..domain_tensor import DomainTensor, made, refused, rule
from ..layout import Factor, Layout, over, part_shape
from ..movement import gathered, layout_of, own_part, recut
from .functions import named, tensors_in
from .shapes import reshape

# Functions, the place of their dimension among the arguments behind the input, and its default; (): all of them.
_FUNCTIONS: list[tuple[str, int, Any]] = [
    ("softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp", 0, None),
    ("argmax argmin median nanmedian", 0, None),
    ("quantile nanquantile", 1, None),
    ("sort argsort glu mode", 0, -1),
    ("msort", 0, 0),
    ("topk kthvalue diff fft ifft rfft irfft hfft ihfft", 1, -1),
    ("fft2 ifft2 rfft2 irfft2", 1, (-2, -1)),
    ("fftn ifftn rfftn irfftn", 1, ()),
    ("fftshift ifftshift", 0, ()),
]


def _along(func: Any, input: Tensor, *args: Any, place: int, default: Any, **options: Any) -> Any:
    if not isinstance(input, DomainTensor) or tensors_in([*args, *options.values()]):
        raise refused(func, "has other arguments that are tensors", input, *args, *options.values())
    dim = options.get("dim", args[place] if len(args) > place else None)
    dim = default if dim is None else dim
    if dim is None:
        return func(gathered(input, input.whole.axes), *args, **options)  # of all elements
    dims, _, _ = over(input.whole, dim, keepdim=True)
    return along(input, dims, lambda part: func(part, *args, **options))


for _names, _place, _default in _FUNCTIONS:
    rule(*named(_names))(partial(_along, place=_place, default=_default))


@rule(*named("index_select"))
def _index_select(func: Any, input: Tensor, dim: int, index: Tensor) -> Any:
    if not isinstance(input, DomainTensor) or isinstance(index, DomainTensor):
        raise refused(func, "takes elements by a tensor that is cut, or of an ordinary one", input, index)
    dims, _, _ = over(input.whole, dim, keepdim=True)
    return along(input, dims, lambda part: func(part, dim, index))


def along(x: DomainTensor, dims: Sequence[int], compute: Callable[[Tensor], Any]) -> Any:
    """Return the result of a function along whole dimensions, cut as before; may be collective.

    Args:
        x: A tensor.
        dims: The dimensions, not negative.
        compute: The function, of a part that has these dimensions whole, and at least one element of each other.
            Its result, or each tensor of its tuple, may have other sizes there, or lack the only one of them.
    """
    with plain_tensors():
        free: Tensor = x
        for axis in [axis for dim in dims for axis in x.whole.axes_of(dim)]:
            assert isinstance(free, DomainTensor)  # the axis cuts it
            now = free.whole
            others = [n for n in range(len(now.dims)) if n not in dims and now.shape[n] > 1 and not now.is_cut(n)]
            free = recut(free, axis, max(others, key=now.shape.__getitem__)) if others else gathered(free, [axis])
        back = partial(_back, x, layout_of(free), dims)
        for n, size in enumerate(free.shape):
            if size == 0 and n not in dims:  # one element of zeros, through which gradients reach the other ranks
                free = free.sum(n, keepdim=True, dtype=free.dtype)
        result = compute(free)
        return back(result) if isinstance(result, Tensor) else type(result)([back(each) for each in result])


def _back(x: DomainTensor, now: Layout, dims: Sequence[int], part: Tensor) -> Tensor:
    """Return a part of a result, which is cut as `now` says, cut as `x` is; may be collective."""
    lacks = part.dim() < len(now.dims)
    part = part.unsqueeze(dims[0]) if lacks else part
    whole = now.replaced({n: [Factor(part.shape[n])] for n in dims})
    block = tuple(slice(size) for size in part_shape(x.mesh, whole))  # without the element of an empty dimension
    result: Any = made(part[block], whole, x.mesh)
    for n, place, axis in ((dim, *each) for dim in dims for each in enumerate(x.whole.axes_of(dim))):
        size, whole = part.shape[n], layout_of(result)
        if axis in whole.axes and size == 1:
            result = gathered(result, [axis])
        elif axis in whole.axes and place == 0:
            result = recut(result, axis, n)
        elif place == 0 and size > 1:
            whole = whole.replaced({n: [Factor(size, axis)]})
            result = made(own_part(x.mesh, result, n, whole.dims[n]), whole, x.mesh)
    sizes = layout_of(result).shape
    return reshape(result, [*sizes[: dims[0]], *sizes[dims[0] + 1 :]]) if lacks else result
