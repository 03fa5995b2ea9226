"""What the ranks of a pipeline tell each other before a step, so that mistakes are errors on all of them.

One small all-gather: what each rank is about to do, how large its batch is, a digest of its shapes. If a rank has
found a mistake, all ranks raise it before anything is sent.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass

import torch

from ..backends import Backend
from ..collectives.agreement import check_same, raised_on_all

__all__ = ["Header", "Mode", "agree"]

_NONE = -1


class Mode(enum.IntEnum):
    """What a step does."""

    TRAIN = 0
    EVALUATE = 1
    PREDICT = 2


@dataclass(frozen=True)
class Header:
    """What a rank says before a step.

    Attributes:
        mode: What it is about to do.
        num_microbatches: Its number of micro-batches.
        shares: Whether gradients are shared with other ranks afterwards.
        trained: Digest of which parameters are trained.
        samples: Samples in the input; -1 where this rank has none to give.
        shapes: Digest of the input; 0 where this rank has none to give.
        targets: Samples in the target; -1 where this rank has none to give.
    """

    mode: int
    num_microbatches: int = 0
    shares: bool = True
    trained: int = 0
    samples: int = _NONE
    shapes: int = 0
    targets: int = _NONE


def agree(backend: Backend, own: Header, problem: Exception | None) -> list[Header]:
    """Exchange headers; collective.

    Args:
        backend: Of the pipeline's ranks.
        own: This rank's.
        problem: What is wrong with this rank's arguments, if anything is.

    Returns:
        The headers of all ranks.

    Raises:
        TypeError: A rank has such a problem; on all ranks.
        ValueError: A rank has such a problem, or they do not agree; on all ranks.
    """
    words = torch.tensor([problem is not None, *astuple(own)], dtype=torch.int64)
    rows = backend.all_gather(words).view(backend.size, -1).tolist()
    if any(row[0] for row in rows):
        with raised_on_all(backend):
            if problem is not None:
                raise problem
    headers = [Header(*row[1:]) for row in rows]
    if len({(header.mode, header.num_microbatches, header.shares) for header in headers}) > 1:
        sync = "" if own.shares else " within no_sync()"
        step = f"{Mode(own.mode).name.lower()}{sync}, num_microbatches={own.num_microbatches}"
        what = "the ranks of the pipeline make different steps"
        check_same(backend, [step], what, "Make the same steps on all of them.")
    samples = {header.samples for header in headers if header.samples != _NONE}
    targets = {header.targets for header in headers if header.targets != _NONE}
    if targets and targets != samples:
        raise ValueError(
            f"target: expected as many samples as the input has on the first stage's rank, {max(samples)}, got "
            f"{max(targets)} on the last one's"
        )
    return headers
