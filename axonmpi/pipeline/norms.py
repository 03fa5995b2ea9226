"""The norm of the gradients of all stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from ..collectives.gradient_norm import Copies, clip_over, copy_counts, divided_axes
from ..groups.world import ProcessGroup

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    named: Sequence[tuple[str, Tensor]],
    elsewhere: Collection[int],
    stages: ProcessGroup,
    max_norm: float,
    norm_type: float,
    *,
    group: ProcessGroup | None,
    copies: Copies | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; collective, in place.

    Args:
        named: The parameters of this rank.
        elsewhere: Ids of those that count as another one, with which they are tied.
        stages: The ranks of the pipeline.
        max_norm: The largest norm that is left as it is.
        norm_type: Which norm.
        group: Those ranks, and others with other parts of the model; None: all that parameters are divided among.
        copies: On how many ranks of the group a gradient is.
        error_if_nonfinite: Raise if the norm is infinite or no number.

    Returns:
        [] float32, the norm before.

    Raises:
        ValueError: An argument does not fit.
    """
    asked = [stages if group is None else group]
    if not all(asked[0].contains(rank) for rank in stages.ranks):
        raise ValueError(
            f"group: expected one with all ranks of the pipeline, {list(stages.ranks)}, got "
            f"{list(asked[0].ranks)}; join the axes, as in mesh.group('pp', 'tp')"
        )
    if group is None and copies is None:
        asked = [*(axis.group for axis in divided_axes(parameter for _, parameter in named)), stages]
    pairs = [
        (parameter, math.inf if id(parameter) in elsewhere else count)
        for (_, parameter), count in zip(named, copy_counts(named, copies, asked), strict=True)
    ]
    return clip_over(pairs, asked, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
