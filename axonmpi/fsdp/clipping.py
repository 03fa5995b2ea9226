"""The norm of a gradient that is divided among ranks."""

from __future__ import annotations

from torch import Tensor

from ..collectives.gradient_norm import Copies, clip_over, copy_counts, divided_axes
from ..groups.world import ProcessGroup, chosen_group
from .groups import ShardingGroups
from .runtime import Run

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    run: Run,
    groups: ShardingGroups,
    max_norm: float,
    norm_type: float,
    *,
    group: ProcessGroup | None,
    copies: Copies | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients down so that the norm of all ranks' together is at most `max_norm`; collective.

    Args:
        run: Of the model.
        groups: The ranks that share it out, and those that hold replicas.
        max_norm: The largest norm.
        norm_type: Its exponent.
        group: Those ranks and others with other parts of the model; None: all ranks that parameters are divided
            among.
        copies: On how many ranks of the group a part is, replicas apart.
        error_if_nonfinite: Raise if the norm is infinite or no number.

    Returns:
        [] the norm before, float32.

    Raises:
        ValueError: An argument does not fit.
    """
    named = [
        (member.name, part)
        for unit in run.units
        for flat in unit.flats
        for member, part in zip(flat.members, flat.parts, strict=True)
    ]
    replicas = _replicas_in(group, groups)
    if group is not None:
        asked = [group]
    elif copies is not None:
        asked = [groups.shard]
    else:
        asked = [axis.group for axis in divided_axes(part for _, part in named)]
    counts = copy_counts(named, copies, asked)
    times = 1 if copies is None else replicas  # else the parts know
    pairs = [(part, count * times) for (_, part), count in zip(named, counts, strict=True)]
    return clip_over(pairs, asked, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def _replicas_in(group: ProcessGroup | None, groups: ShardingGroups) -> int:
    """Return how many ranks of a group have the same parts; the ones that share the model out must be in it."""
    if group is None:
        return 1
    chosen_group(group)
    missing = [rank for rank in groups.shard.ranks if not group.contains(rank)]
    if groups.shard.size > 1 and missing:
        raise ValueError(
            f"group: expected one with all ranks that share the parameters out, {list(groups.shard.ranks)}, got "
            f"{list(group.ranks)}; join the axes, as in mesh.group('dp', 'tp')"
        )
    same = () if groups.replicas is None else groups.replicas.ranks
    return max(1, sum(group.contains(rank) for rank in same))
