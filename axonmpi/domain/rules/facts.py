"""Rules of questions about a tensor: its shape is the whole's; values that a part cannot give are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..domain_tensor import DomainTensor, made, rule
from .functions import named, properties

rule(*properties("shape"))(lambda func, x: x.whole.shape)
rule(*named("size"))(lambda func, x, dim=None: x.whole.shape if dim is None else x.whole.shape[dim])
rule(*named("numel nelement"))(lambda func, x: x.whole.shape.numel())
rule(*named("__len__"))(lambda func, x: x.whole.shape[0])
rule(*properties("nbytes"))(lambda func, x: x.whole.shape.numel() * x.itemsize)
rule(*named("__repr__ __format__"))(
    lambda func, x, *args, **options: f"DomainTensor({list(x.whole.shape)}, {x.dtype}, cut {x.whole})"
)


@rule(
    *properties(
        "ndim dtype device layout requires_grad is_leaf itemsize is_cuda is_cpu is_meta is_sparse is_quantized"
    ),
    *properties(
        "is_nested is_mkldnn is_xpu is_mps is_mtia is_sparse_csr is_vulkan is_ipu is_maia is_xla retains_grad"
    ),
    *properties("grad_fn output_nr _version names _backward_hooks"),
    *properties("requires_grad grad", access="__set__"),
    *named(
        "dim ndimension element_size is_floating_point is_complex is_inference is_conj is_neg is_signed get_device"
    ),
    *named("requires_grad_ retain_grad __hash__ is_tensor has_names _is_view is_contiguous"),
    *named("new_zeros new_ones new_full new_empty"),
)
def _same_for_parts(func: Any, x: DomainTensor, *args: Any, **options: Any) -> Any:
    return func(x, *args, **options)


@rule(*properties("grad"))
def _grad(func: Any, x: DomainTensor) -> Tensor | None:
    grad = func(x)
    return None if grad is None else made(grad.view_as(grad), x.whole, x.mesh)
