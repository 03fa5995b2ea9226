"""What the ranks of a pipeline tell each other before a step, so that mistakes are errors on all of them.

One small all-gather: what each rank is about to do, how large its batch is, a digest of its shapes. If a rank has
found a mistake, all hear of it before anything is sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from ..backends import Backend, all_gather_object

__all__ = ["Header", "Mode", "agree", "raise_together"]

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
        num_microbatches: Micro-batches that it is set to.
        samples: Samples in the input; -1 where this rank has none to give.
        shapes: Digest of the input; 0 where this rank has none to give.
        targets: Samples in the target; -1 where this rank has none to give.
        trained: Digest of which parameters are trained.
        shares: Whether gradients are shared with other ranks afterwards.
    """

    mode: int
    num_microbatches: int
    samples: int = _NONE
    shapes: int = 0
    targets: int = _NONE
    trained: int = 0
    shares: int = 1


def agree(backend: Backend, own: Header, problem: str) -> list[Header]:
    """Exchange headers; collective.

    Args:
        backend: Of the pipeline's ranks.
        own: This rank's.
        problem: What is wrong with this rank's arguments; empty if nothing is.

    Returns:
        The headers of all ranks.

    Raises:
        ValueError: On all ranks, if a rank has a problem or they do not agree.
    """
    words = torch.tensor([bool(problem), *astuple(own)], dtype=torch.int64)
    rows = backend.all_gather(words).view(backend.size, -1).tolist()
    if any(row[0] for row in rows):
        raise_together(backend, problem)
    headers = [Header(*row[1:]) for row in rows]
    _check_same("the operation", [Mode(header.mode).name.lower() for header in headers])
    _check_same("num_microbatches", [header.num_microbatches for header in headers])
    _check_same("no_sync()", [bool(1 - header.shares) for header in headers])
    samples = {header.samples for header in headers if header.samples != _NONE}
    targets = {header.targets for header in headers if header.targets != _NONE}
    if targets and targets != samples:
        raise ValueError(
            f"target: expected as many samples as the input has on the first stage's rank, {_text(samples)}, got "
            f"{_text(targets)} on the last one's"
        )
    return headers


def raise_together(backend: Backend, problem: str) -> None:
    """Raise on all ranks if any has a problem; collective.

    Raises:
        ValueError: It names the ranks.
    """
    problems = all_gather_object(backend, problem)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if told:
        raise ValueError("; ".join(told))


def _check_same(name: str, values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        different = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        raise ValueError(f"{name}: expected the same on all ranks of the pipeline, got {different}")


def _text(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
