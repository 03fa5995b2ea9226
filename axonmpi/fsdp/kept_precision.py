"""Modules excluded from mixed precision: they compute in the dtype of their parameters.

    the unit in bfloat16 ─▶ float32 ── batch norm ── float32 ─▶ bfloat16 ── the next layer

All other modules compute in `MixedPrecision.param_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..wrapping.autograd import map_tensors
from .options import MixedPrecision

__all__ = ["converted", "keep_precision", "kept_modules"]


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with their floating-point tensors converted, in nested containers, too; local."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def kept_modules(model: nn.Module, precision: MixedPrecision) -> dict[nn.Module, nn.Module]:
    """Return the excluded modules and their submodules, each with its outermost excluded module; local."""
    kept: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # outer ones first
        if precision.keeps(module) and module not in kept:
            kept.update(dict.fromkeys(module.modules(), module))
    return kept


def keep_precision(kept: Iterable[nn.Module], dtype: torch.dtype, is_off: Callable[[], bool]) -> None:
    """Convert inputs and outputs of excluded modules; local.

    Args:
        kept: The outermost excluded modules.
        dtype: Dtype of the other modules' computation.
        is_off: Returns True while the model computes without mixed precision.
    """
    for module in kept:
        tensors = (*module.parameters(), *module.buffers())
        own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        if own is not None:
            module.register_forward_pre_hook(partial(_widen, own, is_off), with_kwargs=True)
            module.register_forward_hook(partial(_narrow, dtype, is_off))


def _widen(
    dtype: torch.dtype, is_off: Callable[[], bool], _module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    return None if is_off() else converted((args, kwargs), dtype)


def _narrow(dtype: torch.dtype, is_off: Callable[[], bool], _module: nn.Module, _args: Any, output: Any) -> Any:
    return None if is_off() else converted(output, dtype)
