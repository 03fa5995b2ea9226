"""Modules with replicated parameters that compute on a slice of the sequence, such as norms.

With sequence parallelism each rank normalizes its own positions. The parameters are the same on all ranks, and each
rank has the gradient of its positions only. So backward sums gradients over the ranks, all of a module's parameters
in one all-reduce. Optimizers, DDP and FSDP, which see the parameters themselves, find complete gradients.

Source: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ..regions import shared
from ..shards import Sharded

ACROSS_POSITIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
"""Norms that need the full sequence."""

_Module = TypeVar("_Module", bound=nn.Module)


def sequence_parallel_norm(module: _Module, group: ProcessGroup | None = None) -> _Module:
    """Let a module compute on slices of a sequence: its parameters' gradients are summed over the ranks; local.

    The module is changed in place: its class becomes a subclass of its own class. Parameters, their names and hooks
    stay as they are, and it may be wrapped in DDP or FSDP afterwards. Its backward is collective.

    Args:
        module: Any module whose parameters are the same on all ranks: `LayerNorm`, `RMSNorm`, those of other
            libraries, or a module around them.
        group: The ranks that have the slices of the sequence; None means all.

    Returns:
        The module.

    Raises:
        TypeError: `module` is no module, or `group` no group.
        ValueError: Its gradients are summed already, its parameters are divided, it does not treat each position
            alone, or its `forward` is an attribute of the instance.
    """
    _check(module)
    _sum_gradients(module, group_of_this_rank(group, "group"))
    return module


def sum_over_copies(module: nn.Module, group: ProcessGroup, copies: int) -> None:
    """Let the gradients of a module be summed over the ranks with the same parameters; collective.

    Args:
        module: Each rank computes another result with them; changed in place. With copies its backward is
            collective over the ranks that share the parameters.
        group: The ranks.
        copies: Number of neighbours in the group with the same parameters.
    """
    if copies > 1:
        parts = [range(first, first + copies) for first in range(0, group.size, copies)]
        backends = [group.private(part) for part in parts]
        mine = group.rank // copies
        _sum_gradients(module, ProcessGroup(backends[mine], [group.ranks[rank] for rank in parts[mine]]))


def _sum_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Let the gradients of all parameters of a module be summed over ranks that have the same ones; local.

    The module's class becomes a subclass of its own class, so that hooks before forward, such as FSDP's that gather
    the parameters, come first.

    Args:
        module: Each rank computes with another input; changed in place. Its backward is collective.
        group: The ranks.
    """
    changed: Any = module
    kind: Any = type(module)
    changed._gradient_group = group
    changed.__class__ = _summing_class(kind)


def _check(module: nn.Module) -> None:
    """Raise unless the sums of a module's gradients over the ranks are the gradients of the full sequence."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    for name, inner in module.named_modules():
        shown = repr(name) if name else type(module).__name__
        if isinstance(inner, _SumsGradients):
            raise ValueError(
                f"module: the gradients of {shown} are summed over the ranks already; "
                "call sequence_parallel_norm() once for each module"
            )
        if isinstance(inner, ACROSS_POSITIONS):
            raise ValueError(f"module: expected one that treats each position alone, {shown} does not")
        if isinstance(inner, Sharded):
            raise ValueError(f"module: expected the same parameters on all ranks, those of {shown} are divided")
        if "forward" in vars(inner):
            raise ValueError(
                f"module: expected the forward of its class, that of {shown} was replaced on the instance; call "
                "sequence_parallel_norm() before whatever replaces it"
            )


class _SumsGradients(nn.Module):
    """The base class in front of a module's own class."""

    _gradient_group: ProcessGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module's own class does."""
        with _summed_gradients(self, self._gradient_group):
            return super().forward(*args, **kwargs)


@functools.cache
def _summing_class(kind: Any) -> Any:
    """Return the subclass of a module's class, always the same one."""
    return type(kind.__name__, (_SumsGradients, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


@contextmanager
def _summed_gradients(module: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Replace a module's parameters by tensors whose gradients backward sums over the ranks."""
    owners: list[tuple[dict[str, Any], str, Tensor]] = [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    if not owners or not torch.is_grad_enabled():
        yield
        return
    unique = {id(parameter): parameter for _, _, parameter in owners}  # in an order that all ranks have
    through = dict(zip(unique, shared(list(unique.values()), group), strict=True))
    try:
        for owned, name, parameter in owners:
            owned[name] = through[id(parameter)]
        yield
    finally:
        for owned, name, parameter in owners:
            owned[name] = parameter
