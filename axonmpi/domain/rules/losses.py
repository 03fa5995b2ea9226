"""Rules of losses: each rank computes its elements' losses, and their sum or mean is the whole's.

Torch's own functions in Python check and broadcast their arguments, and call one of the compiled functions below.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...utils.torch_internals import compiled_functions, plain_tensors, written_out
from ..domain_tensor import RULES, DomainTensor, composed, made, refused, rule
from ..layout import Layout
from ..movement import layout_of, shared, total
from .elementwise import as_in, common, mesh_of
from .functions import named
from .reductions import WIDE

_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cross_entropy gaussian_nll_loss hinge_embedding_loss
huber_loss kl_div l1_loss margin_ranking_loss mse_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss
smooth_l1_loss soft_margin_loss
"""
# Compiled functions, and the place of the reduction among their arguments.
_COMPILED: list[tuple[Any, int]] = [
    *(
        (getattr(compiled_functions, f"{name}_loss"), 2)
        for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")
    ),
    (compiled_functions.binary_cross_entropy, 3),
    (torch.kl_div, 2),
    (torch.hinge_embedding_loss, 3),
    (torch.margin_ranking_loss, 4),
    (torch.binary_cross_entropy_with_logits, 4),
    (torch.poisson_nll_loss, 5),
]
_NONE, _MEAN, _SUM = range(3)
"""Torch's numbers of reductions."""


composed(*(getattr(functional, name) for name in _LOSSES.split()))(
    lambda func, *args, **options: written_out(func)(*args, **options)
)


def _loss(func: Any, *args: Any, place: int, **options: Any) -> Tensor:
    with plain_tensors():
        losses: Tensor = RULES[torch.add](func, *args[:place], _NONE, *args[place + 1 :], **options)
    return losses if args[place] == _NONE else losses.mean() if args[place] == _MEAN else losses.sum()


for _function, _place in _COMPILED:
    composed(_function)(partial(_loss, place=_place))


# ---- classes ----------------------------------------------------------------------------------------------------


@rule(compiled_functions.cross_entropy_loss, compiled_functions.nll_loss_nd)
def _of_classes(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    *smoothing: float,
) -> Tensor:
    mesh, probabilities, of_target = mesh_of(func, [x, target]), target.is_floating_point(), layout_of(target)
    shape = layout_of(x).shape
    if of_target.shape != (shape if probabilities else shape[:1] + shape[2:]):
        raise ValueError(f"expected a target of the input's shape, without classes, got {of_target} for {shape}")
    if not probabilities:
        of_target = Layout((*of_target.dims[:1], (), *of_target.dims[1:]))
    whole = common([layout_of(x), of_target])
    if x.dim() < 2 or whole.is_cut(1) or isinstance(weight, DomainTensor):
        raise refused(func, "adds over classes, which are cut", x, target, weight)
    places = Layout(whole.dims[:1] + whole.dims[2:])
    (x, _), (target, _) = as_in(mesh, x, whole), as_in(mesh, target, whole if probabilities else places)
    if weight is not None:
        (weight,) = shared(mesh, whole.axes, [weight])
    losses = func(x, target, weight, _NONE, ignore_index, *smoothing)
    if reduction == _NONE:
        return made(losses, places, mesh)
    wide = WIDE.get(losses.dtype, losses.dtype)
    count = torch.tensor(losses.numel(), dtype=wide, device=losses.device)
    if not probabilities:  # the mean over classes divides by the weights of the targets that count
        counted = target != ignore_index
        weights = counted if weight is None else weight.detach()[target.where(counted, 0)] * counted
        count = weights.sum().to(wide)
    sums = total(mesh, whole.axes, torch.stack([losses.sum(dtype=wide), count]))
    return (sums[0] / sums[1] if reduction == _MEAN else sums[0]).to(losses.dtype)


# ---- distances --------------------------------------------------------------------------------------------------


composed(*named("pairwise_distance"))(
    lambda func, x1, x2, p=2.0, eps=1e-6, keepdim=False: torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
)


@composed(*named("cosine_similarity"))
def _cosine_similarity(func: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    first, second = (functional.normalize(x, 2.0, dim, eps) for x in torch.broadcast_tensors(x1, x2))
    return (first * second).sum(dim)
