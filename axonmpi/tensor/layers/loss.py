"""Cross entropy of logits that are cut over the ranks of a group along the vocabulary.

Each rank reduces its logits to three or four numbers for each token, which the ranks exchange in one all-gather:

    rank r    its largest logit m, the sum s of exp(logit - m), the target's logit (0 if another rank has it)
    all       M = max m,  S = sum of s exp(m - M),  loss = log S + M - the target's logit

Backward needs no communication: the gradient of a rank's logits is softmax minus one for the target, computed from
exp(logit - m), the only tensor of the logits' size that forward keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ...utils.arguments import check_flags, integer, number
from ...utils.device import device_at
from ..overlapped_linear import apply
from ..regions import check_sequence, split_sequence

_REDUCTIONS = ("mean", "sum", "none")
_HALF = (torch.float16, torch.bfloat16)
_TARGET_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of sharded logits, without gathering them; collective.

    Forward is one all-gather of a few numbers for each token; backward is local, or one all-gather of a number for
    each token if losses are a slice of the sequence.

    Args:
        logits: [..., V / W] floating-point, this rank's slice of V (padded) entries on W ranks, in rank order, as
            `ColumnParallelLinear` computes it. 16-bit logits are taken in float32.
        targets: [...] integers, the same on all ranks.
        group: The ranks; None means all.
        vocabulary: True number of entries; entries from there on are padding and do not count. None: all count.
        ignore_index: The target of tokens that do not count.
        label_smoothing: Share of the target's weight that is spread over all entries, from 0 to 1.
        reduction: `"mean"` over the targets that count, `"sum"`, or `"none"`: [...], 0 for ignored targets.
        sequence_parallel: With `"none"`, return the losses of this rank's slice of the sequence only. Logits and
            targets are of the full sequence in any case, and so are the other reductions.
        sequence_dim: Dimension of the sequence in `targets`.

    Returns:
        The loss, the same on all ranks, or this rank's slice of the losses; float32 for 16-bit logits, else of the
        logits' dtype.

    Raises:
        DimensionError: `sequence_dim` is out of range.
        TypeError: `targets` are no integers, or `logits` are.
        ValueError: A target is no entry, shapes do not fit, an option is out of range, or the sequence cannot be
            divided; on all ranks.
    """
    group = group_of_this_rank(group, "group")
    check_flags(sequence_parallel=sequence_parallel)
    integer("ignore_index", ignore_index)
    _check_tensors(logits, targets, group.rank)
    entries = logits.shape[-1] * group.size
    vocabulary = entries if vocabulary is None else vocabulary
    _check_options(vocabulary, entries, label_smoothing, reduction)
    if sequence_parallel and reduction == "none":
        check_sequence(targets.shape, group, sequence_dim)
    flat = targets.reshape(-1).long()
    ignored = flat == ignore_index
    _check_targets(flat, ignored, vocabulary, ignore_index, group.rank)
    rows = logits.reshape(-1, logits.shape[-1])
    losses = apply(_TokenLosses, rows, flat, ignored, group, vocabulary, label_smoothing)
    if reduction == "none":
        losses = losses.view(targets.shape)
        return split_sequence(losses, group, sequence_dim) if sequence_parallel else losses
    total = losses.sum()
    return total if reduction == "sum" else total / ignored.logical_not().sum()


class _TokenLosses(Function):
    """[N, V / W] logits, [N] targets -> [N] losses, 0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor,
        group: ProcessGroup,
        vocabulary: int,
        smoothing: float,
    ) -> Tensor:
        local = logits.shape[1]
        start = group.rank * local
        count = max(0, min(local, vocabulary - start))
        own = (targets >= start) & (targets < start + count)
        columns = (targets - start).masked_fill_(~own, 0)
        values = logits[:, :count].float() if logits.dtype in _HALF else logits[:, :count]
        top, powers = _powers(values)
        rows = [top, powers.sum(1), _picked(values, columns, own)]
        if smoothing:
            rows.append(values.sum(1))
        gathered = _gathered(torch.stack(rows), local, group)  # [W, 3 or 4, N]
        tops, sums = gathered[:, 0], gathered[:, 1]
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp_()).sum(0)
        logsumexp = highest + total.log()
        losses = logsumexp - gathered[:, 2].sum(0)
        if smoothing:
            spread = logsumexp - gathered[:, 3].sum(0) / vocabulary
            losses = losses.mul_(1 - smoothing).add_(spread, alpha=smoothing)
        ctx.save_for_backward(powers.to(logits.dtype), (top - highest).exp_() / total, columns, own, ignored)
        ctx.options = local, vocabulary, smoothing
        result: Tensor = losses.masked_fill_(ignored, 0)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        powers, factors, columns, own, ignored = ctx.saved_tensors
        local, vocabulary, smoothing = ctx.options
        count = powers.shape[1]
        weights = grad.masked_fill(ignored, 0)  # [N]
        gradient = powers.new_empty(len(powers), local)
        gradient[:, count:] = 0
        inner = gradient[:, :count]
        torch.mul(powers, (factors * weights)[:, None], out=inner)
        if smoothing:
            inner.sub_((weights * (smoothing / vocabulary)).to(inner.dtype)[:, None])
        if count:
            at_target = (weights * (smoothing - 1)).masked_fill_(~own, 0).to(inner.dtype)
            inner.scatter_add_(1, columns[:, None], at_target[:, None])
        return gradient, None, None, None, None, None


def _gathered(rows: Tensor, local: int, group: ProcessGroup) -> Tensor:
    """Return all ranks' rows; collective. Raise on all ranks unless they have as many entries each."""
    own = F.pad(rows, (0, 1), value=local)[None]
    gathered: Tensor = group.backend.all_gather(own, sizes=[1] * group.size)
    counts = gathered[:, 0, -1]

    def message(_least: int, _most: int) -> str:
        found = ", ".join(f"{count:.0f}" for count in counts.tolist())
        return (
            f"logits: expected as many entries on all ranks of the group, got {found}; "
            "pad those of the last ranks, and say with vocabulary= how many there are"
        )

    device_at(counts.device).check_range(counts != local, 1, message)
    return gathered[..., :-1]


def _powers(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row, and exp(value - largest)."""
    if not values.shape[1]:
        return values.new_full((len(values),), -torch.inf), values.new_empty(values.shape)
    top = values.amax(1)
    finite = top.masked_fill(top == -torch.inf, 0)  # a row of -inf has exp(-inf) = 0, not exp(-inf + inf)
    return top, (values - finite[:, None]).exp_()


def _picked(values: Tensor, columns: Tensor, own: Tensor) -> Tensor:
    """Return one value of each row, 0 in rows without a target on this rank."""
    if not values.shape[1]:
        return values.new_zeros(len(values))
    return values.gather(1, columns[:, None])[:, 0].masked_fill_(~own, 0)


def _check_options(vocabulary: int, entries: int, label_smoothing: float, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if not 0 <= number("label_smoothing", label_smoothing) <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
    if not 1 <= integer("vocabulary", vocabulary) <= entries:
        raise ValueError(f"vocabulary: expected 1 to {entries}, the entries of all ranks' logits, got {vocabulary}")


def _check_tensors(logits: Tensor, targets: Tensor, rank: int) -> None:
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits: expected a floating-point dtype, got {logits.dtype}")
    if targets.dtype not in _TARGET_DTYPES:
        raise TypeError(f"targets: expected integers, the entries' numbers, got {targets.dtype}")
    if not logits.dim() or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets: expected shape {list(logits.shape[:-1])} for logits of shape {list(logits.shape)}, got "
            f"{list(targets.shape)} on rank {rank}"
        )


def _check_targets(targets: Tensor, ignored: Tensor, vocabulary: int, ignore_index: int, rank: int) -> None:
    if not targets.numel():
        return

    def message(_least: int, _most: int) -> str:
        least, most = (int(bound) for bound in targets[~ignored].aminmax())
        return (
            f"targets: expected entries from 0 to {vocabulary - 1}, or {ignore_index} to ignore, got {least} to "
            f"{most} on rank {rank}"
        )

    # Entry 0 in place of the ignored ones: choosing the others would have to wait for their number.
    device_at(targets.device).check_range(targets.masked_fill(ignored, 0), vocabulary, message)
