"""All-reduces that were made before, with everything prepared that does not depend on the values.

A `DirectPlan` is for data so small that each rank might as well reduce all of it: one barrier, which carries
the call's fingerprint along.

    put the own data into shared memory | barrier | reduce the data of all ranks into the own tensor

A `SymmetricPlan` is for symmetric tensors: the pieces of the own slice, over all ranks' memory, are views made
once. Between the two is a range of sizes for which a `MediumPlan` does either.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..buffers import pointer_of
from ..call import Call
from ..reduction import Reduction, choose_reduction, plain_binary
from .handshake import NodeSlots
from .room import NodeRoom

__all__ = ["DirectPlan", "MediumPlan", "Piece", "SymmetricPlan", "direct_bytes", "medium_bytes"]

DIRECT_BYTES = 32 << 10
"""The most that all ranks together put into shared memory for each of them to reduce it all, although it may be
symmetric: then a slice for each is quicker from about here on, as it costs a barrier and moves less."""
MEDIUM_BYTES = 6 << 20
"""The same where the tensors are not symmetric, times the number of ranks: slices cost two barriers, and each rank
reads less by that number."""
MEDIUM_BYTES_OF_TWO = 2 << 20
"""The same for each of two ranks: slices would move as much."""
CHOICE_BYTES = 32 << 10
"""From this size on it counts where the data is put."""
_MAX_TENSORS = 256
_IN_RING = 2
"""Places below are the two of `DirectPlan.memory`; others lie so many bytes into the ring, and this."""


def direct_bytes(ranks: int) -> int:
    """Return the size up to which every rank of so many reduces all of the data itself; local."""
    return max(DIRECT_BYTES // ranks // 4096 * 4096, 4096)


def medium_bytes(ranks: int) -> int:
    """Return the size up to which it does so for tensors that are not symmetric; local."""
    if ranks == 2:
        return MEDIUM_BYTES_OF_TWO
    return max(MEDIUM_BYTES // ranks**2 // 4096 * 4096, direct_bytes(ranks))


class OrdinaryPlan(Protocol):
    """Reduces tensors that are not symmetric."""

    def run(self, flat: Tensor, agreed: bool) -> None:
        """Reduce contiguous data, in place; collective."""


class Ways(Protocol):
    """What else the ranks of a node can do, and where their symmetric tensors are."""

    room: NodeRoom

    def ordinary(self, call: Call) -> OrdinaryPlan:
        """Find or make the plan that reduces tensors which are not symmetric; collective the first time."""

    def reduce_pieces(self, call: Call, pieces: Sequence[Piece], reduction: Reduction) -> None:
        """Reduce this rank's pieces of a symmetric tensor for all ranks; collective, agreed already."""

    def address(self, tensor: Tensor) -> int:
        """Say where a contiguous tensor lies if it is symmetric, 0 if it is not; local."""

    def pieces(self, flat: Tensor, address: int) -> list[Piece]:
        """Cut this rank's slice of a symmetric tensor into pieces; local."""


class DirectPlan:
    """An all-reduce of one dtype, shape and reduction, small enough for each rank to do it all.

    Args:
        slots: Carries the fingerprint.
        room: Shared memory with two places of `direct_bytes(ranks)` in each region, and a ring.
        call: The call.
    """

    def __init__(self, slots: NodeSlots, room: NodeRoom, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._slots = slots
        self._call = call
        self._parts = []
        self._seen: dict[int, Any] = {}
        memory = room.direct
        half = memory.region_bytes // 2
        own = memory.regions[slots.rank]
        self._own = [own[start : start + call.nbytes] for start in (0, half)]
        with torch.inference_mode(False):
            for start in (0, half):
                rows = [torch.from_numpy(region[start : start + call.nbytes]) for region in memory.regions]
                self._parts.append([row.view(call.dtype).view(call.shape) for row in rows])
        self._room = room
        self._choice = room.direct_choice if call.nbytes >= CHOICE_BYTES else None
        self._seconds = 0.0
        self._dtype, self._shape, self._nbytes = call.dtype, call.shape, call.nbytes
        self._reduction = choose_reduction(call.dtype, call.op, slots.size)
        adds = plain_binary(call.dtype, call.op) is torch.add
        # Of two, the order does not matter: the own part is in the tensor already.
        self._other = [parts[1 - slots.rank] for parts in self._parts] if adds and slots.size == 2 else None

    def run(self, tensor: Tensor) -> bool:
        """Reduce a contiguous tensor, in place; collective. Always applies."""
        place = self.put(tensor)
        self._slots.meet(self._call, 0)
        self.take(tensor, place)
        return True

    def put(self, tensor: Tensor) -> int:
        """Copy the own data to where the others find it; returns the place, for `take`."""
        place, choice = self._slots.place, self._choice
        source = self._seen.get(tensor.data_ptr())
        if source is None:
            source = self._look_at(tensor)
        if choice is None or (choice.quiet and not choice.many):
            self._own[place][...] = source
            return place
        began = time.perf_counter()
        if choice.many:
            offset = self._room.ring.offset(self._slots.turn, self._nbytes)
            self._room.ring.regions[self._slots.rank][offset : offset + self._nbytes] = source
            place = _IN_RING + offset
        else:
            self._own[place][...] = source
        self._seconds = time.perf_counter() - began
        return place

    def _look_at(self, tensor: Tensor) -> Any:
        """Return the tensor's bytes as numpy's, which copies small ones in a fraction of the time that torch takes.

        They are known by their address. Nothing is kept alive: whatever tensor lies there next has as many bytes.
        """
        if not self._call.nbytes:
            return self._own[0]
        pointer = pointer_of(tensor)
        if len(self._seen) >= _MAX_TENSORS:
            self._seen.clear()
        memory: Any = (ctypes.c_uint8 * self._call.nbytes).from_address(pointer)
        source = self._seen[pointer] = np.frombuffer(memory, np.uint8)
        return source

    def take(self, tensor: Tensor, place: int) -> None:
        """Reduce what all ranks have put in, once they have."""
        choice = self._choice
        if choice is None:
            self._reduce(tensor, place)
        elif choice.quiet:
            choice.quiet -= 1
            self._reduce(tensor, place)
        else:
            began = time.perf_counter()
            try:
                self._reduce(tensor, place)
            finally:  # what fails here, on this rank, counts for all
                choice.note(self._slots.turn, self._nbytes, self._seconds + time.perf_counter() - began)

    def _reduce(self, tensor: Tensor, place: int) -> None:
        if place < _IN_RING:
            if self._other is not None:
                tensor.add_(self._other[place])
            else:
                self._reduction.run(self._parts[place], tensor)
        elif self._other is not None:
            tensor.add_(self._in_ring(1 - self._slots.rank, place - _IN_RING))
        else:
            parts = [self._in_ring(rank, place - _IN_RING) for rank in range(self._slots.size)]
            self._reduction.run(parts, tensor)

    def _in_ring(self, rank: int, offset: int) -> Tensor:
        part = torch.from_numpy(self._room.ring.regions[rank][offset : offset + self._nbytes])
        return part.view(self._dtype).view(self._shape)


class Piece:
    """Part of a symmetric tensor that fits into the cache.

    Args:
        rows: [ranks, elements] the part in the memory of each rank.
        total: [elements] scratch memory for the sum.
        rank: This rank, on its node.

    Attributes:
        parts: The rows.
        total: As much of the scratch memory as a row takes.
    """

    __slots__ = ("_rank", "_raw", "_sum", "parts", "total")

    def __init__(self, rows: Tensor, total: Tensor, rank: int) -> None:
        self.parts = list(rows.unbind(0))
        self.total = total[: rows.shape[1]]
        self._rank = rank
        # Numpy has copied before torch has begun to; bytes, since it does not know all dtypes.
        self._raw = rows.view(torch.uint8).numpy()
        self._sum = self.total.view(torch.uint8).numpy()

    def reduce(self, reduction: Reduction) -> None:
        """Reduce the part for all ranks; local."""
        rank, raw = self._rank, self._raw
        if reduction.in_place:  # of two
            reduction.run(self.parts, self.parts[rank])
            raw[1 - rank] = raw[rank]
        else:
            reduction.run(self.parts, self.total)
            raw[...] = self._sum


class SymmetricPlan:
    """An all-reduce of symmetric tensors of one dtype and shape.

    Args:
        slots: Carries the fingerprint.
        paths: Knows which tensors are symmetric, and serves if one is not.
        call: The call.
    """

    def __init__(self, slots: NodeSlots, paths: Ways, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._slots = slots
        self._paths = paths
        self._call = call
        self._reduction = choose_reduction(call.dtype, call.op, slots.size)
        self._known: dict[int, tuple[int, list[Piece]]] = {}

    def run(self, tensor: Tensor) -> bool:
        """Reduce a contiguous tensor, in place; collective. False, and nothing done, without scratch memory."""
        known = self.find(tensor)
        if known is None:
            if not self._paths.room.has_scratch:
                return False
            self._paths.ordinary(self._call).run(tensor, False)
        elif self._slots.meet(self._call, known[0]):
            torch.autograd.graph.increment_version(tensor)  # before what may fail halfway
            self.reduce(known[1])
        else:
            self._paths.ordinary(self._call).run(tensor, True)
        return True

    def reduce(self, pieces: list[Piece]) -> None:
        """Reduce the own slice for all ranks; collective, after all have met."""
        self._paths.reduce_pieces(self._call, pieces, self._reduction)

    def find(self, tensor: Tensor) -> tuple[int, list[Piece]] | None:
        """Return where a tensor lies and the pieces of the own slice, None if it is not symmetric; local."""
        known = self._known.get(tensor.data_ptr())
        if known is None:
            address = self._paths.address(tensor)
            if not address:
                return None
            if len(self._known) >= _MAX_TENSORS:
                self._known.clear()
            known = address, self._paths.pieces(tensor.view(-1), address)
            self._known[tensor.data_ptr()] = known
        return known


class MediumPlan:
    """An all-reduce of a size at which symmetric tensors are reduced where they lie, and others directly.

    Args:
        slots: Carries the fingerprint.
        paths: Serves where only some ranks have a symmetric tensor.
        call: The call.
    """

    def __init__(self, slots: NodeSlots, paths: Ways, call: Call) -> None:
        self._slots = slots
        self._paths = paths
        self._call = call
        self._direct = DirectPlan(slots, paths.room, call)
        self._symmetric = SymmetricPlan(slots, paths, call)

    def run(self, tensor: Tensor) -> bool:
        """Reduce a contiguous tensor, in place; collective. Always applies."""
        known = self._symmetric.find(tensor)
        place = self._direct.put(tensor) if known is None else 0
        if not self._slots.meet(self._call, 0 if known is None else known[0]):
            self._paths.ordinary(self._call).run(tensor, True)
        elif known is None:
            self._direct.take(tensor, place)
        else:
            torch.autograd.graph.increment_version(tensor)
            self._symmetric.reduce(known[1])
        return True
