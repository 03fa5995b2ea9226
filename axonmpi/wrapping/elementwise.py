"""Classification of torch's functions: elementwise, so right on a shard, or in need of the full tensor.

    p.mul_(0.9).add_(g)      elementwise: the same on a shard as on the full tensor
    p.shape, p.grad          attributes of the shard, as documented
    p.norm(), p.view(3, 4)   reductions and shapes of the full tensor
    p.normal_(), p * row     results that would differ from those of one process

Random functions belong to the last row: ranks with equal seeds would draw equal numbers for different elements.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_ATTRIBUTES = ("__get__", "__set__", "__delete__")
_OF_SHARD = """
    hash repr str format len reduce_ex setstate dim ndimension size numel nelement stride element_size is_contiguous
    is_floating_point is_complex is_signed get_device data_ptr storage_offset untyped_storage storage typed_storage
    is_shared is_pinned is_inference is_same_size register_hook register_post_accumulate_grad_hook requires_grad
    retain_grad as_subclass has_compatible_shallow_copy_type
"""
_CONVERSIONS = frozenset({"__bool__", "__int__", "__long__", "__float__", "__complex__", "__index__"})
_COMPARISONS = frozenset({"equal", "allclose", "isclose"})
_FLAT = frozenset({"flatten", "ravel", "view", "reshape"})
_ELEMENTWISE = """
    abs absolute neg negative positive sign sgn signbit ceil floor round trunc fix frac exp exp2 expm1 log log2
    log10 log1p sqrt rsqrt square pow float_power reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh asinh
    acosh atanh erf erfc erfinv sigmoid logit relu gelu silu softplus leaky_relu clamp clamp_min clamp_max clip
    maximum minimum fmax fmin lerp add sub subtract mul multiply div divide true_divide floor_divide fmod remainder
    addcmul addcdiv copysign hypot nan_to_num where masked_fill isnan isinf isfinite isposinf isneginf logical_not
    logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge greater less
    greater_equal less_equal not_equal real imag conj conj_physical resolve_conj resolve_neg angle radd rsub rmul
    rdiv rtruediv rfloordiv rmod rpow iadd isub imul idiv itruediv ifloordiv imod ipow and or xor rand ror rxor iand
    ior ixor invert truediv floordiv mod
    clone detach data contiguous to cpu cuda type_as type float double half bfloat16 int long short byte char bool
    copy fill zero constant zeros_like ones_like full_like empty_like pin_memory share_memory
"""


_NAMES_OF_SHARD, _NAMES_OF_ELEMENTS = frozenset(_OF_SHARD.split()), frozenset(_ELEMENTWISE.split())


class Scope(enum.Enum):
    """How much of a tensor a function needs.

    Attributes:
        SHARD: The shard's own shape, memory or gradient.
        COMPARISON: Two shards, compared element by element.
        ELEMENTS: Each element independently.
        FLAT: All elements, reshaped; elementwise if the result has one dim.
        ALL: The full tensor.
    """

    SHARD = 1
    COMPARISON = 2
    ELEMENTS = 3
    FLAT = 4
    ALL = 5


def name_of(function: Any) -> str:
    """Return the plain name of a function of tensors, "add" for `__iadd__`, `add_` and `_foreach_add_`; local."""
    name: str = getattr(function, "__name__", "")
    if name in _ATTRIBUTES:
        name = function.__self__.__name__
    return name.strip("_").removeprefix("foreach_")


@functools.cache
def scope_of(function: Any) -> Scope:
    """Return how much of its tensors a function needs; local.

    Args:
        function: As `__torch_function__` is given it.
    """
    name = name_of(function)
    if getattr(function, "__name__", "") in _CONVERSIONS:
        return Scope.ALL
    if name in _NAMES_OF_SHARD:
        return Scope.SHARD
    if name in _COMPARISONS:
        return Scope.COMPARISON
    if name in _NAMES_OF_ELEMENTS:
        return Scope.ELEMENTS
    if name in _FLAT:
        return Scope.FLAT
    # Attributes are about the shard, such as `grad`, except transposed views: `T`, `mT`, `H`, `mH`.
    is_attribute = getattr(function, "__name__", "") in _ATTRIBUTES and not name[-1].isupper()
    return Scope.SHARD if is_attribute else Scope.ALL


def is_view(function: Any) -> bool:
    """Return True if a function's result shares the memory of its shard; local."""
    return name_of(function) in ("data", "detach")


def fits_elements(arguments: Sequence[Any], options: Mapping[str, Any], kind: type[Tensor]) -> bool:
    """Return True if every tensor argument has the shape of a shard, or no dims; local.

    Tensors of other shapes would be broadcast along the shard's dims, which differ from those of the full tensor.

    Args:
        arguments: Positional arguments, tensors and lists of tensors among them.
        options: Keyword arguments.
        kind: The class of shards.
    """
    tensors = list(_tensors_in([*arguments, *options.values()]))
    shapes = {tensor.shape for tensor in tensors if isinstance(tensor, kind)}
    return all(tensor.shape in shapes or tensor.dim() == 0 for tensor in tensors)


def _tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))
