"""`DomainTensor`: this rank's part of a tensor that shows the whole's shape, and the table of rules for functions.

A function of torch that is called with a `DomainTensor` is looked up in `RULES`. Its rule moves the rows that this
rank needs, calls the function on parts, and says how the result is cut. Each layer of `torch.nn` arrives here as
one call, such as `conv2d` or `batch_norm`. A function without a rule is refused: nobody takes a part's value for
the whole's.

    part of a DomainTensor      gradients of its rows are complete on the rank that has them
    ordinary tensor             the same on all ranks of the axes, and so is its gradient
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DomainError
from ..groups.process_group import ProcessGroup
from ..mesh import DeviceMesh
from ..utils.torch_internals import TRANSFORMS, plain_tensors, transform_level
from .layout import Layout, assembled, part_numels

Rule = Callable[..., Any]
"""Called with the function and its arguments, tensors treated as ordinary ones; returns the result."""

RULES: dict[Any, Rule] = {}
"""The rule of each function of torch."""


_COMPOSED: set[Rule] = set()
"""Rules that call other functions of torch with the tensors as they are."""


def rule(*functions: Any, is_composed: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of functions of torch; those that are None are left out."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((each for each in functions if each is not None), function))
        if is_composed:
            _COMPOSED.add(function)
        return function

    return register


composed = partial(rule, is_composed=True)
"""Register a rule that calls other functions of torch with the tensors as they are."""
_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""Names of numpy for arguments, which torch takes, too."""
_FIRST = ("condition", "input", "self", "x", "a", "x1", "tensor", "tensors", "A")
"""Names of first arguments, in torch or numpy: rules get them by their place."""


_IN_PLACE = re.compile(r"(?!requires_grad_).*[^_]_|__setitem__|__i(?!n|te).*__")
"""Names of functions that change their first argument."""


class DomainTensor(Tensor):
    """This rank's part of a tensor; made by a `Domain`, and by functions of other such tensors.

    Attributes:
        whole: The whole's shape, and how it is cut.
        mesh: The ranks.
        is_copy: True if it has rows of other ranks where torch would have a view of another tensor.
    """

    whole: Layout
    mesh: DeviceMesh
    is_copy: bool = False

    def __new__(cls, *args: Any) -> DomainTensor:
        """Refuse: a `Domain` makes such tensors.

        Raises:
            TypeError: Always.
        """
        raise TypeError("DomainTensor: expected a Domain to make it; call domain.from_local, shard or scatter")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function's rule; refuse functions without one."""
        options = {_ALIASES.get(name, name): value for name, value in (kwargs or {}).items()}
        first = [name for name in _FIRST if not args and name in options][:1]
        args = [*args, *(options.pop(name) for name in first)]
        if (found := RULES.get(func)) is None:
            raise refused(func, "has no rule for tensors that are cut over ranks", *args)
        if options.pop("out", None) is not None:
            raise refused(func, "would write into `out`", *args)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if transform_level() is not None or caller.startswith(TRANSFORMS):
            raise refused(
                func, "is called by a transform such as torch.vmap, which takes parts by themselves", *args
            )
        with plain_tensors():
            operands = tensors_in([*args, *options.values()])
            cut = [each for each in operands if isinstance(each, DomainTensor)]
            check_parameters(cut, operands)
            if any(_is_foreign(each.grad_fn) for each in cut):
                raise refused(func, "takes the result of an autograd.Function, whose backward sees parts", *cut)
            if found not in _COMPOSED:
                return found(func, *args, **options)
        return found(func, *args, **options)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, without history; collective over the ranks of the axes that cut it."""
        part, numels = self.to_local(), part_numels(self.whole, self.mesh)
        parts = self.mesh.group(*self.whole.axes).backend.all_gather(part.reshape(-1), sizes=numels)
        return assembled(parts.split(numels), self.whole, self.mesh)

    def to_local(self) -> Tensor:
        """Return this rank's part, without history; local. It shares memory with this tensor."""
        with plain_tensors():
            return part_of(self.detach())

    def set_(self, *args: Any, **options: Any) -> Any:
        """Refuse: torch would not ask for a rule, and the part would be another tensor's."""
        raise refused(Tensor.set_, "would give the part the elements of another tensor", self)

    def as_subclass(self, cls: Any) -> Any:
        """Refuse, as `set_`: the result would be the part; `to_local` gives it."""
        raise refused(Tensor.as_subclass, "would give the part; x.to_local() gives it", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refused(Tensor.__reduce_ex__, "would save a part for the whole", self)


class CopiedRows(Tensor):
    """An ordinary tensor of other ranks' rows, where torch would have a view: it refuses to be changed in place."""

    is_copy = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with ordinary tensors; refuse to change rows, whose views are such tensors, too."""
        if DomainTensor in types:
            return NotImplemented
        options, is_first = kwargs or {}, bool(args) and isinstance(args[0], cls)
        if is_first and (_IN_PLACE.fullmatch(func.__name__) or options.get("inplace")):
            raise refused(func, "would not change the tensor that this one is a slice of; clone() it before")
        if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__):
            return func(part_of(args[0]), *args[1:])
        with plain_tensors():
            result = func(*args, **options)
            is_view = isinstance(result, Tensor) and (result._is_view() or func is Tensor.detach)
            return Tensor.as_subclass(result, cls) if is_first and is_view else result


def part_of(tensor: Tensor) -> Tensor:
    """Return a tensor, or the part of one that is cut, as an ordinary tensor, with its history; local."""
    return Tensor.as_subclass(tensor, Tensor)


def _is_foreign(node: Any) -> bool:
    """Return True for the node of an `autograd.Function` that is not this package's; local."""
    if not isinstance(node, BackwardCFunction):
        return False
    return not type(node)._forward_cls.__module__.startswith(f"{__package__.partition('.')[0]}.")  # type: ignore[attr-defined]


_compared: MutableMapping[Tensor, set[ProcessGroup]] = WeakIdKeyDictionary()
"""The groups over which a parameter has been compared."""


def check_parameters(cut: Sequence[DomainTensor], operands: Iterable[Tensor]) -> None:
    """Refuse parameters that differ over the ranks; collective at their first use, local later.

    Args:
        cut: Tensors that are used together with the parameters.
        operands: Tensors, some of which may be parameters.
    """
    parameters = [
        each for each in operands if not isinstance(each, DomainTensor) and isinstance(each, nn.Parameter)
    ]
    if not cut or not parameters:
        return
    group = cut[0].mesh.group(*dict.fromkeys(axis for each in cut for axis in each.whole.axes))
    new = [each for each in parameters if group not in _compared.get(each, ())]
    if not new:
        return
    words = {1: torch.int8, 2: torch.int16}
    bits = [each.detach().reshape(-1).view(words.get(each.element_size(), torch.int32)) for each in new]
    sums = torch.stack([each.sum() for each in bits])
    differ = (group.backend.all_gather(sums.unsqueeze(0)) != sums).any(0).tolist()
    if any(differ):
        shapes = [list(each.shape) for each, other in zip(new, differ, strict=True) if other]
        raise DomainError(
            f"parameters: expected the same values on all ranks of the domain, but shapes {shapes} differ; "
            "seed all ranks alike before the model is made, or wrap it in ax.DDP over the domain's axes, too"
        )
    for each in new:
        _compared.setdefault(each, set()).add(group)


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments, and among the members of lists and tuples; local."""
    nested = [tensors_in(arg) if isinstance(arg, list | tuple) else [arg] for arg in args]
    return [arg for members in nested for arg in members if isinstance(arg, Tensor)]


def made(part: Tensor, whole: Layout, mesh: DeviceMesh) -> Tensor:
    """Return a part that a rule has computed as a tensor that shows its whole, if an axis cuts it; local."""
    return as_domain_tensor(part, whole, mesh) if whole.axes else part


def as_domain_tensor(part: Tensor, whole: Layout, mesh: DeviceMesh) -> DomainTensor:
    """Return a part, which nobody else has, as a tensor that shows its whole; local."""
    if type(part) is Tensor:
        part.__class__ = DomainTensor  # a view would make each change in place a change of its base
    tensor = part if isinstance(part, DomainTensor) else part.as_subclass(DomainTensor)
    tensor.whole, tensor.mesh = whole, mesh
    return tensor


def refused(func: Any, why: str, *args: Any) -> DomainError:
    """Return the error of a function that cannot be computed on parts; local."""
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    cuts = [
        f"dim {tensor.whole.dim_of(axis)} by {axis!r}"
        for tensor in tensors_in(args)
        if isinstance(tensor, DomainTensor)
        for axis in tensor.whole.axes
    ]
    cut = f" (cut: {', '.join(dict.fromkeys(cuts))})" if cuts else ""
    return DomainError(
        f"{name}: expected a function that can be computed on parts, but it {why}{cut}. Compute it with other "
        "functions, on x.full_tensor(), or by axonmpi.domain.local_map"
    )
