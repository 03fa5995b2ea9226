"""Rules of functions that compute each element of the result from the elements at its place, with broadcasting.

Operands are beside to one layout: that of the first that is cut, with the cuts of the others. An ordinary operand
has the whole's size along a cut dimension, and its own part is taken, or size 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DomainError
from ...mesh import DeviceMesh
from ..domain_tensor import DomainTensor, composed, made, part_of, refused, rule
from ..layout import Layout
from ..movement import dealt, gathered, layout_of, own_part, shared
from .functions import named, properties, tensors_in, with_parts

_FUNCTIONS = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
ceil celu clamp clamp_max clamp_min clip conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf
erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac gcd ge gelu greater
greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite
isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum
minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polygamma positive pow rad2deg
real reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc xlogy entr erfcx
i0e i1 i1e log_ndtr ndtr ndtri psi expit xlog1py zeta gammaln complex polar
"""
"""Those that also have an in-place form have it under the same name with an underscore."""

_OPERATORS = """
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __or__
__ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
_IN_PLACE = """
__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
fill_ zero_ copy_ detach_ masked_fill_ clamp_ hardtanh_ relu_ relu6_ elu_ selu_ celu_ leaky_relu_ threshold_
"""
_CONVERSIONS = """
clone detach double float half bfloat16 bool int long short char byte cdouble cfloat to type cpu cuda
zeros_like ones_like empty_like full_like type_as alias conj resolve_conj resolve_neg imag
"""


_CHANGE_THE_FIRST = frozenset(named(*(f"{word}_" for word in _FUNCTIONS.split()), _IN_PLACE))
"""Functions that change their first argument."""


@rule(*named(_FUNCTIONS, _OPERATORS), *_CHANGE_THE_FIRST)
def _elementwise(func: Any, *args: Any, **options: Any) -> Any:
    operands = tensors_in([*args, *options.values()])
    in_place = func in _CHANGE_THE_FIRST or options.get("inplace") is True
    if in_place:
        check_change(func, operands, [layout_of(tensor) for tensor in operands])
    whole, mesh, parts = aligned(func, operands)
    replaced = dict(zip(map(id, operands), parts, strict=True))
    result = func(*with_parts(args, replaced), **with_parts(options, replaced))
    return operands[0] if in_place else made(result, whole, mesh)


def check_change(func: Any, operands: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
    """Refuse to change a first operand that is not cut as the result is, or is a copy of a slice; local."""
    if common(layouts) != layouts[0]:
        raise refused(func, "would change its first argument, which is not cut as the result is", *operands)
    if isinstance(operands[0], DomainTensor) and operands[0].is_copy:
        raise refused(func, "would not change the tensor that this one is a slice of; clone() it before", *operands)


@rule(*named(_CONVERSIONS), *properties("real imag"))
def _converted(func: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    plain = [part_of(arg) if isinstance(arg, Tensor) else arg for arg in args]  # of x.to(other), for its dtype
    result = func(x, *plain, **options)
    return made(result, x.whole, x.mesh) if isinstance(x, DomainTensor) and isinstance(result, Tensor) else result


@rule(torch.where, Tensor.where)
def _where(func: Any, *args: Any, **options: Any) -> Any:
    if len(args) + len(options) == 1:
        raise refused(func, "with one argument finds places", *args)
    return _elementwise(func, *args, **options)


@composed(*named("prelu"))
def _prelu(func: Any, input: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 1 and input.dim() > 1:  # a factor for each channel, or one
        weight = weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


# ---- one layout for all operands --------------------------------------------------------------------------------


def aligned(func: Any, operands: Sequence[Tensor]) -> tuple[Layout, DeviceMesh, list[Tensor]]:
    """Return the layout of a result with broadcasting, the ranks, and the parts of the operands; may be collective.

    Args:
        func: The function, for messages.
        operands: Its tensors, at least one of which is cut.
    """
    cut = [tensor for tensor in operands if isinstance(tensor, DomainTensor)]
    mesh, whole = mesh_of(func, operands), cut[0].whole
    if len(cut) == len(operands) and all(tensor.whole == whole for tensor in cut):
        return whole, mesh, list(operands)
    target = common([layout_of(tensor) for tensor in operands])
    return target, mesh, beside(mesh, operands, [target] * len(operands), target.axes)


def beside(
    mesh: DeviceMesh, operands: Sequence[Tensor], targets: Sequence[Layout], axes: Sequence[str]
) -> list[Tensor]:
    """Return the parts of operands that are used with each other; may be collective.

    Args:
        mesh: The ranks.
        operands: Tensors, cut or ordinary.
        targets: The layout of each, with broadcasting.
        axes: The axes that cut the result: gradients of operands that they do not cut are added over them.
    """
    found = [as_in(mesh, tensor, target) for tensor, target in zip(operands, targets, strict=True)]
    parts = [part for part, _ in found]
    missing = [tuple(axis for axis in axes if axis not in own) for _, own in found]
    for absent in dict.fromkeys(missing):
        places = [place for place, each in enumerate(missing) if each == absent]
        for place, part in zip(places, shared(mesh, absent, [parts[place] for place in places]), strict=True):
            parts[place] = part
    return parts


def mesh_of(func: Any, operands: Iterable[Tensor]) -> DeviceMesh:
    """Return the ranks of the operands that are cut, at least one; local."""
    mesh, *others = (tensor.mesh for tensor in operands if isinstance(tensor, DomainTensor))
    if any(other is not mesh for other in others):
        raise refused(func, "has arguments of two meshes", *operands)
    return mesh


def common(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of a result: each dimension as the first operand that cuts it has it; local."""
    shapes = [layout.shape for layout in layouts]
    try:
        shape = torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        raise DomainError(
            f"expected sizes that match, or 1, got {[list(each) for each in shapes]}; an ordinary tensor beside "
            "one that is cut has the whole's sizes; domain.from_local makes a part a tensor of the whole's"
        ) from error
    whole = Layout.cut(shape, {})
    for layout in layouts:
        offset = len(shape) - len(layout.dims)
        for dim, factors in enumerate(layout.dims, offset):
            is_free = not whole.is_cut(dim) and not set(layout.axes_of(dim - offset)) & set(whole.axes)
            if is_free and layout.is_cut(dim - offset) and layout.shape[dim - offset] == shape[dim]:
                whole = whole.replaced({dim: factors})
    return whole


def as_in(mesh: DeviceMesh, tensor: Tensor, target: Layout) -> tuple[Tensor, tuple[str, ...]]:
    """Return an operand's part as the target is cut, and the axes that cut it then; may be collective."""
    offset = len(target.dims) - len(layout_of(tensor).dims)
    for number, wanted in enumerate(target.dims[offset:]):
        if isinstance(tensor, DomainTensor) and tensor.whole.is_cut(number) and tensor.whole.dims[number] != wanted:
            moved = dealt(tensor, number, wanted)
            tensor = gathered(tensor, tensor.whole.axes_of(number)) if moved is None else moved
    layout, part = layout_of(tensor), tensor
    for number, wanted in enumerate(target.dims[offset:]):
        if layout.shape[number] == target.shape[number + offset] and layout.dims[number] != wanted:
            part = own_part(mesh, part, number, wanted)
            layout = layout.replaced({number: wanted})
    return part, layout.axes
