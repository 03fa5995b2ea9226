"""The course of the learning rate: a straight rise, then half a cosine (Loshchilov and Hutter 2017).

step 0 ──rises──► step warmup_steps: lr ──half a cosine──► last step: lr x lr_final
"""

from __future__ import annotations

import math

from .config import OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step.

    Args:
        step: Number of the step, from 0.
        steps: Number of steps of the run; the last one, `steps - 1`, has `lr * lr_final`.
        config: Highest rate, final fraction and length of the warm-up.

    Returns:
        The rate, from just above 0 up to `config.lr`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    through = (step - config.warmup_steps + 1) / max(1, steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, through))) / 2
    return config.lr * (config.lr_final + (1 - config.lr_final) * cosine)
