"""`DomainTensor`: this rank's part of a tensor that shows the whole's shape, and the table of rules for functions.

A function of torch that is called with a `DomainTensor` is looked up in `RULES`. Its rule moves the rows that this
rank needs, calls the function on parts, and says how the result is cut. Each layer of `torch.nn` arrives here as
one call, such as `conv2d` or `batch_norm`. A function without a rule is refused: nobody takes a part's value for
the whole's.

    part of a DomainTensor      gradients of its rows are complete on the rank that has them
    ordinary tensor             the same on all ranks of the axes, and so is its gradient
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import resolve_name

from ..errors import DomainError
from ..mesh import DeviceMesh
from ..utils.torch_internals import TRANSFORMS, plain_tensors, transform_level
from .layout import Layout, assembled, part_numels

Rule = Callable[..., Any]
"""Called with the function and its arguments, tensors treated as ordinary ones; returns the result."""

RULES: dict[Any, Rule] = {}
"""The rule of each function of torch."""


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of functions of torch; those that are None are left out."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((each for each in functions if each is not None), function))
        return function

    return register


_COMPOSED: set[Rule] = set()


def composed(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule that calls other functions of torch with the tensors as they are."""

    def register(function: Rule) -> Rule:
        _COMPOSED.add(function)
        return rule(*functions)(function)

    return register


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
        found, options = RULES.get(func), dict(kwargs or {})
        if found is None:
            raise refused(func, "has no rule for tensors that are cut over ranks", *args)
        if options.pop("out", None) is not None:
            raise refused(func, "would write into `out`", *args)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if transform_level() is not None or caller.startswith(TRANSFORMS):
            raise refused(
                func, "is called by a transform such as torch.vmap, which takes parts by themselves", *args
            )
        with plain_tensors():
            cut = [each for each in tensors_in([*args, *options.values()]) if isinstance(each, DomainTensor)]
            if any(_is_foreign(each.grad_fn) for each in cut):
                raise refused(func, "takes the result of an autograd.Function, whose backward sees parts", *cut)
            if found not in _COMPOSED:
                return found(func, *args, **options)
        return found(func, *args, **options)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, without history; collective over the ranks of the axes that cut it."""
        part = self.to_local()
        parts = self.mesh.group(*self.whole.axes).backend.all_gather(part.reshape(-1), sizes=self._numels())
        return assembled(parts.split(self._numels()), self.whole, self.mesh)

    def to_local(self) -> Tensor:
        """Return this rank's part, without history; local. It shares memory with this tensor."""
        with plain_tensors():
            return self.detach().as_subclass(Tensor)

    def _numels(self) -> list[int]:
        """Return the elements of each rank's part; local."""
        return part_numels(self.whole, self.mesh)

    def set_(self, *args: Any, **options: Any) -> Any:
        """Refuse: torch would not ask for a rule, and the part would be another tensor's."""
        raise refused(Tensor.set_, "would give the part the elements of another tensor", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refused(Tensor.__reduce_ex__, "would save a part for the whole", self)


def _is_foreign(node: Any) -> bool:
    """Return True for the node of an `autograd.Function` that is not this package's; local."""
    if not isinstance(node, BackwardCFunction):
        return False
    return not type(node)._forward_cls.__module__.startswith(f"{__package__.partition('.')[0]}.")  # type: ignore[attr-defined]


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
