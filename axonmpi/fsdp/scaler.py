"""Loss scaling where gradients are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..groups.world import ProcessGroup, group_of_this_rank
from ..types import ReduceOp
from ..utils.arguments import either_group_name, hint
from ..wrapping.partial import ordinary_gradients

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` that skips a step on all ranks if any rank's part of the gradients is not finite.

    With torch's own, ranks whose part is finite would step while others do not, and the scales would part ways.
    `unscale_()` and `step()` are collective.

    Args:
        device: Device of the gradients.
        process_group: The ranks that train the model; None means all.
        **options: As for `torch.amp.GradScaler`: `init_scale`, `growth_factor`, `backoff_factor`,
            `growth_interval`, `enabled`.

    Raises:
        TypeError: `device` is no name, or `process_group` no group.
    """

    @either_group_name
    def __init__(self, device: str = "cpu", process_group: ProcessGroup | None = None, **options: Any) -> None:
        if not isinstance(device, str):
            raise TypeError(f"device: expected the name of one, such as 'cpu', got {device!r}{hint(device)}")
        super().__init__(device, **options)
        self._group = group_of_this_rank(process_group)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with ordinary_gradients(parameters):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        own = found or {found_inf.device: found_inf}  # a rank may have a part of no parameter
        for flag in own.values():
            self._group.all_reduce(flag, ReduceOp.MAX)
        return own
