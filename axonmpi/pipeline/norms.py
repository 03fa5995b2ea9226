"""The norm of the gradients of all stages (layer 5)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from ..group import ProcessGroup
from ..norms import Copies, copy_counts
from ..norms import clip_grad_norm as clip_over_group

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    named: Sequence[tuple[str, Tensor]],
    elsewhere: Collection[int],
    stages: ProcessGroup,
    max_norm: float,
    norm_type: float,
    *,
    group: ProcessGroup,
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
        group: Those ranks, and others with other parts of the model.
        copies: On how many ranks of the group a gradient is.
        error_if_nonfinite: Raise if the norm is infinite or no number.

    Returns:
        [] float32, the norm before.

    Raises:
        ValueError: An argument does not fit.
    """
    if not all(group.contains(rank) for rank in stages.ranks):
        raise ValueError(
            f"group: expected one with all ranks of the pipeline, {list(stages.ranks)}, got {list(group.ranks)}; "
            "join the axes, as in mesh.group('pp', 'tp')"
        )
    counts = {
        parameter: math.inf if id(parameter) in elsewhere else count
        for (_, parameter), count in zip(named, copy_counts(named, copies), strict=True)
    }
    return clip_over_group(
        counts, max_norm, norm_type, group=group, copies=counts, error_if_nonfinite=error_if_nonfinite
    )
