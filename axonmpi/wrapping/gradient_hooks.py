"""What wrappers that reduce gradients have in common while a backward runs.

    output   ── hook: a backward begins ─▶ leaf ── hook: its gradient is complete ─▶ ... ─▶ end of backward

Reductions are launched in one order, the same on all ranks, whatever order gradients come in.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..errors import CollectiveTimeoutError
from ..groups.process_group import ProcessGroup
from ..launch.settings import debugs
from ..utils.text import counted
from ..utils.torch_internals import sequence_number
from .nested import accumulates_into, leaf_below, tensors_in


class Reduction(Protocol):
    """A reduction that is launched once in a backward."""

    launched: bool


class Pausable(Protocol):
    """What reduces gradients while it is enabled."""

    enabled: bool


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


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all reductions and raise the first failure; local.

    After a failure the others are waited for as well: they still write into their memory.

    Args:
        waits: Each waits for one.
    """
    errors: list[Exception] = []
    for wait in waits:
        try:
            wait()
        except CollectiveTimeoutError:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def accumulating(owner: Pausable) -> Iterator[None]:
    """Let gradients accumulate on each rank in the block; local."""
    before, owner.enabled = owner.enabled, False
    try:
        yield
    finally:
        owner.enabled = before


def watched_rank(group: ProcessGroup) -> int | None:
    """Return this rank's number in the world if its gradients are to be looked at (`AXONMPI_DEBUG=1`); local."""
    return int(group.members[group.rank]) if debugs() else None


def check_gradient(name: str, gradient: Tensor | None, rank: int | None = None) -> None:
    """Look at this rank's gradient of a parameter before it is averaged with those of the others; local.

    Args:
        name: The parameter's.
        gradient: If there is one.
        rank: This rank's number, to warn of values that are no numbers; None does not look at values.

    Raises:
        ValueError: The gradient is sparse.
    """
    if gradient is None:
        return
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is sparse, which cannot be averaged over ranks; build its module with "
            "sparse=False"
        )
    if rank is not None and (count := int(gradient.isnan().sum())):
        warnings.warn(
            f"rank {rank}: the gradient of {name!r} has {counted(count, 'value')} that are nan on this rank, of "
            f"{gradient.numel()}, before the average over ranks",
            RuntimeWarning,
            stacklevel=2,
        )


def weakly(method: Callable[..., Any], *objects: object) -> Callable[..., Any]:
    """Return a function that calls a bound method with some objects as long as all live, else returns None; local.

    Hooks that autograd holds are out of sight of Python's garbage collector: they must not keep a model alive.

    Args:
        method: The method.
        *objects: Its first arguments.
    """
    references: list[Callable[[], Any]] = [weakref.WeakMethod(method), *map(weakref.ref, objects)]

    def call(*args: Any) -> Any:
        alive, *first = (reference() for reference in references)
        return None if alive is None or any(each is None for each in first) else alive(*first, *args)

    return call


def watch_output(output: Any, hook: Callable[[bool], None], *, since: int = 0, is_outermost: bool = True) -> bool:
    """Have a function called when backward comes to one of the tensors of a module's output; local.

    Returns:
        Whether there is such a tensor.

    Args:
        output: What the module returned.
        hook: Gets whether a backward begins here that accumulates gradients, as `torch.autograd.grad` does not.
        since: Tensors are passed over whose nodes have a lower sequence number: the module was given them.
        is_outermost: Whether the module is the model; no backward begins at the output of others.
    """
    is_watched = False
    for tensor in tensors_in(output):
        node = tensor.grad_fn  # a leaf has none, and would gather a hook in every forward
        if node is not None and sequence_number(node) >= since:
            leaf = leaf_below(tensor) if is_outermost else None
            tensor.register_hook(partial(_call, hook, is_outermost, leaf))
            is_watched = True
    return is_watched


def _call(hook: Callable[[bool], None], is_outermost: bool, leaf: Node | None, _gradient: Tensor) -> None:
    hook(is_outermost and accumulates_into(leaf))
