"""Which sequences a step trains on, and which rank takes which: the same global batch for any number of ranks.

    step s ──(seed, s)──► starts of global_batch sequences
                          ├── rank 0 ──┤├── rank 1 ──┤      contiguous parts, each cut into
                          [micro][micro][micro][micro]      `accumulation` micro-batches

Nothing depends on earlier steps, so a run can begin at any step; and nothing on the number of ranks but who
computes what, so loss curves of different numbers of ranks agree to rounding.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["BatchPlan", "HeldOutPlan", "Stream", "seeded_generator"]


class Stream(enum.IntEnum):
    """What random numbers are for; those of different streams are unrelated."""

    WEIGHTS = 0
    DATA = 1
    SAMPLE = 2


def seeded_generator(seed: int, stream: Stream, step: int = 0) -> torch.Generator:
    """Return a generator whose draws depend on these three numbers only."""
    state = np.random.SeedSequence([seed, stream, step]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


@dataclass(frozen=True)
class BatchPlan:
    """How the sequences of each step are drawn and divided.

    Attributes:
        global_batch: Sequences of a step over all ranks.
        sequence_length: Bytes of input of a sequence; it also takes the byte after them, as the last target.
        accumulation: Micro-batches of each rank in a step.
        rank: This rank's number.
        ranks: Number of ranks.
        seed: The run's seed.

    Raises:
        ValueError: `global_batch` does not divide by ranks x accumulation.
    """

    global_batch: int
    sequence_length: int
    accumulation: int
    rank: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        parts = self.ranks * self.accumulation
        if self.global_batch % parts:
            near = max(1, round(self.global_batch / parts)) * parts
            raise ValueError(
                f"global_batch: expected a multiple of ranks x accumulation = {self.ranks} x {self.accumulation} "
                f"= {parts}, got {self.global_batch}: take for example {near}, or another number of ranks"
            )

    def starts(self, step: int, length: int) -> Tensor:
        """Return where the sequences of a step begin in a text of `length` bytes, int64 `[global_batch]`."""
        last = length - self.sequence_length  # the first place where no whole sequence begins
        generator = seeded_generator(self.seed, Stream.DATA, step)
        return torch.randint(last, (self.global_batch,), generator=generator)

    def micro_batches(self, step: int, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's inputs and targets of a step. Local.

        Args:
            step: Number of the step.
            text: The bytes to train on, uint8 `[N]`, longer than `sequence_length`.

        Yields:
            Inputs and targets, each int64 `[global_batch / ranks / accumulation, sequence_length]`.
        """
        mine = self.starts(step, len(text)).chunk(self.ranks)[self.rank]
        for starts in mine.chunk(self.accumulation):
            yield _sequences(text, starts, self.sequence_length)


@dataclass(frozen=True)
class HeldOutPlan:
    """Which held-out sequences are scored, and which of them by which rank; they do not overlap.

    Attributes:
        sequences: How many at most over all ranks, spread evenly over the text; 0 means all there are.
        sequence_length: Bytes of input of a sequence.
        batch: Sequences of a forward pass.
        rank: This rank's number.
        ranks: Number of ranks.
    """

    sequences: int
    sequence_length: int
    batch: int
    rank: int
    ranks: int

    def batches(self, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's inputs and targets, each int64 `[at most batch, sequence_length]`. Local.

        Args:
            text: The held-out bytes, uint8 `[M]`, longer than `sequence_length`.
        """
        available = (len(text) - 1) // self.sequence_length
        count = min(self.sequences or available, available)
        chosen = torch.arange(count) * available // count * self.sequence_length
        mine = chosen.tensor_split(self.ranks)[self.rank]
        for starts in mine.split(self.batch):
            if len(starts):
                yield _sequences(text, starts, self.sequence_length)


def _sequences(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(length + 1)].long()  # [B, T + 1]
    return window[:, :-1], window[:, 1:]
