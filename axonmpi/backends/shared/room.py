"""The memory through which the ranks of a node pass ordinary tensors to each other.

direct    two places for data so small that each rank reduces all of it, there from the start
scratch   for larger data, in chunks; made when it is first used
ring      many places for either, where that is quicker; made when that is first tried
"""

from __future__ import annotations

from ..plain import Limits
from .barrier import NodeBarrier
from .choice import PlaceChoice
from .chunk_pipeline import Turns
from .handshake import NodeSlots
from .segment import Arena, Segment
from .staging import ALIGNMENT, CHUNK_BYTES, Ring, Scratch, many_places, round_down

__all__ = ["NodeRoom"]


class NodeRoom:
    """What the ranks of one group on one node share for data that does not lie in shared memory.

    Args:
        slots: Shows the ranks each other's measurements.
        barrier: The barrier between turns.
        arena: Where scratch memory and the ring come from.
        direct: Shared memory for small data; stands in for scratch memory where there is no more.
        limits: How much goes through scratch memory at a time.

    Attributes:
        direct: The same.
        direct_choice: Chooses between `direct` and the ring.
    """

    def __init__(
        self, slots: NodeSlots, barrier: NodeBarrier, arena: Arena, direct: Segment, limits: Limits
    ) -> None:
        self.direct = direct
        self.direct_choice = PlaceChoice(slots.votes(0), self._make_ring)
        self._size = slots.size
        self._barrier = barrier
        self._arena = arena
        self._limits = limits
        self._scratch: Scratch | None = None
        self._turns: Turns | None = None
        self._turns_choice = PlaceChoice(slots.votes(1), self._widen)
        self._ring: Ring | None = None

    @property
    def has_scratch(self) -> bool:
        """Whether ordinary tensors may be copied in before the ranks have agreed."""
        return self._scratch is not None

    @property
    def ring(self) -> Ring:
        """The ring, once a choice has been for many places."""
        assert self._ring is not None
        return self._ring

    def scratch(self) -> Scratch:
        """Return the scratch memory; collective the first time."""
        if self._scratch is None:
            self._scratch = Scratch(
                self._arena, round_down(CHUNK_BYTES, ALIGNMENT * self._size), self.direct, one=True
            )
            self._turns = Turns(self._barrier, self._scratch, self._turns_choice)
        return self._scratch

    def turns(self) -> Turns:
        """Return what gives chunks their turns in scratch memory; collective the first time."""
        self.scratch()
        assert self._turns is not None
        return self._turns

    def chunk_bytes(self) -> int:
        """How much of a rank's tensor goes through the scratch memory at a time; a slice for each rank."""
        most = min(self._limits.piece_bytes, self.scratch().chunk_bytes)
        return round_down(most, ALIGNMENT * self._size)

    def free(self) -> None:
        """Let go of all of it; local."""
        del self.direct, self._scratch, self._turns, self._ring, self.direct_choice, self._turns_choice

    def _make_ring(self) -> bool:
        if self._ring is None:
            self._ring = Ring.allocate(self._arena, CHUNK_BYTES * many_places(self._size))
        return self._ring is not None

    def _widen(self) -> bool:
        if not self._make_ring():
            return False
        scratch = self.scratch()
        if not scratch.is_wide:
            scratch.widen(self.ring)
        return True
