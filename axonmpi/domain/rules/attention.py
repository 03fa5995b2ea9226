"""Attention whose tokens, heads or samples are cut over ranks.

    x = domain.shard(tokens)                    # Domain(mesh, {"cp": 1}), tokens [B, T, C]
    attention(q, k, v, is_causal=True)          # [B, H, T, D], T cut: as F.scaled_dot_product_attention
    attention(q, k, v, window=(512, 0))         # fetches 512 keys before the own rows, and no more

Tokens stay in their order. Causal work is dealt inside: rank r of P computes the rows of chunks r and 2P−1−r of 2P.
With `method="alltoall"` each rank computes some heads for all tokens instead.

Sources: Jacobs et al. 2023, "DeepSpeed Ulysses"; Liu et al. 2023, "Ring attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...autograd import fetch_rows, return_rows
from ...utils.arguments import check_flags
from ...utils.partition import split_bounds, split_sizes
from ...utils.rows import row_plan
from ...utils.torch_internals import plain_tensors
from ..blockwise import Blocks, Ranges, blockwise_attention, zigzag
from ..domain_tensor import DomainTensor, composed, made, part_of, refused, rule
from ..layout import Factor, Layout
from ..movement import gathered, layout_of, recut, simplified
from .elementwise import beside, common, mesh_of
from .shapes import reshape

_METHODS = ("auto", "ring", "alltoall")
_SDPA = functional.scaled_dot_product_attention
_Band = tuple[float, float]
"""Keys before and behind its own number that a query sees, at most."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: str = "auto",
) -> Tensor:
    """Return softmax(q kᵀ · scale + mask) v of the whole, cut as `q` is; collective.

    Ordinary tensors are the same on all ranks. Scores are never stored for all tokens. A query that sees no key
    gets 0, as in torch; write such masks as False or -inf, not as the smallest number.

    Args:
        q: [..., H, T, D], cut along any dimensions.
        k: [..., H, S, D], of fewer heads with `enable_gqa`.
        v: [..., H, S, E].
        attn_mask: [..., H, T, S], with broadcasting: True for keys that a query sees, or added to the scores.
        is_causal: Query i sees keys 0 to i.
        window: Keys before and behind its own number that a query sees.
        scale: Factor of the scores; None: D to the power of -0.5.
        enable_gqa: Each head of `k` and `v` serves H / their number of heads of `q`.
        method: "ring": keys and values pass from rank to rank. "alltoall": each rank computes some heads, for all
            tokens. "auto": the second if it sends less, without a mask or window, if the heads divide by the ranks.

    Raises:
        ValueError: `window` or `method` is another.
        DomainError: Tensors of two meshes, or "alltoall" without heads, or for heads that another axis cuts.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if method not in _METHODS:
        raise ValueError(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")
    if window is not None and (len(window) != 2 or any(not isinstance(n, int) or n < 0 for n in window)):
        raise ValueError(f"window: expected two numbers of keys, at least 0, before and behind, got {window!r}")
    before, after = window or (inf, inf)
    band = (before, 0 if is_causal else after)
    operands = [q, k, v, *([] if attn_mask is None else [attn_mask])]
    _check(operands, grouped=enable_gqa)
    scale = layout_of(q).shape[-1] ** -0.5 if scale is None else scale
    with plain_tensors():
        return _attention(operands, band, scale, method)


@rule(functional.scaled_dot_product_attention)
def _scaled_dot_product_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise refused(func, f"drops scores with dropout_p={dropout_p}, which has no rule", query, key, value)
    return attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@composed(functional.multi_head_attention_forward)
def _multi_head_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    if need_weights:
        raise refused(func, "returns the weights of all keys; call the layer with need_weights=False", query, key)
    if add_zero_attn or any(each is not None for each in (bias_k, bias_v, static_k, static_v)):
        raise refused(func, "adds keys of its own (add_bias_kv, add_zero_attn, static_k or static_v)", query, key)
    separate = q_proj_weight, k_proj_weight, v_proj_weight
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).movedim(0, -2)  # [B, H, T, D]
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    is_causal, masks = is_causal and key_padding_mask is None, []
    if attn_mask is not None and not is_causal:
        masks.append(attn_mask.unflatten(0, (-1, num_heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask.unsqueeze(-2).unsqueeze(-2))
    mask = sum(_hiding(each, query.dtype) for each in masks) if masks else None
    mixed = _scaled_dot_product_attention(_SDPA, q, k, v, mask, dropout_p if training else 0.0, is_causal)
    return functional.linear(mixed.movedim(-2, 0).flatten(-2), out_proj_weight, out_proj_bias), None


def _hiding(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is True for hidden keys as numbers that are added to scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -inf) if mask.dtype is torch.bool else mask


# ---- who computes which rows and heads --------------------------------------------------------------------------


def _attention(operands: Sequence[Tensor], band: _Band, scale: float, method: str) -> Tensor:
    """Return the attention of parts, tensors treated as ordinary ones; collective.

    Args:
        operands: Queries, keys and values, and the mask if there is one.
        band: Which keys a query sees.
        scale: Factor of the scores.
        method: One of `_METHODS`.
    """
    cut = any(isinstance(tensor, DomainTensor) for tensor in operands)
    mesh: Any = mesh_of(_SDPA, operands) if cut else None
    operands = [_prepared(tensor) for tensor in operands]
    axis = _axis_for_heads(mesh, operands, band, method)
    heads, few = (layout_of(each).shape[-3:-2].numel() for each in operands[:2])
    grouped = 1 < few < heads
    if grouped:
        operands = [_in_groups(tensor, few) for tensor in operands]
    if axis is None:
        result = _by_rows(mesh, operands, band, scale)
    else:
        dim = -4 if grouped and few >= mesh.size(axis) else -3
        moved = [
            recut(x, axis, len(x.whole.dims) + dim)
            if isinstance(x, DomainTensor) and x.whole.axes_of(-2) == (axis,)
            else x
            for x in operands[:3]
        ]
        result = _by_rows(mesh, [*moved, *operands[3:]], band, scale)
        assert isinstance(result, DomainTensor)
        result = recut(result, axis, len(result.whole.dims) - 2)
    shape = layout_of(result).shape
    return reshape(result, (*shape[:-4], heads, *shape[-2:])) if grouped else result


def _check(operands: Sequence[Tensor], *, grouped: bool) -> None:
    """Raise an error for shapes and dtypes that do not fit; local."""
    q, k, v, *masks = shapes = [layout_of(tensor).shape for tensor in operands]
    heads = [each[-3:-2].numel() for each in (q, k)]
    if (
        min(map(len, shapes)) < 2
        or (q[-1], k[-3:-1]) != (k[-1], v[-3:-1])
        or (heads[0] % heads[1] if grouped and heads[1] else min(heads) != 1 and heads[0] != heads[1])
        or any(mask[-2] not in (1, q[-2]) or mask[-1] not in (1, k[-2]) for mask in masks)
    ):
        raise ValueError(
            f"attention: expected [H, T, D], [H, S, D], [H, S, E] and a mask [H, T, S] at the end, fewer heads of "
            f"keys and values with enable_gqa alone, got {[list(shape) for shape in shapes]}"
        )
    if len({each.dtype for each in operands[:3]}) > 1 and not torch.is_autocast_enabled(operands[0].device.type):
        raise ValueError(f"attention: expected one dtype, got {[each.dtype for each in operands[:3]]}")


def _prepared(x: Tensor) -> Tensor:
    """Return an operand without cuts of its features, whose tokens one axis cuts at most; may be collective."""
    if isinstance(x, DomainTensor):
        x = gathered(x, x.whole.axes_of(-1))
    return simplified(x, len(x.whole.dims) - 2) if isinstance(x, DomainTensor) else x


def _in_groups(x: Tensor, few: int) -> Tensor:
    """Return an operand with heads [few, others]: a group of queries for each head of keys; may be collective."""
    shape = layout_of(x).shape
    *batch, heads, rows, width = shape if len(shape) > 2 else (1, *shape)
    return reshape(x, (*batch, min(heads, few), max(heads // few, 1), rows, width))


def _axis_for_heads(mesh: Any, operands: Sequence[Tensor], band: _Band, method: str) -> str | None:
    """Return the axis whose ranks shall each compute some heads for all tokens; None: some tokens; local."""
    q, k, v, *masks = (layout_of(tensor) for tensor in operands)
    axis = q.axis_of(len(q.dims) - 2)
    free = all(len(each.dims) > 2 and set(each.axes_of(-3)) <= {axis} for each in (q, k, v))
    if method == "ring" or axis is None or (method == "auto" and (not free or masks or band[0] < inf)):
        return None
    if not free:
        raise refused(_SDPA, 'has no heads that are free to be cut, which method="alltoall" needs', *operands)
    ranks, heads, few = mesh.size(axis), q.shape[-3], k.shape[-3]
    alike = all(each.axes_of(-2) == (axis,) for each in (k, v)) and band[1] in (0, inf)
    less = alike and heads % ranks == 0 == few % ranks and heads + few < ranks * few
    return axis if less or method == "alltoall" else None


# ---- rows -------------------------------------------------------------------------------------------------------


def _by_rows(mesh: Any, operands: Sequence[Tensor], band: _Band, scale: float) -> Tensor:
    """Return the attention of operands as they are cut; collective.

    Args:
        mesh: The ranks; None without a tensor that is cut.
        operands: Queries, keys and values, and the mask, if any; heads of keys as of queries, or one.
        band: Which keys a query sees.
        scale: Factor of the scores.
    """
    layouts = [layout_of(tensor) for tensor in operands]
    # Queries come first: an axis that cuts their tokens cuts nothing else of the result.
    outer = [
        (*layout.dims[:-2], () if place in (1, 2) else layout.dims[-2]) for place, layout in enumerate(layouts)
    ]
    target, lent = common([Layout(dims) for dims in outer]), None
    last = len(target.dims) - 1
    axis = next((axis for layout in layouts[1:3] for axis in layout.axes_of(-2)), None)
    if axis is not None and axis not in target.axes and not target.is_cut(last):
        lent, target = axis, target.replaced({last: [Factor(target.shape[last], axis)]})
    rows = target.dims[last]
    keys = Factor(layouts[1].shape[-2], axis if axis == target.axis_of(last) else None)
    targets = [
        Layout.of([*target.dims[:last], [keys] if place in (1, 2) else rows, [Factor(layout.shape[-1])]])
        for place, layout in enumerate(layouts)
    ]
    parts = [part_of(part) for part in beside(mesh, operands, targets, target.axes)]
    whole = Layout.of([*target.dims, [Factor(layouts[2].shape[-1])]])
    result = made(_dealt(mesh, rows[0] if rows else Factor(1), keys, parts, band, scale), whole, mesh)
    return gathered(result, [lent]) if lent is not None and isinstance(result, DomainTensor) else result


def _dealt(mesh: Any, rows: Factor, keys: Factor, parts: list[Tensor], band: _Band, scale: float) -> Tensor:
    """Return this rank's part of the result; collective over the axis that cuts the tokens of queries.

    Args:
        mesh: The ranks.
        rows: The tokens of queries.
        keys: The tokens of keys; no axis: this rank has them all.
        parts: Queries, keys, values and the mask, if any.
        band: Which keys a query sees.
        scale: Factor of the scores.
    """
    count, axis = rows
    ranks, rank = (1, 0) if axis is None else (mesh.size(axis), mesh.rank(axis))
    queries, owned = (list[Ranges]((each,) for each in split_bounds(n, ranks)) for n in (count, keys.size))
    if keys.axis is None:
        return _computed(parts, Blocks(None, (queries[rank],), (((0, keys.size),),), *band, scale))
    group = mesh.group(axis)
    dealt = len(parts) == 3 and band == (inf, 0.0) and keys == rows
    if dealt:
        queries = owned = zigzag(count, ranks)
    blocks = Blocks(group, tuple(queries), tuple(owned), *band, scale)
    if not dealt:
        return _computed(parts, blocks)
    plans = [row_plan(split_sizes(count, ranks), ranges, "zeros") for ranges in zip(*queries, strict=True)]
    parts = [torch.cat([fetch_rows(part, plan, group, part.dim() - 2) for plan in plans], -2) for part in parts]
    result = _computed(parts, blocks)
    pieces = result.split([high - low for low, high in queries[rank]], -2)
    early, late = (return_rows(*each, group, result.dim() - 2) for each in zip(pieces, plans, strict=True))
    return early + late


def _computed(operands: Sequence[Tensor], blocks: Blocks) -> Tensor:
    """Return the attention of this rank's queries; collective over the group of `blocks`."""
    q, k, v, *masks = operands
    if torch.is_autocast_enabled(q.device.type) and q.dtype is not torch.float64:
        q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in operands))
    if 0 in batch:
        blocks = replace(blocks, queries=((),) * len(blocks.queries))
    width, shape = max(q.shape[-1], v.shape[-1]), (*batch, q.shape[-2], v.shape[-1])

    def opened(x: Tensor, batch: Sequence[int], heads: int, width: int) -> Tensor:  # [B, heads, rows, width]
        x = functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        return x.expand(*batch, heads, *x.shape[-2:]).reshape(prod(batch), heads, *x.shape[-2:])

    few = prod(k.shape[-3:-2])
    q, k, v = (opened(x, batch[:-1], heads, width) for x, heads in ((q, prod(batch[-1:])), (k, few), (v, few)))
    mask = None
    for each in masks:
        own = batch[:-1] if prod(each.shape[:-3]) > 1 else each.shape[:-3]
        mask = opened(each, own, prod(each.shape[-3:-2]), 0)
    return blockwise_attention(q, k, v, mask, blocks)[..., : shape[-1]].reshape(shape)
