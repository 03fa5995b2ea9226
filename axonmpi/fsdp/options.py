"""Options of FSDP: strategy, offload, mixed precision, and the modules that mixed precision leaves out.

    the unit in bfloat16 ─▶ float32 ── batch norm ── float32 ─▶ bfloat16 ── the next layer

Excluded modules compute in the dtype of their parameters, all others in `MixedPrecision.param_dtype`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import DtypeError
from ..utils.arguments import hint
from ..wrapping.nested import map_tensors

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ShardingStrategy(enum.Enum):
    """Sharding of parameters, gradients and optimizer state.

    Attributes:
        FULL_SHARD: All three are sharded; a unit is gathered when it computes (ZeRO-3).
        SHARD_GRAD_OP: The same, but gathered parameters are kept from forward for backward (ZeRO-2).
        NO_SHARD: Nothing is sharded, as in data parallelism.
        HYBRID_SHARD: As FULL_SHARD among the ranks of a node; each node has a replica.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
    """

    FULL_SHARD = "full"
    SHARD_GRAD_OP = "grad"
    NO_SHARD = "none"
    HYBRID_SHARD = "hybrid"


class CPUOffload(enum.Enum):
    """Offload of shards to larger memory than that of the device that computes.

    A model on the CPU is offloaded to files that are mapped into memory. A model on a GPU is offloaded to the
    CPU, with PARAMS as with FULL: parameters are copied to the GPU and gradients back while it computes, and the
    optimizer steps on the CPU. Before you change parameters by hand after a forward without a backward, call an
    optimizer's step, load a state or call `torch.cuda.synchronize()`.

    Attributes:
        NONE: Nothing is offloaded.
        PARAMS: The parameters are.
        FULL: The parameters, their gradients and the optimizer's state are.
    """

    NONE = "none"
    PARAMS = "params"
    FULL = "full"


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of computation and communication; the sharded parameters keep their own.

    Attributes:
        param_dtype: Dtype of gathered parameters and of a unit's floating-point inputs; None: no conversion.
        reduce_dtype: Dtype in which gradients are summed and rounded; None: that of the gradients, or float32 if
            that has 16 bits.
        buffer_dtype: Dtype of floating-point buffers, which are converted once; None: no conversion.
        keep: Classes of modules that compute in the dtype of their parameters and buffers: their inputs are
            converted to it, and their outputs to `param_dtype`. Batch norms always do.

    Raises:
        DtypeError: A dtype is no floating-point dtype.
        TypeError: `keep` has anything else than classes of modules.
    """

    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep: tuple[type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _FLOATING:
                raise DtypeError(
                    f"{name}: expected torch.bfloat16, torch.float16, torch.float32, torch.float64 or "
                    f"None, got {dtype}"
                )
        for kept in self.keep if isinstance(self.keep, tuple | list) else (self.keep,):
            if not (isinstance(kept, type) and issubclass(kept, nn.Module)):
                raise TypeError(f"keep: expected classes of modules, such as (nn.LayerNorm,), got {kept!r}")

    def keeps(self, module: nn.Module) -> bool:
        """Return True if a module computes in the dtype of its own parameters; local."""
        return isinstance(module, (*_BATCH_NORMS, *self.keep))

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of `dtype` compute; local."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are summed; local."""
        if not dtype.is_floating_point:
            return dtype
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return torch.float32 if dtype.itemsize < 4 else dtype


def checked_precision(mixed_precision: object) -> MixedPrecision:
    """Check and return the dtypes of mixed precision; local.

    Raises:
        TypeError: The argument is neither True nor False nor a `MixedPrecision`.
    """
    if mixed_precision is True:
        return MixedPrecision()
    if mixed_precision is False:
        return MixedPrecision(param_dtype=None)
    if not isinstance(mixed_precision, MixedPrecision):
        todo = hint(mixed_precision)
        raise TypeError(f"mixed_precision: expected True, False or a MixedPrecision, got {mixed_precision!r}{todo}")
    return mixed_precision


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with their floating-point tensors converted, also in nested containers; local."""
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

    def widen(own: torch.dtype, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if is_off() else converted((args, kwargs), own)

    def narrow(_module: nn.Module, _args: Any, output: Any) -> Any:
        return None if is_off() else converted(output, dtype)

    for module in kept:
        tensors = (*module.parameters(), *module.buffers())
        own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        if own is not None:
            module.register_forward_pre_hook(partial(widen, own), with_kwargs=True)
            module.register_forward_hook(narrow)
