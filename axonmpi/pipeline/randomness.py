"""Random numbers that do not depend on the number of stages.

Each micro-batch has a stream of random numbers of its own, which goes through the stages with it. Each stage
continues the stream, as if one process had computed

    torch.manual_seed(microbatch_seed(seed, step, m))
    loss = loss_fn(model(inputs[m]), targets[m])

So dropout is the same for any number of stages, ranks and chunks, and for any schedule.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ..utils.device import device_at

undisturbed = threading.Lock()
"""Lock around draws: torch has one random state a process, and mock ranks are threads."""


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
    """The random numbers of a micro-batch.

    Args:
        states: Of torch's generators on the CPU and, if stages compute there, on the GPU, [bytes] uint8 each,
            on the CPU; None leaves random numbers to the process.
        device: The device of the stages.

    Attributes:
        states: The states after the draws so far.
    """

    def __init__(self, states: Sequence[Tensor] | None, device: torch.device) -> None:
        self.states = states
        self._device = device

    @classmethod
    def seeded(cls, seed: int, device: torch.device) -> RandomStream:
        """Return the stream that follows `torch.manual_seed(seed)`; local."""
        return cls([torch.Generator(each).manual_seed(seed).get_state() for each in _devices(device)], device)

    @contextmanager
    def drawn_from(self, *, alone: bool) -> Iterator[None]:
        """Draw from this stream within the block; afterwards the process draws from its own again.

        Args:
            alone: Whether other threads have to wait before they draw; False if the block waits for them.
        """
        if self.states is None:
            yield
            return
        with undisturbed if alone else nullcontext():
            before = self._exchange(self.states)
            try:
                yield
            finally:
                self.states = self._exchange(before)

    def _exchange(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Set the states of the generators; return the states before."""
        generators = [device_at(each) for each in _devices(self._device)]
        before = [generator.random_state() for generator in generators]
        for generator, state in zip(generators, states, strict=True):
            generator.set_random_state(state.clone())
        return before


def _devices(device: torch.device) -> list[torch.device]:
    """Return the devices on which a stage draws: the CPU, and its own."""
    return list(dict.fromkeys((torch.device("cpu"), device)))
