"""The optimizer, AdamW, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from .config import OptimizerConfig
from .parallel_model import ParallelModel


def make_optimizer(
    model: ParallelModel, matrices: Collection[str], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Make AdamW, with weight decay for matrices only; local.

    Args:
        model: The model.
        matrices: Names of the parameters that decay.
        config: The settings.
    """
    parameters = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters if name in matrices], "weight_decay": config.weight_decay},
        {"params": [p for name, p in parameters if name not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: a straight rise, then half a cosine (Loshchilov and Hutter 2017).

    Args:
        step: Number of the step, from 0.
        steps: Number of steps of the run; the last step, `steps - 1`, has `lr * lr_final`.
        config: Highest rate, final fraction and length of the warm-up.

    Returns:
        The rate, from just above 0 up to `config.lr`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    through = (step - config.warmup_steps + 1) / max(1, steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, through))) / 2
    return config.lr * (config.lr_final + (1 - config.lr_final) * cosine)
