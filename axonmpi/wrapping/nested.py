"""How wrappers of modules meet autograd.

The tensors of a model's output, the leaves below them, and hooks on the gradients of parameters.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..utils.torch_internals import engine_runs, hooks_on
from .optimizer_hooks import mark_gradient

_WATCHED = "_axonmpi_watched"
_LEAF = "torch::autograd::AccumulateGrad"


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a model's output: nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None))


def map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments of a model with their tensors converted, in containers as `tensors_in` has them; local.

    Containers are copied, with all that they have besides.
    """
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        mapped: Any = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, convert)
        return mapped
    if isinstance(value, list | tuple):
        items = [map_tensors(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name, None), convert))
        return mapped
    return value


def leaf_below(tensor: Tensor) -> Node | None:
    """Find the node of one leaf into which a backward through this tensor accumulates a gradient.

    Args:
        tensor: One that requires grad.
    """
    nodes = [get_gradient_edge(tensor).node]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node.name() == _LEAF:
            return node
        if node not in seen:
            seen.add(node)
            nodes += [child for child, _ in node.next_functions if child is not None]
    return None


def accumulates_into(leaf: Node | None) -> bool:
    """Say whether a backward runs, and not a `torch.autograd.grad`, which leaves gradients alone; local.

    Args:
        leaf: Node of a leaf of the graph that runs; None: there is none.
    """
    if leaf is None:
        return True
    try:
        return engine_runs(leaf)
    except RuntimeError:  # torch.autograd.grad, asked for this very leaf
        return False


def hook_gradient(parameter: Tensor, hook: Callable[[Any, Any], None]) -> tuple[Node, RemovableHandle]:
    """Have a function called when a backward is done with a parameter's gradient, after all hooks on it; local.

    Args:
        parameter: One that requires grad.
        hook: Its two arguments are of no use. Called also where backward reaches the parameter without a gradient.

    Returns:
        The parameter's node, to be kept, as autograd otherwise makes another one; and the hook's handle.
    """
    node = get_gradient_edge(parameter).node
    setattr(parameter, _WATCHED, True)  # autograd does not tell about hooks on nodes
    return node, node.register_hook(hook)


def is_watched(parameter: Any) -> bool:
    """Say whether hooks want to see a parameter's gradient; local."""
    before, after = hooks_on(parameter)
    only_marks = all(hook is mark_gradient for hook in after)
    return bool(before) or not only_marks or getattr(parameter, _WATCHED, False)
