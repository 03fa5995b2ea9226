"""The states of a sharded model in a training step, and the order in which they may follow each other.

    state       next       event
    IDLE        FORWARD    the model's forward begins
                BACKWARD   a graph that was kept is differentiated once more
                STEP       an optimizer steps, or the model's state is read or loaded
    FORWARD     BETWEEN    the forward ends, also by an exception
                BACKWARD   code in the forward differentiates a loss of its own
    BETWEEN     FORWARD    another forward begins
                BACKWARD   backward comes to the first gradient or to the model's output
                STEP       an optimizer steps without a backward: the ranks meet first
                IDLE       the ranks meet, as in `sync_gradients()`
    BACKWARD    IDLE       backward ends, and the ranks meet as they average the gradients
                BETWEEN    backward ends in `no_sync()`, or has ended by an exception
                FORWARD    backward ends within a forward
    STEP        IDLE       the step ends
                STEP       another step begins within this one, or after it by an exception
                FORWARD    a closure, or a forward after a step that ended by an exception
                BACKWARD   the same of a backward

In IDLE all ranks have met since they last read parameters, so shards may change. In FORWARD, BETWEEN and BACKWARD
other ranks may be reading this rank's shards. A forward that backward computes once more belongs to BACKWARD.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .unit import Unit


class TrainingState(enum.Enum):
    """The states of a sharded model."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BETWEEN = enum.auto()
    BACKWARD = enum.auto()
    STEP = enum.auto()


IDLE, FORWARD, BETWEEN, BACKWARD, STEP = TrainingState

NEXT = {
    IDLE: (FORWARD, BACKWARD, STEP),
    FORWARD: (BETWEEN, BACKWARD),
    BETWEEN: (FORWARD, BACKWARD, STEP, IDLE),
    BACKWARD: (IDLE, BETWEEN, FORWARD),
    STEP: (IDLE, STEP, FORWARD, BACKWARD),
}
"""The states that may follow each state."""


@dataclass(frozen=True)
class Forward:
    """A forward of a unit that has begun and not ended.

    Attributes:
        unit: The unit.
        first_node: Sequence number of the first autograd node that it may make.
        has_graph: True if gradients were enabled at its beginning.
        version: Number of changes of the unit's shards at its beginning.
        end_step: Ends the training step that began with it; None if there is none.
    """

    unit: Unit
    first_node: int
    has_graph: bool
    version: int
    end_step: Callable[..., None] | None


class Clock:
    """State of one model on this rank.

    Attributes:
        state: The current state.
        forwards: Forwards that are running, the outermost first.
        events: Number of the latest begin or end of a forward; they are numbered in one row.
    """

    def __init__(self) -> None:
        self.state = IDLE
        self.forwards: list[Forward] = []
        self.events = 0

    def advance(self, state: TrainingState) -> None:
        """Go to another state; local.

        Raises:
            RuntimeError: The state cannot follow the current one.
        """
        if state not in NEXT[self.state]:
            allowed = " or ".join(each.name for each in NEXT[self.state])
            hook = "; to step within backward use register_post_accumulate_grad_hook()"
            raise RuntimeError(
                f"FSDP: expected {allowed} after {self.state.name}, got {state.name}: let a forward or backward "
                f"end before an optimizer steps or state is read{hook if self.state is BACKWARD else ''}"
            )
        self.state = state

    def meet(self) -> None:
        """Take note that all ranks have ended their forwards; local."""
        if self.state is BETWEEN:
            self.advance(IDLE)

    def begin_forward(self, forward: Forward) -> None:
        """Begin a forward of a unit; local."""
        if not self.forwards and self.state is not BACKWARD:
            self.advance(FORWARD)
        self.forwards.append(forward)

    def end_forward(self) -> Forward:
        """End the innermost forward and return it; local."""
        forward = self.forwards.pop()
        if not self.forwards and self.state is FORWARD:
            self.advance(BETWEEN)
        return forward

    def next_event(self) -> int:
        """Return the number of a begin or end of a forward that happens now; local."""
        self.events += 1
        return self.events
