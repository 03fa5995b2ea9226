"""One step of a pipeline: the headers that ranks exchange before it, and its inputs, targets, outputs and losses.

Before a step there is one small all-gather of headers: the kind of the step, the size of the batch, a digest of its
shapes. If a rank has found a mistake, all ranks raise it before anything is sent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...across_ranks.comparison import raised_on_all, same_on_all_ranks
from ...backends import Backend
from ...utils.device import device_at
from ..batches import as_scalar
from ..randomness import RandomStream, microbatch_seed
from .payload import pack, unpack

_NONE = -1


class Mode(enum.IntEnum):
    """The kind of a step."""

    TRAIN = 0
    EVALUATE = 1
    PREDICT = 2


@dataclass(frozen=True)
class Header:
    """A rank's description of the step that it begins.

    Attributes:
        mode: The kind of step.
        num_microbatches: Number of micro-batches.
        shares: Whether gradients are shared with other ranks afterwards.
        trained: Digest of all parameters' `requires_grad`.
        samples: Samples in the input; -1 on ranks that use none.
        shapes: Digest of the input; 0 on ranks that use none.
        targets: Samples in the target; -1 on ranks that use none.
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
        own: This rank's header.
        problem: The error in this rank's arguments; None if there is none.

    Returns:
        The headers of all ranks.

    Raises:
        TypeError: A rank has such a problem; on all ranks.
        ValueError: A rank has such a problem, or they do not agree; on all ranks.
    """
    control = backend.control
    words = torch.tensor([problem is not None, *astuple(own)], dtype=torch.int64, device=control.place)
    rows = control.all_gather(words).view(backend.size, -1).tolist()
    if any(row[0] for row in rows):
        with raised_on_all(backend):
            if problem is not None:
                raise problem
    headers = [Header(*row[1:]) for row in rows]
    if len({(header.mode, header.num_microbatches, header.shares) for header in headers}) > 1:
        sync = "" if own.shares else " within no_sync()"
        step = f"{Mode(own.mode).name.lower()}{sync}, num_microbatches={own.num_microbatches}"
        different = "the ranks of the pipeline make different steps"
        same_on_all_ranks(backend, [step], different, "Make the same steps on all.")
    samples, targets = (max(sizes) for sizes in zip(*((h.samples, h.targets) for h in headers), strict=True))
    if targets not in (_NONE, samples):
        raise ValueError(
            f"target: expected as many samples as the input has on the first stage's rank, {samples}, got "
            f"{targets} on the last one's"
        )
    return headers


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        mode: The kind of step.
        inputs: The input of each micro-batch, on the first stage's rank.
        targets: Their targets, on the last stage's rank.
        weights: Their weights in the loss, there as well.
        loss_fn: Returns the mean loss of a micro-batch.
        seed: The seed and the number of the step; None leaves random numbers to the process.
        device: The device of this rank in the pipeline's group.
        losses: The losses of micro-batches, on the last stage's rank.
        outputs: The last stage's outputs by micro-batch, if outputs are wanted.
    """

    mode: Mode
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    loss_fn: Callable[[Any, Any], Tensor] | None
    seed: tuple[int, int] | None
    device: torch.device
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.mode is Mode.TRAIN

    @property
    def loss(self) -> Tensor | None:
        """[] the weighted mean of the micro-batches' losses; None without losses."""
        if not self.losses:
            return None
        losses = torch.stack(list(self.losses.values()))
        weights = [self.weights[micro_batch] for micro_batch in self.losses]
        shares = torch.tensor(weights, dtype=torch.float64, device="cpu")
        mean = losses.double() @ device_at(losses.device).moved(shares)
        return mean.to(losses.dtype)

    def begin_random(self, micro_batch: int) -> RandomStream:
        """Return the micro-batch's random numbers; without a seed or training, the process's own."""
        if self.seed is None or not self.trains:
            return RandomStream(None, self.device)
        return RandomStream.seeded(microbatch_seed(*self.seed, micro_batch), self.device)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Keep the last stage's output, or compute and return its loss."""
        if self.mode is Mode.PREDICT:
            skeleton, tensors = pack(output)
            # A stage may return its input, a view of a mailbox's cell that later micro-batches overwrite.
            self.outputs[micro_batch] = unpack(skeleton, [tensor.clone() for tensor in tensors])
            return None
        assert self.loss_fn is not None
        loss = as_scalar(self.loss_fn(output, self.targets[micro_batch]))
        self.losses[micro_batch] = loss.detach()
        return loss
