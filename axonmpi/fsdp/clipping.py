"""The norm of a gradient that is divided among ranks (layer 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..group import ProcessGroup
from ..types import ReduceOp

__all__ = ["clip_grad_norm"]


@torch.no_grad()
def clip_grad_norm(
    parts: Sequence[nn.Parameter],
    group: ProcessGroup,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down so that the norm of all ranks' together is at most `max_norm`; collective.

    Args:
        parts: This rank's parts of the parameters.
        group: The ranks that have the others.
        max_norm: The largest norm.
        norm_type: Its exponent.
        error_if_nonfinite: Raise if the norm is infinite or no number.

    Returns:
        [] the norm before, float32.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected 0 or more, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or infinity, got {norm_type}")
    gradients = [part.grad for part in parts if part.grad is not None and part.grad.numel()]
    norm = _global_norm(gradients, group, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradient is {norm}, so it cannot be clipped")
    factor = max_norm / (norm + 1e-6)
    if factor < 1 or not math.isfinite(norm):
        for gradient in gradients:
            gradient.mul_(factor)
    return torch.tensor(norm, dtype=torch.float32)


def _global_norm(gradients: Sequence[Tensor], group: ProcessGroup, norm_type: float) -> float:
    norms = [float(torch.linalg.vector_norm(g, norm_type, dtype=_wide(g.dtype))) for g in gradients]
    if math.isinf(norm_type):
        total, op = torch.tensor(max(norms, default=0.0), dtype=torch.float64), ReduceOp.MAX
        if any(math.isnan(norm) for norm in norms):  # max() may pass over it
            total.fill_(math.nan)
    else:
        total, op = torch.tensor(sum(norm**norm_type for norm in norms), dtype=torch.float64), ReduceOp.SUM
    if group.size > 1:
        group.all_reduce(total, op)
    return float(total) if math.isinf(norm_type) else float(total) ** (1 / norm_type)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
