"""The sequences of a step and their slices, one a replica: the same global batch for any number of ranks.

    step s ──(seed, s)──► starts of global_batch sequences
                          ├── replica 0 ──┤├── replica 1 ──┤      contiguous slices, each
                          [batch ][batch ] [batch ][batch ]       in `accumulation` batches

A replica is a rank, or several ranks that share a model and go through the same sequences. Nothing depends on
earlier steps, so a run can begin at any step, and loss curves of different numbers of ranks agree to rounding.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each int64 [sequences, sequence_length]."""

IGNORED = -100
"""The target of a byte that is not scored."""


class Stream(enum.IntEnum):
    """The uses of random numbers; numbers of different streams are unrelated."""

    WEIGHTS = 0
    DATA = 1
    SAMPLE = 2


def seeded_generator(seed: int, stream: Stream, step: int = 0) -> torch.Generator:
    """Return a generator whose draws depend on these three numbers only."""
    state = np.random.SeedSequence([seed, stream, step]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


@dataclass(frozen=True)
class BatchPlan:
    """The draw of each step's sequences, and this replica's slice of them.

    Attributes:
        global_batch: Sequences of a step over all ranks.
        sequence_length: Bytes of input of a sequence; it also takes the byte after them, as the last target.
        accumulation: Batches in which a replica processes its sequences of a step.
        replica: Number of this rank's replica.
        replicas: Number of replicas.
        seed: The run's seed.
        unit: The word for replicas in the error message.

    Raises:
        ValueError: `global_batch` does not divide by replicas x accumulation.
    """

    global_batch: int
    sequence_length: int
    accumulation: int
    replica: int
    replicas: int
    seed: int
    unit: str = "ranks"

    def __post_init__(self) -> None:
        batches = self.replicas * self.accumulation
        if self.global_batch % batches:
            near = max(1, round(self.global_batch / batches)) * batches
            raise ValueError(
                f"global_batch: expected a multiple of {self.unit} x accumulation = {self.replicas} x "
                f"{self.accumulation} = {batches}, got {self.global_batch}: take for example {near}, or another "
                f"number of {self.unit}"
            )

    def starts(self, step: int, length: int) -> Tensor:
        """Return the offsets of a step's sequences in a text of `length` bytes, int64 `[global_batch]`."""
        stop = length - self.sequence_length  # the first offset without a full sequence after it
        generator = seeded_generator(self.seed, Stream.DATA, step)
        return torch.randint(stop, (self.global_batch,), generator=generator)

    def batches(self, step: int, text: Tensor) -> Iterator[Batch]:
        """Yield this replica's inputs and targets of a step. Local.

        Args:
            step: Number of the step.
            text: The bytes to train on, uint8 `[N]`, longer than `sequence_length`.

        Yields:
            Inputs and targets, each int64 `[global_batch / replicas / accumulation, sequence_length]`.
        """
        mine = self.starts(step, len(text)).chunk(self.replicas)[self.replica]
        for starts in mine.chunk(self.accumulation):
            yield _sequences(text, starts, self.sequence_length)


def held_out_batches(
    text: Tensor, length: int, *, most: int, batch: int, replica: int, replicas: int
) -> Iterator[Batch]:
    """Yield the held-out inputs and targets of a replica; no two sequences of any replicas overlap. Local.

    Each replica gets equally many batches, since replicas with sharded parameters go through them together. If
    there are more replicas than sequences, some get a sequence whose targets are `IGNORED`.

    Args:
        text: The held-out bytes, uint8 `[M]`, longer than `length`.
        length: Bytes of input of a sequence.
        most: Largest number of sequences over all replicas, spread evenly over the text; 0 means all there are.
        batch: Sequences of a forward pass.
        replica: Number of this rank's replica.
        replicas: Number of replicas.

    Yields:
        Inputs and targets, each int64 `[at most batch, length]`.
    """
    available = (len(text) - 1) // length
    count = min(most or available, available)
    chosen = torch.arange(count) * available // count * length
    rounds = math.ceil(math.ceil(count / replicas) / batch)
    for starts in chosen.tensor_split(replicas)[replica].tensor_split(rounds):
        inputs, targets = _sequences(text, starts if len(starts) else chosen[:1], length)
        yield inputs, targets if len(starts) else torch.full_like(targets, IGNORED)


def _sequences(text: Tensor, starts: Tensor, length: int) -> Batch:
    window = text[starts[:, None] + torch.arange(length + 1)].long()  # [B, T + 1]
    return window[:, :-1], window[:, 1:]
