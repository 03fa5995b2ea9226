"""The norm of a gradient whose shards are on several ranks, and its clipping.

    norm = ( sum over ranks and parameters of |gradient|^p / copies )^(1/p)

                    tp 0        tp 1
    weight          rows 0-3    rows 4-7    sharded: each rank's rows count in full             copies 1
    layer norm      all rows    all rows    replicated: each rank's count half, once in all     copies 2

Every parameter counts once, as in `torch.nn.utils.clip_grad_norm_` on one process with the full model. Ranks with
equal gradients, as in data parallelism, need not all be in the group.

Parameters of FSDP and of tensor parallel layers are marked with the axes along which they are sharded. The sum runs
over one axis after the other; a parameter that is not sharded along an axis is replicated on its ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..utils.arguments import check_flags, number
from ..utils.device import device_at
from ..utils.torch_internals import plain_tensors, scale_all
from .sharded_parameters import Axis, axes_of, replica_axis

Copies = float | Mapping[Any, float] | Callable[[Tensor], float]
"""Number of ranks with the same gradient: one for all, by name or parameter (1 for others), or a function."""

_TINY = 1e-6


def clip_grad_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: ProcessGroup | None = None,
    copies: Copies | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down, in place, so that their norm over all ranks is at most `max_norm`.

    Collective, one small message for each axis.

    Args:
        parameters: This rank's parameters, or their module; parameters without a gradient are passed over.
        max_norm: The largest norm; infinity only measures, as long as the norm is finite.
        norm_type: 1, 2, any other positive number, or infinity.
        group: The ranks with different shards of the model. None means the ranks over which FSDP or tensor
            parallelism shards parameters; this rank alone for a model in DDP; all ranks otherwise.
        copies: Number of ranks of the group with the same gradient: one for all, a mapping by parameter, or by name
            if `parameters` is a module, or a function of the parameter; infinity leaves a parameter out of the
            norm. None takes the marks of wrappers and sharded layers, or 1 without marks.
        error_if_nonfinite: Raise if the norm is infinite or no number; gradients are left alone then.

    Returns:
        [] the norm before clipping, float32, the same on all ranks.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `max_norm` is negative, `norm_type` not positive, or `copies` does not fit; or the ranks differ
            in the first two, on all ranks.
        RuntimeError: The norm is not finite, with `error_if_nonfinite`; on all ranks.
    """
    named = _named(parameters)
    axes = sharding_axes(parameter for _, parameter in named)
    if group is None and copies is None and (axes or any(replica_axis(parameter) for _, parameter in named)):
        groups = [axis.group for axis in axes]
    else:
        groups = [group_of_this_rank(group, "group")]
    counts = copy_counts(named, copies, groups)
    pairs = [(parameter, count) for (_, parameter), count in zip(named, counts, strict=True)]
    return _clip(pairs, groups, max_norm, norm_type, error_if_nonfinite)


class ClipsGradients(ABC):
    """Base of models whose own wrapper counts the copies of each gradient."""

    @abstractmethod
    def _gradient_copies(
        self, group: ProcessGroup | None, copies: Copies | None
    ) -> tuple[list[tuple[Tensor, float]], list[ProcessGroup]]:
        """Return parameters with their numbers of copies, and the groups to sum over; local.

        Args:
            group: As for `clip_grad_norm`.
            copies: As for `clip_grad_norm`.

        Returns:
            Each parameter with the number of ranks, in all groups together, that have its gradient; the groups in
            the order of summation.
        """

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        group: ProcessGroup | None = None,
        copies: Copies | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale gradients down, in place, so that the norm of the full model's is at most `max_norm`; collective.

        Args:
            max_norm: The largest norm that is left as it is; infinity only measures.
            norm_type: 1, 2, any other positive number, or infinity, the largest absolute value.
            group: The ranks with different shards of the model, the ranks of this wrapper among them. None means
                these, and the ranks over which FSDP or tensor parallelism shards parameters.
            copies: Number of ranks of `group` with the same shard of a parameter, replicas of FSDP apart: one for
                all, a mapping by name or by parameter, or a function of the parameter. None takes the marks of
                sharded parameters, or 1 without marks.
            error_if_nonfinite: Raise if the norm is infinite or no number; gradients are left alone then.

        Returns:
            [] float32, the norm before clipping, tied parameters counted once; the same on all ranks.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: `max_norm` is negative or `norm_type` not positive, or `group` or `copies` does not fit.
            RuntimeError: The norm is not finite, with `error_if_nonfinite`; on all ranks.
        """
        return _clip(*self._gradient_copies(group, copies), max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def _clip(
    counted: Sequence[tuple[Tensor, float]],
    groups: Sequence[ProcessGroup],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    check_flags(error_if_nonfinite=error_if_nonfinite)
    max_norm, norm_type = number("max_norm", max_norm), number("norm_type", norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected 0 or more, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or infinity, got {norm_type}")
    gradients = [(p.grad, count) for p, count in counted if p.grad is not None]
    with plain_tensors():  # gradients of shards are of a class that refuses to be normed
        summed = [(grad, count) for grad, count in gradients if grad.numel() and count != math.inf]
        power = _power(summed, norm_type)
        for group in groups:
            power = _joined(power, max_norm, norm_type, group.backend.control)
        norm = power if math.isinf(norm_type) else power ** (1 / norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradient is {norm}, so it cannot be clipped")
        factor = max_norm / (norm + _TINY)
        if gradients and (factor < 1 or not math.isfinite(norm)):
            scale_all((gradient for gradient, _ in gradients), factor)
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


def sharding_axes(parameters: Iterable[Tensor]) -> list[Axis]:
    """Return the axes along which some of the parameters are sharded, each once; local."""
    return list({axis.group.ranks: axis for parameter in parameters for axis in axes_of(parameter)}.values())


def copy_counts(
    named: Iterable[tuple[str, Tensor]], copies: Copies | None, groups: Sequence[ProcessGroup]
) -> list[float]:
    """Return the number of ranks with the gradient of each parameter; local.

    Args:
        named: The parameters with their names; a parameter without a module has the name "".
        copies: As for `clip_grad_norm`.
        groups: The groups to sum over.

    Raises:
        TypeError: `copies` is of the wrong type.
        ValueError: It has an unknown name, or a number above that of the ranks.
    """
    named = list(named)
    if copies is None:
        members = {rank for group in groups for rank in group.ranks}
        axes = sharding_axes(p for _, p in named)
        return [_copies_among(members, axes, parameter) for _, parameter in named]
    if isinstance(copies, Mapping):
        names = {name for name, _ in named}
        for key in copies:
            if isinstance(key, str) and key not in names:
                raise ValueError(f"copies: expected names of parameters, got {key!r}; {_known(names)}")
        counts = [copies[name] if name and name in copies else copies.get(p, 1.0) for name, p in named]
    else:
        counts = [copies(parameter) if callable(copies) else copies for _, parameter in named]
    _check_counts(named, counts, math.prod(group.size for group in groups))
    return counts


def _copies_among(members: Collection[int], axes: Iterable[Axis], parameter: Tensor) -> float:
    """Return how many of some ranks have the same gradient of a parameter; local."""
    own = {axis.group.ranks: axis.copies for axis in axes_of(parameter)}
    replicas = replica_axis(parameter)
    copies = 1
    for axis in [*axes, replicas] if replicas is not None else axes:
        along = own.get(axis.group.ranks, axis.group.size)
        copies *= max(1, min(along, sum(rank in members for rank in axis.group.ranks)))
    return copies


def _known(names: set[str]) -> str:
    shown = sorted(filter(None, names))[:3]
    return (
        f"names here are {', '.join(map(repr, shown))}, ..." if shown else "parameters without a module have none"
    )


def _named(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in found:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters: expected a module or tensors, got {type(parameter).__name__}")
    return [("", parameter) for parameter in found]


def _check_counts(named: Sequence[tuple[str, Tensor]], counts: Sequence[float], ranks: int) -> None:
    for (name, parameter), count in zip(named, counts, strict=True):
        if not isinstance(count, (int, float)) or isinstance(count, bool):
            raise TypeError(f"copies: expected a number of ranks, got {count!r}")
        if not (1 <= count <= ranks or count == math.inf):
            shown = name or f"a parameter of shape {list(parameter.shape)}"
            raise ValueError(f"copies: expected 1 to {ranks}, the ranks of the group, got {count} for {shown}")


def _power(counted: Sequence[tuple[Tensor, float]], norm_type: float) -> float:
    """Return this rank's part of the sum of powers, or its largest norm if `norm_type` is infinite."""
    if not counted:
        return 0.0
    norms = [_norm(gradient, norm_type) for gradient, _ in counted]
    own = torch.tensor(device_at(norms[0].device).numbers(norms), dtype=torch.float64, device="cpu")
    if math.isinf(norm_type):
        return float(own.max())  # NaN if a norm is NaN
    copies = torch.tensor([count for _, count in counted], dtype=torch.float64, device="cpu")
    return float((own**norm_type / copies).sum())


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm


def _joined(power: float, max_norm: float, norm_type: float, backend: Backend) -> float:
    """Return the power of the norm over all ranks, in one message with the arguments to compare; collective."""
    if backend.size == 1:
        return power
    own = torch.tensor([[power, max_norm, norm_type]], dtype=torch.float64, device=backend.place)
    powers, *arguments = backend.all_gather(own).cpu().unbind(1)
    for name, values in zip(("max_norm", "norm_type"), arguments, strict=True):
        if len(set(values.tolist())) > 1:
            raise ValueError(f"{name}: expected the same on all ranks of the group, got {values.tolist()}")
    return float(powers.max() if math.isinf(norm_type) else powers.sum())
