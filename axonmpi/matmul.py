"""Products of matrices by the quicker of two libraries that torch has, where torch does not choose it.

torch multiplies float32 matrices by MKL, which on AMD's processors does without AVX-512 and takes twice as long as
oneDNN. There, oneDNN computes what layers of this package compute, unless the product is too small to gain by it:

    linear           x @ wᵀ + b
    product          a @ b
    weight_gradient  dyᵀ @ x, in memory that is used again

`AXONMPI_MATMUL=torch` leaves all to torch, `AXONMPI_MATMUL=onednn` takes oneDNN on any processor that torch has it
for. Results are those of float32 either way, but not to the last bit the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .launch.settings import wanted_matmul
from .utils.memory import gradient_memory

__all__ = ["gains", "is_plain", "linear", "onednn_is_quicker", "product", "weight_gradient"]

_LEAST_ROWS = 4
_LEAST_PRODUCTS = 1 << 21
"""How many numbers are multiplied at least: below that oneDNN's preparations cost more than it gains."""
_CHUNK_BYTES = 1 << 20
"""How much of a weight's gradient is computed at a time: it stays in a core's cache until it is copied."""
_PLAIN = (Tensor, nn.Parameter)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ wᵀ + b; local. Where autograd records what is done, torch computes.

    Args:
        input: [..., in].
        weight: [out, in].
        bias: [out], or None.
    """
    tensors = [weight, input] if bias is None else [weight, input, bias]
    if is_plain(tensors) and gains(_rows_of(input), weight.numel(), tensors) and not _is_recorded(tensors):
        return _onednn(input, weight, bias)
    return F.linear(input, weight, bias)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right; local. Where autograd records what is done, torch computes.

    Args:
        left: [..., M, K].
        right: [K, N].
    """
    tensors = [left, right]
    if is_plain(tensors) and gains(_rows_of(left), right.numel(), tensors) and not _is_recorded(tensors):
        return _onednn(left, right.t(), None)
    return left @ right


def weight_gradient(parameter: Tensor, left: Tensor, right: Tensor, *, quick: bool = False) -> Tensor:
    """Return left @ right, which is a gradient of a parameter, in memory that is used again; local.

    Args:
        parameter: Whose gradient, or that of what it was made into, the product is.
        left: [M, K]; nothing is differentiated.
        right: [K, N].
        quick: Whether oneDNN may compute it.
    """
    if not is_plain([left, right]):
        return left @ right
    shape = left.shape[0], right.shape[1]
    memory = gradient_memory(parameter, shape, left.dtype)
    by_onednn = quick and gains(left.shape[1], shape[0] * shape[1], [left, right])
    if memory is None:
        return _onednn(left, right.t(), None) if by_onednn else left.mm(right)
    if not by_onednn:
        return torch.mm(left, right, out=memory)
    # oneDNN makes its own result: in chunks, which the allocator has at hand, it needs no pages of the system's.
    rows = max(64, _CHUNK_BYTES // (shape[1] * left.dtype.itemsize))
    transposed = right.t()
    for part, target in zip(left.split(rows), memory.split(rows), strict=True):
        target.copy_(_onednn(part, transposed, None))
    return memory


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_contiguous() and not weight.t().is_contiguous():
        weight = weight.contiguous()  # oneDNN has no quick way for others, and is a thousand times slower
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Say whether tensors are nothing but values in memory, and nothing looks at what is done with them; local.

    Not so under transforms of functions (vmap, grad), forward-mode differentiation, modes that change functions,
    and while torch traces.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and all(type(tensor) in _PLAIN and _is_dense(tensor) for tensor in tensors)
    )


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        return False
    functorch = torch._C._functorch
    return not (functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def gains(rows: int, numbers: int, tensors: Sequence[Tensor]) -> bool:
    """Say whether oneDNN computes a product more quickly than torch would, and may; local.

    Args:
        rows: With how many others each number of a matrix is multiplied.
        numbers: How many these are.
        tensors: All that takes part, plain ones.
    """
    return (
        rows >= _LEAST_ROWS
        and rows * numbers >= _LEAST_PRODUCTS
        and all(tensor.dtype is torch.float32 for tensor in tensors)
        and onednn_is_quicker()
        and not torch.is_autocast_enabled("cpu")
        and bool(torch._C._get_mkldnn_enabled())
    )


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _rows_of(tensor: Tensor) -> int:
    return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() else 0


@functools.cache
def onednn_is_quicker() -> bool:
    """Say whether products are left to oneDNN in this process; local."""
    wanted = wanted_matmul()
    operators: Any = torch.ops.mkldnn
    if wanted == "torch" or not torch.backends.mkldnn.is_available() or not hasattr(operators, "_linear_pointwise"):
        return False
    return wanted == "onednn" or (torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd())


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
