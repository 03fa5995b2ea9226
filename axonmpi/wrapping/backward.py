"""What wrappers that reduce gradients have in common while a backward runs.

    output   ── hook: a backward begins ─▶ leaf ── hook: its gradient is complete ─▶ ... ─▶ end of backward

Reductions are launched in one order, the same on all ranks, whatever order gradients come in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..utils.torch_internals import sequence_number
from .autograd import accumulates_into, leaf_below, tensors_in

__all__ = ["check_dense", "launch_in_order", "watch_output", "weakly"]


class Reduction(Protocol):
    """A reduction that is launched once in a backward."""

    launched: bool


R = TypeVar("R", bound=Reduction)


def launch_in_order(
    reductions: Iterable[R], launch: Callable[[R], object], is_ready: Callable[[R], bool] = lambda _: True
) -> None:
    """Launch reductions in their order up to the first one that is not ready; collective as far as `launch` is.

    Args:
        reductions: All of a backward; those launched before are passed over.
        launch: Launches one and marks it.
        is_ready: Whether one can be launched; by default all can.
    """
    for reduction in reductions:
        if reduction.launched:
            continue
        if not is_ready(reduction):
            break
        launch(reduction)


def check_dense(name: str, gradient: Tensor | None) -> None:
    """Raise if a gradient is sparse; local.

    Raises:
        ValueError: Naming the parameter.
    """
    if gradient is not None and gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is sparse, which cannot be averaged over ranks; build its module with "
            "sparse=False"
        )


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives, and else returns None; local.

    Hooks that autograd holds are out of sight of Python's garbage collector: they must not keep a model alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


def watch_output(output: Any, hook: Callable[[bool], None], since: int = 0) -> None:
    """Have a function called when a backward begins at one of the tensors of a module's output; local.

    Args:
        output: What the module returned.
        hook: Gets whether the backward accumulates gradients, as `torch.autograd.grad` does not.
        since: Tensors are passed over whose nodes have a lower sequence number: the module was given them.
    """
    for tensor in tensors_in(output):
        node = tensor.grad_fn  # a leaf has none, and would gather a hook in every forward
        if node is not None and sequence_number(node) >= since:
            tensor.register_hook(partial(_call, hook, leaf_below(tensor)))


def _call(hook: Callable[[bool], None], leaf: Node | None, _gradient: Tensor) -> None:
    hook(accumulates_into(leaf))
