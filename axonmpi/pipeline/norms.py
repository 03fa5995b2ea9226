"""The norm of the gradients of all stages (layer 5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from ..types import ReduceOp

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    elsewhere: Collection[int],
    backend: Backend,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; collective, in place.

    Args:
        parameters: Those of this rank.
        elsewhere: Ids of those that count on another rank.
        backend: Of all ranks.
        max_norm: The largest norm that is left as it is.
        norm_type: Which norm, above 0.

    Returns:
        [] float32, the norm before.

    Raises:
        ValueError: `max_norm` is negative, or `norm_type` not above 0.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"expected max_norm from 0 and norm_type above 0, got {max_norm} and {norm_type}")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere]
    own = torch.nn.utils.get_total_norm(counted, norm_type).to(torch.float32).reshape(1)
    if norm_type == float("inf"):
        backend.all_reduce(own, ReduceOp.MAX)
        norm = own
    else:
        powers = own**norm_type
        backend.all_reduce(powers)
        norm = powers ** (1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale[0]) if gradients else None
    return norm[0]
