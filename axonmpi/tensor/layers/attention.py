"""Self-attention with its heads sharded over ranks.

    x ── queries, keys, values: a column layer ── each rank its heads ── output: a row layer ── sum over ranks

A head is computed alone, so each rank computes its own from the input to the sum: one all-reduce in forward, and
one in backward for the gradient of the input. With sequence parallelism these are an all-gather and a
reduce-scatter.

Several query heads may share a key/value head (grouped queries). With fewer key/value heads than ranks, several
ranks have the same one:

    4 ranks, 8 query heads, 2 key/value heads        rank 0      rank 1      rank 2      rank 3
                                                     q0 q1       q2 q3       q4 q5       q6 q7
                                                     k0 v0       k0 v0       k1 v1       k1 v1
                                                       └─ gradients summed ┘   └─ gradients summed ┘

Source: Shoeybi et al. 2019 (arXiv:1909.08053); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); rotary
positions: Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ...utils.arguments import check_flags, integer, number
from ..regions import enter
from ..shards import Shard
from .dropout import ShardedDropout
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import sum_over_copies


class ParallelSelfAttention(nn.Module):
    """Self-attention with its heads sharded over the ranks, from [B, T, D] to [B, T, D]; made collectively.

    Under the same seed its initial values are those of `torch.nn.Linear` layers made in the order of the
    attributes: `query_key_value` and `output`, or with grouped queries `query`, `key_value` and `output`.

    Args:
        hidden: Features D of the input and the output.
        num_heads: Query heads, a multiple of the number of ranks.
        group: The ranks; None means all.
        num_kv_heads: Key/value heads, a divisor of `num_heads` and a multiple or a divisor of the number of ranks;
            None means as many as query heads.
        head_dim: Features C of a head; None means `hidden / num_heads`.
        bias: Whether the layers have biases.
        causal: Whether a position attends only to itself and the positions before it.
        dropout: The probability that an attention weight becomes zero while training. The masks of a head do not
            depend on the rank that has it.
        rotary: Whether queries and keys are rotated by their position; features c and c + C/2 form a pair.
        rotary_base: The base of the frequencies.
        sequence_parallel: Each rank gets and returns its slice of the sequence.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        query_key_value: [D -> 3 * heads * C] queries, then keys, then values; None with grouped queries.
        query: [D -> heads * C] with grouped queries, else None.
        key_value: [D -> 2 * key/value heads * C] keys, then values, with grouped queries; else None.
        output: [heads * C -> D].
        dropout: Of attention weights; its `generator` may be set.

    Raises:
        ValueError: The sizes do not fit each other or the ranks, or `dropout` is not from 0 to 1.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        group: ProcessGroup | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        causal: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        rotary_base: float = 10_000.0,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.process_group = group_of_this_rank(group, "group")
        check_flags(bias=bias, causal=causal, rotary=rotary, sequence_parallel=sequence_parallel)
        counts = {"hidden": hidden, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in counts.items():
            if count is not None:
                integer(name, count)
        number("rotary_base", rotary_base)
        ranks = self.process_group.size
        pairs = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(num_heads, pairs, ranks)
        self.head_dim = _head_dim(hidden, num_heads, head_dim, rotary)
        self.hidden = hidden
        self.num_heads = num_heads
        self.num_kv_heads = pairs
        self.causal = causal
        self.dropout = ShardedDropout(dropout, self.process_group, 1, num_heads)
        self._rotation = _Rotation(self.head_dim, rotary_base) if rotary else None
        self.query_key_value: ColumnParallelLinear | None = None
        self.query: ColumnParallelLinear | None = None
        self.key_value: ColumnParallelLinear | None = None
        options: dict[str, Any] = {"bias": bias, "process_group": self.process_group, "device": device}
        options.update(dtype=dtype, sequence_parallel=sequence_parallel)
        of_heads = num_heads * self.head_dim
        self._sequence_parallel = sequence_parallel
        if pairs == num_heads:
            shard = Shard.packed(0, [of_heads] * 3, ranks)
            self.query_key_value = ColumnParallelLinear(hidden, shard.size, shard=shard, **options)
        else:
            self.query = ColumnParallelLinear(hidden, of_heads, input_is_entered=True, **options)
            shard = Shard.heads(0, pairs, self.head_dim, ranks, parts=2)
            self.key_value = ColumnParallelLinear(hidden, shard.size, shard=shard, input_is_entered=True, **options)
            sum_over_copies(self.key_value, self.process_group, shard.copies)
        self.output = RowParallelLinear(of_heads, hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of each sequence; collective, and so is backward.

        Args:
            x: [B, T, D] the same on all ranks, or with sequence parallelism [B, T / ranks, D].

        Returns:
            A new tensor of the same shape.

        Raises:
            ValueError: `x` has another shape.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden:
            raise ValueError(
                f"expected an input [batch, sequence, {self.hidden}], got shape {list(x.shape)} "
                f"on rank {self.process_group.rank}"
            )
        query, key, value = self._project(x)  # [B, own heads, T, C] each
        if self._rotation is not None:
            query, key = self._rotation.apply(query, key)
        mixed = _attend(query, key, value, self.causal, self.dropout)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of this rank's heads."""
        if self.query_key_value is not None:
            query, key, value = _by_head(self.query_key_value(x), 3, self.head_dim)
            return query, key, value
        assert self.query is not None
        assert self.key_value is not None
        x = enter(x, self.process_group, sequence_parallel=self._sequence_parallel)
        (query,) = _by_head(self.query(x), 1, self.head_dim)
        key, value = _by_head(self.key_value(x), 2, self.head_dim)
        return query, key, value

    def extra_repr(self) -> str:
        """Describe the module in `repr()`."""
        return f"hidden={self.hidden}, heads={self.num_heads}, kv_heads={self.num_kv_heads}, causal={self.causal}"


tensor_parallel_attention = ParallelSelfAttention
"""`ParallelSelfAttention` under the name of a function, for calls beside `tensor_parallelize`."""


# ---- sizes ------------------------------------------------------------------------------------------------------


def _check_heads(heads: int, pairs: int, ranks: int) -> None:
    """Raise unless the heads can be divided among the ranks."""
    if heads < 1 or heads % ranks:
        raise ValueError(
            f"num_heads: expected a multiple of the {ranks} ranks of the group, got {heads}; "
            "use another number of heads or ranks"
        )
    if pairs < 1 or heads % pairs:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {heads}, got {pairs}")
    if pairs % ranks and ranks % pairs:
        raise ValueError(
            f"num_kv_heads: expected a multiple or a divisor of the {ranks} ranks of the group, got {pairs}; "
            "use another number of heads or ranks"
        )


def _head_dim(hidden: int, heads: int, given: int | None, rotary: bool) -> int:
    """Return the width of a head."""
    if given is None and (hidden < 1 or hidden % heads):
        raise ValueError(
            f"hidden: expected a multiple of num_heads = {heads}, got {hidden}; "
            "use another size, or say with head_dim= how wide a head is"
        )
    width = hidden // heads if given is None else given
    if width < 1 or (rotary and width % 2):
        expected = "an even number, as rotary positions need pairs" if rotary else "at least 1"
        raise ValueError(f"head_dim: expected {expected}, got {width}")
    return width


# ---- computing --------------------------------------------------------------------------------------------------


def _by_head(projected: Tensor, parts: int, width: int) -> tuple[Tensor, ...]:
    """Take [B, T, parts * heads * C] apart into `parts` tensors [B, heads, T, C]."""
    separate: tuple[Tensor, ...] = projected.unflatten(-1, (parts, -1, width)).permute(2, 0, 3, 1, 4).unbind(0)
    return separate


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: ShardedDropout) -> Tensor:
    """Return the attention's output before the projection, [B, heads, T, C]."""
    groups = query.shape[1] // key.shape[1]
    if not dropout.training or dropout.p == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=groups > 1)
    weights, value = attention_weights(query, key, value, None, causal, enable_gqa=groups > 1)
    return dropout(weights) @ value  # type: ignore[no-any-return]


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weights of `torch.nn.functional.scaled_dot_product_attention`, before dropout; local.

    Returns:
        The weights, [B, heads, T, S] in the dtype of the values, and the values, repeated for each query head.
    """
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    precise = torch.float32 if scores.dtype.itemsize < 4 else None
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        weights = scores.softmax(-1, precise)
    elif mask.dtype is not torch.bool:
        weights = (scores + mask).softmax(-1, precise)
    else:
        # the least number and not -inf: positions that may see none get weights of zero, and not NaN
        hidden = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = hidden.softmax(-1, precise).masked_fill(~mask, 0.0)
    return weights.to(value.dtype), value


class _Rotation:
    """Rotary positions; the table is made once for the longest sequence so far."""

    def __init__(self, width: int, base: float) -> None:
        self._frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
        self._table = torch.empty(2, 0, width // 2, device="cpu")

    def apply(self, *tensors: Tensor) -> list[Tensor]:
        """Rotate tensors [B, heads, T, C] by the positions along T."""
        length = tensors[0].shape[-2]
        if self._table.shape[1] < length or self._table.device != tensors[0].device:
            with torch.inference_mode(False):  # a table made for inference may serve training later
                angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), self._frequencies)
                table = torch.stack((angles.cos(), angles.sin())).float()
                self._table = table.to(tensors[0].device)
        return [_rotate(tensor, self._table[:, :length]) for tensor in tensors]


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    cosine, sine = table.to(x.dtype).unbind(0)  # [T, C/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
