"""Attention by blocks: each rank has some rows of queries, and the keys and values of all ranks come to it in turn.

    queries      ranges of rows, such as chunks r and 2P−1−r of causal attention, which makes ranks' work alike
    keys         this rank's own block, then another rank's at each step, fetched while the one before is used
    a tile       rows of queries and a block's keys that they see: the scores that exist at one time
    results      of tiles merge by their logarithms of sums of exponentials, in float32 (float64 for float64)

Only those rows of a block move that some query of the rank sees, so a window fetches its halo alone. Backward
fetches the blocks again, and sends gradients of keys and values to their owners, in float32 for 16-bit tensors.

Sources: Liu et al. 2023, "Ring attention"; Dao 2023, "FlashAttention-2"; Brandon et al. 2023, "Striped attention".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import return_rows
from ..groups.process_group import ProcessGroup
from ..types import Work
from ..utils.partition import split_bounds
from ..utils.rows import RowPlan, row_plan
from ..utils.torch_internals import flash_attention, flash_attention_backward, plain_tensors
from .domain_tensor import part_of
from .movement import apply

_ROWS = 256
"""Rows of queries of a tile with a mask."""
_SCORES = 2**22
"""Elements of the scores of a tile that are written out, at most, if one row has no more."""


Ranges = tuple[tuple[int, int], ...]
"""The number of the first row of each range in the whole, and that of the row behind it."""


class _Tile(NamedTuple):
    """Rows of queries and the keys that they see, of one block.

    Attributes:
        rows: The queries among this rank's.
        first: The first query's number in the whole.
        keys: The keys among the block's.
        start: The first key's number in the whole.
        causal: Whether query i sees keys 0 to i of the tile.
    """

    rows: slice
    first: int
    keys: slice
    start: int
    causal: bool


@dataclass(frozen=True)
class Blocks:
    """Who has which queries and keys, and which keys a query sees.

    Attributes:
        group: The ranks among which keys are cut; None: this rank has them all, and is the only one here.
        queries: [ranks] the ranges of queries that each rank has, one behind the other.
        keys: [ranks] the ranges of keys that each rank has, likewise.
        before: Keys before the query's number that it sees, at most.
        after: Keys behind it.
        scale: Factor of the scores.
    """

    group: ProcessGroup | None
    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    before: float
    after: float
    scale: float

    @property
    def rank(self) -> int:
        """This rank's number among those of `queries` and `keys`."""
        return 0 if self.group is None else self.group.rank

    @cached_property
    def plans(self) -> dict[int, RowPlan]:
        """The rows that each rank gets of the keys of the rank 1, 2 ... numbers behind it, if a rank gets some."""
        count = len(self.keys)
        sizes = tuple(sum(high - low for low, high in ranges) for ranges in self.keys)
        steps = {step: tuple(self._seen(r, (r + step) % count) for r in range(count)) for step in range(1, count)}
        seen = {step: rows for step, rows in steps.items() if any(low < high for low, high in rows)}
        return {step: row_plan(sizes, rows, "zeros") for step, rows in seen.items()}

    def _seen(self, rank: int, owner: int) -> tuple[int, int]:
        """Return the rows of all ranks' keys from the first to the last of an owner's that a rank's queries see."""
        edges = [edge for start, stop in self.queries[rank] if start < stop for edge in (start, stop)]
        at, rows = sum(high - low for ranges in self.keys[:owner] for low, high in ranges), []
        for low, high in self.keys[owner] if edges else ():
            start, stop = max(low, edges[0] - self.before), min(high, edges[-1] + self.after)
            if start < stop:
                rows += [at + int(start) - low, at + int(stop) - low]
            at += high - low
        return (rows[0], rows[-1]) if rows else (at, at)

    def tiles(self, owner: int, skipped: int, rows: int | None) -> Iterator[_Tile]:
        """Yield the tiles of a block.

        Args:
            owner: The rank that has its keys.
            skipped: The owner's keys before the block.
            rows: Rows of queries of a tile with a mask; None: no mask is needed but that of causal attention.
        """
        at = 0
        for start, stop in self.queries[self.rank]:
            for a in range(start, stop, rows or max(stop - start, 1)):
                b, row = min(a + (rows or stop), stop), -skipped
                for low, high in self.keys[owner]:
                    tiles = [(a, max(low, a - self.before), min(high, b + self.after), False)]
                    if rows is None and self.after == 0:  # keys before the first query, and those of the diagonal
                        first = max(a, low)
                        tiles = [(a, low, min(high, a), False), (first, first, min(high, b), True)]
                    for first, c, d, causal in tiles:
                        if first < b and c < d:
                            mine, keys = (
                                (at + first - start, at + b - start),
                                (row + int(c) - low, row + int(d) - low),
                            )
                            yield _Tile(slice(*mine), first, slice(*keys), int(c), causal)
                    row += high - low
            at += stop - start


def zigzag(rows: int, ranks: int) -> list[Ranges]:
    """Return an early and a late chunk of rows for each rank; local.

    In causal attention later queries see more keys. With such queries and keys ranks have equal work in each step.
    """
    chunks = split_bounds(rows, 2 * ranks)
    return [(chunks[number], chunks[-1 - number]) for number in range(ranks)]


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blocks: Blocks) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks; collective forward and backward.

    Args:
        q: [B, H, rows, D], the rows of `blocks.queries`, one range behind the other.
        k: [B, H or 1, keys, D], this rank's.
        v: As `k`.
        mask: [B or 1, H or 1, rows or 1, all keys or 1] True for keys that a query sees, or added to the scores.
        blocks: The rows of each rank.
    """
    result: Tensor = apply(_BlockwiseAttention, q, k, v, mask, blocks)
    return result


class _BlockwiseAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blocks: Blocks) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, logs = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -inf, dtype=wide)
        fast, rows = rows_of_a_tile(q, mask, blocks, gradient_of_mask=False)
        with torch.autocast(q.device.type, enabled=False):
            for owner, skipped, block, _plan in _passing(blocks, _joined(k, v)):
                for tile in blocks.tiles(owner, skipped, rows):
                    added = None if rows is None else _added(tile, mask, blocks, logs)
                    keys, values = _opened(block, tile)
                    part = _attend(q[:, :, tile.rows], keys, values, added, tile.causal, blocks.scale, fast)
                    _merge(out[:, :, tile.rows], logs[:, :, tile.rows], *part)
        ctx.blocks = blocks
        ctx.save_for_backward(q, k, v, mask, out, logs.masked_fill_(logs == -inf, 0))  # rounded, `out` costs digits
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (q, k, v, mask, out, logs), blocks = ctx.saved_tensors, ctx.blocks
        with plain_tensors(), torch.autocast(q.device.type, enabled=False):
            fast, rows = rows_of_a_tile(q, mask, blocks, gradient_of_mask=ctx.needs_input_grad[3])
            grad, joined = part_of(grads[0]).contiguous(), _joined(k, v)
            to_q, to_own = torch.zeros_like(q, dtype=logs.dtype), torch.zeros_like(joined, dtype=logs.dtype)
            to_mask = torch.zeros_like(mask, dtype=logs.dtype) if ctx.needs_input_grad[3] else None
            for owner, skipped, block, plan in _passing(blocks, joined):
                to_block = to_own if plan is None else torch.zeros_like(block, dtype=logs.dtype)
                for tile in blocks.tiles(owner, skipped, rows):
                    added = None if rows is None else _added(tile, mask, blocks, logs)
                    mine = [each[:, :, tile.rows] for each in (grad, q, out, logs)]
                    keys, values = _opened(block, tile)
                    part = _differentiate(mine, keys, values, added, tile.causal, blocks.scale, fast)
                    targets = [to_q[:, :, tile.rows], *_opened(to_block, tile)]
                    targets += [] if to_mask is None else [_mask_part(to_mask, tile)]
                    for target, gradient in zip(targets, part, strict=False):  # scores only beside a mask
                        target += gradient.sum_to_size(target.shape)
                if blocks.group is not None and plan is not None:
                    to_own += return_rows(to_block, plan, blocks.group, 0)
            to_k, to_v = (each.to(k.dtype) for each in to_own.movedim(0, 2).chunk(2, -1))
            return to_q.to(q.dtype), to_k, to_v, None if to_mask is None else to_mask.to(mask.dtype), None


def rows_of_a_tile(
    q: Tensor, mask: Tensor | None, blocks: Blocks, *, gradient_of_mask: bool
) -> tuple[bool, int | None]:
    """Return whether torch's kernel serves, and the rows of tiles with masks, None if no mask is needed; local."""
    if gradient_of_mask or q.device.type != "cpu":
        longest = max(stop - start for start, stop in chain.from_iterable(blocks.keys))
        return False, max(1, min(_ROWS, _SCORES // max(q.shape[0] * q.shape[1] * longest, 1)))
    return True, None if mask is None and blocks.before == inf and blocks.after in (0, inf) else _ROWS


# ---- blocks of keys and values ----------------------------------------------------------------------------------


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values as rows [keys, B, H, 2 D], which move together."""
    return torch.cat([k, v], -1).movedim(2, 0)


def _opened(block: Tensor, tile: _Tile) -> tuple[Tensor, ...]:
    """Return the keys and the values of a tile, [B, H, keys, D]; they share memory with the block."""
    return block[tile.keys].movedim(0, 2).chunk(2, -1)


def _passing(blocks: Blocks, rows: Tensor) -> Iterator[tuple[int, int, Tensor, RowPlan | None]]:
    """Yield blocks of keys: the own one, then those of other ranks, while the next one is on its way; collective.

    Each comes with its owner, the number of the owner's keys before it, and the plan by which it was fetched.
    """
    rank, count = blocks.rank, len(blocks.keys)
    fetched = (((rank + step) % count, plan, *_begin(blocks, plan, rows)) for step, plan in blocks.plans.items())
    steps: Iterator[Any] = chain([(rank, None, rows, None)], fetched, [None])
    for (owner, plan, block, work), _next in pairwise(steps):
        if work is not None:
            work.wait()
        yield owner, 0 if plan is None else plan.ranges[rank][0] - sum(plan.sizes[:owner]), block, plan


def _begin(blocks: Blocks, plan: RowPlan, rows: Tensor) -> tuple[Tensor, Work | None]:
    """Return the block that this rank gets by a plan, and how to wait for it; collective."""
    assert blocks.group is not None
    block = rows.new_empty((plan.rows(blocks.rank), *rows.shape[1:]))
    shown = [rows[:0], *(rows[low:high] for low, high in plan.shown[blocks.rank])]
    taken = [block] if plan.foreign(blocks.rank) else []
    backend = blocks.group.backend
    return block, backend.exchange_rows(shown, taken, plan.forward, async_op=True, label="attention")


# ---- tiles ------------------------------------------------------------------------------------------------------


def _mask_part(mask: Tensor, tile: _Tile) -> Tensor:
    """Return a mask's part for a tile; it shares memory with the mask."""
    mask = mask[:, :, tile.rows] if mask.shape[2] > 1 else mask
    keys = slice(tile.start, tile.start + tile.keys.stop - tile.keys.start)
    return mask[..., keys] if mask.shape[3] > 1 else mask


def _added(tile: _Tile, mask: Tensor | None, blocks: Blocks, like: Tensor) -> Tensor:
    """Return the numbers that a mask and a window add to a tile's scores, of another tensor's dtype."""
    rows, keys = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
    distance = torch.arange(tile.start, tile.start + keys, device=like.device)
    distance = distance - torch.arange(tile.first, tile.first + rows, device=like.device)[:, None]
    hidden = (distance < -blocks.before) | (distance > blocks.after)
    added = like.new_zeros(1, 1, rows, keys).masked_fill_(hidden, -inf)
    if mask is None:
        return added
    part = _mask_part(mask, tile)
    return added.masked_fill(part.logical_not(), -inf) if part.dtype is torch.bool else added + part


def _merge(out: Tensor, logs: Tensor, part: Tensor, part_logs: Tensor) -> None:
    """Merge a tile's results into those of the tiles before it."""
    merged = torch.logaddexp(logs, part_logs)
    base = merged.masked_fill(merged == -inf, 0)
    out.mul_((logs - base).exp().unsqueeze(-1)).add_(part * (part_logs - base).exp().unsqueeze(-1))
    logs.copy_(merged)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, added: Any, causal: bool, scale: float, fast: bool
) -> tuple[Tensor, Tensor]:
    """Return a tile's results, and the logarithms of its sums of exponentials, -inf for rows that see nothing."""
    # Results of tiles that are rounded to 16 bits would add up to more than the error of one call.
    q, k, v = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (q, k, v))
    if fast:
        out, logs = flash_attention(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
        return out, logs if added is None else logs.masked_fill((added == -inf).all(-1), -inf)
    scores = q @ k.mT * scale + added
    logs = scores.logsumexp(-1)
    return (scores - logs.masked_fill(logs == -inf, 0).unsqueeze(-1)).exp() @ v, logs


def _differentiate(
    mine: Sequence[Tensor], k: Tensor, v: Tensor, added: Any, causal: bool, scale: float, fast: bool
) -> Any:
    """Return a tile's gradients of queries, keys and values, and of the scores unless `fast`.

    Args:
        mine: The gradient of the result, queries, results, and the logarithms of sums over all keys.
        k: Keys.
        v: Values.
        added: Numbers that are added to the scores; None with `fast` alone.
        causal: Whether query i sees keys 0 to i; with `fast` alone.
        scale: Factor of the scores.
        fast: Whether torch's kernel serves.
    """
    grad, q, out, logs, k, v = (each.to(mine[3].dtype) for each in (*mine, k, v))
    if fast:
        return flash_attention_backward(grad, q, k, v, out, logs, 0.0, causal, attn_mask=added, scale=scale)
    weights = (q @ k.mT * scale + added - logs.unsqueeze(-1)).exp()
    to_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return to_scores @ k * scale, to_scores.mT @ q * scale, weights.mT @ grad, to_scores
