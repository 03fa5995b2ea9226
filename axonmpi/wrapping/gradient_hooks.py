"""Hooks of a wrapper on autograd: the begin of a backward, and each complete gradient.

    output   ── hook: a backward begins ─▶ leaf ── hook: its gradient is complete ─▶ ... ─▶ end of backward

A wrapper launches its reductions in one order, the same on all ranks, in whatever order gradients become complete.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..errors import CollectiveTimeoutError
from ..groups.process_group import ProcessGroup
from ..launch.user_variables import debugs
from ..utils.text import counted
from ..utils.torch_internals import engine_runs, hooks_on, plain_tensors, sequence_number
from .nested import tensors_in
from .optimizer_hooks import mark_gradient

_HOOKED = "_axonmpi_watched"
_LEAF = "torch::autograd::AccumulateGrad"


# ---- hooks --------------------------------------------------------------------------------------------------


def hook_gradient(parameter: Tensor, hook: Callable[[Any, Any], None]) -> tuple[Node, RemovableHandle]:
    """Call a function when a backward has completed a parameter's gradient, after all hooks on it; local.

    Args:
        parameter: A leaf that requires grad.
        hook: Its two arguments are of no use. It is also called if backward reaches the parameter without a
            gradient.

    Returns:
        The parameter's node, which the caller keeps, as autograd otherwise makes another one; and the hook's
        handle.
    """
    node = get_gradient_edge(parameter).node
    setattr(parameter, _HOOKED, True)  # autograd does not list the hooks of a node
    return node, node.register_hook(hook)


def is_watched(parameter: Any) -> bool:
    """Return True if hooks of users or wrappers are called with a parameter's gradient; local."""
    before, after = hooks_on(parameter)
    only_marks = all(hook is mark_gradient for hook in after)
    return bool(before) or not only_marks or getattr(parameter, _HOOKED, False)


def watch_output(output: Any, hook: Callable[[bool], None], *, since: int = 0, is_outermost: bool = True) -> bool:
    """Call a function when backward comes to a tensor of a module's output; local.

    Returns:
        True if the output has such a tensor.

    Args:
        output: The module's result.
        hook: Its argument is True if a backward begins here that accumulates gradients. `torch.autograd.grad` does
            not.
        since: Tensors whose nodes have a lower sequence number were inputs of the module, and are passed over.
        is_outermost: True for the whole model; no backward begins at the output of other modules.
    """
    has_tensor = False
    for tensor in tensors_in(output):
        node = tensor.grad_fn  # a leaf has none, and would gather a hook in every forward
        if node is not None and sequence_number(node) >= since:
            leaf = _leaf_below(node) if is_outermost else None
            with plain_tensors():  # a DomainTensor has no rule for hooks
                tensor.register_hook(partial(_call, hook, is_outermost, leaf))
            has_tensor = True
    return has_tensor


def _call(hook: Callable[[bool], None], is_outermost: bool, leaf: Node | None, _gradient: Tensor) -> None:
    hook(is_outermost and _accumulates_into(leaf))


def _leaf_below(node: Node) -> Node | None:
    """Find a leaf into which a backward through a node accumulates a gradient; None if there is none."""
    nodes = [node]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node.name() == _LEAF:
            return node
        if node not in seen:
            seen.add(node)
            nodes += [child for child, _ in node.next_functions if child is not None]
    return None


def _accumulates_into(leaf: Node | None) -> bool:
    """Return True if a backward runs, and False for `torch.autograd.grad`, which leaves `.grad` alone; local.

    Args:
        leaf: Node of a leaf of the graph that runs; None if there is none.
    """
    if leaf is None:
        return True
    try:
        return engine_runs(leaf)
    except RuntimeError:  # torch.autograd.grad, with this leaf among its inputs
        return False


def weakly(method: Callable[..., Any], *objects: object) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object and some arguments live, and else returns None.

    Python's garbage collector does not see hooks that autograd holds, so they must not keep a model alive. Local.

    Args:
        method: The method.
        *objects: Its first arguments.
    """
    references: list[Callable[[], Any]] = [weakref.WeakMethod(method), *map(weakref.ref, objects)]

    def call(*args: Any) -> Any:
        alive, *first = (reference() for reference in references)
        return None if alive is None or any(each is None for each in first) else alive(*first, *args)

    return call


# ---- reductions ---------------------------------------------------------------------------------------------


class _Pausable(Protocol):
    """A reducer of gradients that can be switched off."""

    enabled: bool


@contextmanager
def accumulating(owner: _Pausable) -> Iterator[None]:
    """Let gradients accumulate on each rank in the block; local."""
    before, owner.enabled = owner.enabled, False
    try:
        yield
    finally:
        owner.enabled = before


def wait_for_all(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all reductions and raise the first error; local.

    After an error the other reductions are waited for as well, since they still write into their memory.

    Args:
        waits: Functions that each wait for one reduction.
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


def watched_rank(group: ProcessGroup) -> int | None:
    """Return this rank's number in the world if gradients are searched for nan (`AXONMPI_DEBUG=1`); local."""
    return int(group.members[group.rank]) if debugs() else None


def check_gradient(name: str, gradient: Tensor | None, rank: int | None = None) -> None:
    """Check this rank's gradient of a parameter before it is averaged; local.

    Args:
        name: The parameter's name.
        gradient: The gradient; None if the parameter has none.
        rank: This rank's number, to warn of values that are nan; None: do not look at values.

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
