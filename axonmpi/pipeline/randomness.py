"""Random numbers that do not depend on how a model is cut.

Each micro-batch has a stream of random numbers of its own, which goes through the stages with it: a stage draws for
micro-batch m what follows the draws of the stages before, as if one process had computed

    torch.manual_seed(microbatch_seed(seed, step, m))
    loss = loss_fn(model(inputs[m]), targets[m])

So dropout is the same for any number of stages, ranks and chunks, and for any schedule.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

__all__ = ["RandomStream", "microbatch_seed", "undisturbed"]

undisturbed = threading.Lock()
"""Keeps other threads from drawing: torch's random state is the process's, and mock ranks are threads."""


def microbatch_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the seed of the stream of a micro-batch, from 0 to 2^63 - 1; local.

    Args:
        seed: The pipeline's.
        step: The number of training steps before.
        micro_batch: Its number in the step.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RandomStream:
    """The stream of a micro-batch.

    Attributes:
        state: [bytes] uint8, the state of torch's CPU generator; None leaves random numbers to the process.
    """

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    @contextmanager
    def drawn_from(self, *, alone: bool) -> Iterator[None]:
        """Draw from this stream within the block; the process's own stream goes on afterwards.

        Args:
            alone: Whether other threads that draw have to wait meanwhile; not where the block waits for them.
        """
        if self.state is None:
            yield
            return
        with undisturbed if alone else nullcontext():
            before = torch.get_rng_state()
            torch.set_rng_state(self.state.clone())
            try:
                yield
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(before)
