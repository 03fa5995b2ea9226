"""Checks of what a GPU does: each a function of a world whose tensors are there.

    conformance     every operation, dtype and reduction against numpy
    ordering        the streams: what has to wait for what, and memory that is freed early
    parallelisms    data, fully sharded, tensor and pipeline parallelism against plain torch
    training        the trainer in float32 and bfloat16
    cost            what the CPU spends on a call

They ask the world where tensors are, so that they run on the CPU as well, where they find mistakes of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import axonmpi as ax

Figures = dict[str, Any]


class NotHereError(Exception):
    """Says why a check cannot be made here."""


class Check(NamedTuple):
    """A check.

    Attributes:
        name: `part/what`.
        run: Raises AssertionError, or whatever it comes to; puts what it has measured into the figures. Collective.
    """

    name: str
    run: Callable[[ax.World, Figures], None]
