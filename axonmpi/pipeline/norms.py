"""The norm of the gradients of all stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from ..collectives.gradient_norm import Copies, copy_counts, divided_axes
from ..groups.world import ProcessGroup

__all__ = ["gradient_copies"]


def gradient_copies(
    named: Sequence[tuple[str, Tensor]],
    elsewhere: Collection[int],
    stages: ProcessGroup,
    group: ProcessGroup | None,
    copies: Copies | None,
) -> tuple[list[tuple[Tensor, float]], list[ProcessGroup]]:
    """Return how the norm over all stages is taken, see `ClipsGradients`; local.

    Args:
        named: The parameters of this rank.
        elsewhere: Ids of those that count as another one, with which they are tied.
        stages: The ranks of the pipeline.
        group: Those ranks, and others with other parts of the model; None: all that parameters are divided among.
        copies: On how many ranks of the group a gradient is.

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
    counted = [
        (parameter, math.inf if id(parameter) in elsewhere else count)
        for (_, parameter), count in zip(named, copy_counts(named, copies, asked), strict=True)
    ]
    return counted, asked
