"""Rules of products: every dimension of an operand has a label, and the result has some of the labels.

    A [M y, K] · B [K, N]         C [M y, N]; B is the same on all ranks
    A [M, K y] · B [K y, N]       each rank multiplies its rows, and the sum over y is C [M, N]
    A [M y, K] · B [K, N y]       an axis cuts one label: the smaller operand is gathered

An axis that could cut a label of the result does not cut another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.torch_internals import plain_tensors
from ..domain_tensor import RULES, DomainTensor, composed, made, refused, rule
from ..layout import Dim, Layout
from ..movement import layout_of, shared, total
from .elementwise import beside, mesh_of
from .functions import named, tensors_in
from .shapes import result_of

Labels = Sequence[Hashable]
"""A name for each dimension: those of one name are multiplied. Integers: sizes of 1 are broadcast."""


def product(
    func: Any,
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    result: Labels,
    compute: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return a product of tensors, at least one of which is cut; may be collective.

    Args:
        func: The function, for messages.
        operands: The tensors.
        labels: Of each operand.
        result: Labels of the result; it is a sum over the others.
        compute: The function, of the operands' parts, if it is not `func`.
    """
    mesh, layouts = mesh_of(func, operands), [layout_of(tensor) for tensor in operands]
    sizes: dict[Hashable, int] = {}
    for layout, names in zip(layouts, labels, strict=True):
        for name, size in zip(names, layout.shape, strict=True):
            known = sizes.setdefault(name, size)
            if known != size and not (isinstance(name, int) and 1 in (known, size)):
                raise RuntimeError(f"expected sizes that match, got {[list(each.shape) for each in layouts]}")
            sizes[name] = size if known == 1 else known
    cut = [
        (name not in result, -layout.shape.numel(), name, dim)
        for layout, names in zip(layouts, labels, strict=True)
        for name, dim, size in zip(names, layout.dims, layout.shape, strict=True)
        if size == sizes[name] and any(factor.axis for factor in dim)
    ]
    dims: dict[Hashable, Dim] = {}
    used: list[str] = []
    for _, _, name, dim in sorted(cut, key=lambda each: each[:2]):
        axes = [factor.axis for factor in dim if factor.axis is not None]
        if name not in dims and not set(axes) & set(used):
            dims[name] = dim
            used += axes
    whole = {name: dims.get(name, Layout.cut([size], {}).dims[0]) for name, size in sizes.items()}
    with plain_tensors():
        targets = [Layout(tuple(whole[name] for name in names)) for names in labels]
        part = (compute or func)(*beside(mesh, operands, targets, used))
        summed = [axis for name, dim in dims.items() if name not in result for axis in Layout((dim,)).axes]
        return made(total(mesh, summed, part), Layout(tuple(whole[name] for name in result)), mesh)


@composed(*named("matmul mm bmm mv dot vdot __matmul__ __rmatmul__"))
def _matmul(func: Any, *args: Any, **options: Any) -> Tensor:
    operands = tensors_in([*args, *options.values()])
    if func.__name__ == "__rmatmul__":
        func, operands = torch.matmul, operands[::-1]
    a, b = operands[0].dim(), operands[1].dim()
    label = str if func.__name__ == "bmm" else int  # only integers broadcast
    labels = [*map(label, range(-a, -2)), *"mk"[-a:]], [*map(label, range(-b, -2)), *"kn"[:b]]
    return product(func, operands, labels, [*map(label, range(-max(a, b), -2)), *"m"[: a - 1], *"n"[: b - 1]])


@composed(*named("linear"))
def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = [*range(1 - input.dim(), 0)]
    names = ["n", "k"][2 - weight.dim() :]
    labels, result = [[*rows, "k"], names], [*rows, *names[:-1]]
    if bias is None or bias.dim() != 1 or any(layout_of(tensor).is_cut(-1) for tensor in (input, weight)):
        added_up = product(func, [input, weight], labels, result)
        return added_up if bias is None else added_up + bias
    return product(func, [input, weight, bias], [*labels, ["n"]], result)


composed(*named("outer ger"))(lambda func, x, vec2: product(func, [x, vec2], ["i", "j"], "ij"))
composed(*named("inner"))(
    lambda func, x, other: torch.tensordot(x, other, ([-1], [-1])) if x.dim() and other.dim() else x * other
)


@composed(torch.tensordot)
def _tensordot(func: Any, a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    pairs = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    first, second = ([f"{name}{n}" for n in range(t.dim())] for name, t in (("a", a), ("b", b)))
    for i, j in zip(*pairs, strict=True):
        second[j] = first[i]
    result = [name for name in first + second if (name in first) != (name in second)]
    return product(func, [a, b], [first, second], result, lambda *parts: func(*parts, dims))


@composed(torch.einsum)
def _einsum(func: Any, equation: str, *operands: Any) -> Tensor:
    tensors = tensors_in(operands)
    terms, arrow, result = equation.replace(" ", "").partition("->")
    labels = [_labels(term, tensor.dim()) for term, tensor in zip(terms.split(","), tensors, strict=True)]
    if any(len(set(names)) < len(names) for names in labels):
        raise refused(func, "takes a diagonal", *tensors)
    if not arrow:
        result = "..." + "".join(sorted(letter for letter in set(terms) - set(",.") if terms.count(letter) == 1))
    rows = max(0, *(-min(names, default=0) for names in labels)) if "." in result else 0
    names = _labels(result, len(result.replace("...", "")) + rows)
    return product(func, tensors, labels, names, lambda *parts: func(equation, *parts))


def _labels(term: str, count: int) -> list[int]:
    """Return the labels of a term of an equation for a tensor of `count` dimensions; those of "..." are below 0."""
    before, dots, after = term.partition("...")
    rows = count - len(before) - len(after)
    if rows < 0 or (rows and not dots):
        raise RuntimeError(f"einsum: expected a tensor of {len(before) + len(after)} dimensions, got {count}")
    return [*map(ord, before), *range(-rows, 0), *map(ord, after)]


@composed(*named("addmm baddbmm addbmm addmv addr"))
def _added(func: Any, input: Tensor, *args: Any, beta: float = 1, alpha: float = 1, **named: Any) -> Tensor:
    first, second = *args, *(named[name] for name in sorted(named))  # mat1 and mat2, vec1 and vec2, mat and vec ...
    result = torch.outer(first, second) if func.__name__ == "addr" else torch.matmul(first, second)
    result = result.sum(0) if func.__name__ == "addbmm" else result
    result_of(torch.broadcast_to, input, result.shape)  # torch's own error
    return torch.add(input * beta, result, alpha=alpha).to(result.dtype) if beta else result * alpha


@composed(*named("bilinear"))
def _bilinear(func: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = torch.einsum("...i,oij,...j->...o", input1, weight, input2).to(input1.dtype)  # as torch in autocast
    return result if bias is None else result + bias


@rule(functional.embedding)
def _embedding(
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(input, DomainTensor) or isinstance(weight, DomainTensor):
        raise refused(func, "has a weight that is cut", input, weight)
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refused(func, "would change or count rows of the weight by a part's indices", input)
    (weight,) = shared(input.mesh, input.whole.axes, [weight])
    width = Layout.cut(weight.shape[1:], {})
    return made(func(input, weight, padding_idx), Layout(input.whole.dims + width.dims), input.mesh)


@rule(*named("one_hot"))
def _one_hot(func: Any, input: DomainTensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        num_classes = int(RULES[torch.amax](torch.amax, input)) + 1
    classes = Layout.cut([num_classes], {})
    return made(func(input, num_classes), Layout(input.whole.dims + classes.dims), input.mesh)
