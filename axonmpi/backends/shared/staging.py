"""Scratch memory shared by the ranks of a node, and how data is cut to go through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ..reduction import reduce_in_rank_order
from .segment import Arena, Segment

__all__ = [
    "ALIGNMENT",
    "CHUNK_BYTES",
    "PIECE_BYTES",
    "Bytes",
    "Ring",
    "Scratch",
    "bounds_of",
    "many_places",
    "reduce_in_pieces",
    "round_down",
    "slices_of",
    "views_of",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK_BYTES = 1 << 20
"""How much of an ordinary tensor goes through scratch memory at a time: chunks of all ranks should fit the
cache."""
PIECE_BYTES = 256 << 10
"""How much of its slice a rank reduces at a time: the pieces of all ranks should fit into its core's cache."""
ALIGNMENT = 64
_MAX_VIEWS = 4096
_PLACES_OF_ALL = 32


class Ring:
    """Memory that is used from one end to the other before any of it is used again.

    Turns of even number use one half of it, those of odd number the other: what a turn writes is not touched in the
    next one, whatever that writes.

    Args:
        regions: [local ranks] the memory of each rank, of the same size.

    Attributes:
        regions: The same.
        half_bytes: Size of a half.
    """

    def __init__(self, regions: list[Bytes]) -> None:
        self.regions = regions
        self.half_bytes = regions[0].nbytes // 2

    @classmethod
    def allocate(cls, arena: Arena, nbytes: int) -> Ring | None:
        """Make a ring of `nbytes` bytes for each rank; collective. None if there is no memory for it."""
        block = arena.allocate(nbytes)
        if isinstance(block, str):
            return None
        regions = arena.segments[block.segment].regions
        return cls([region[block.start : block.start + nbytes] for region in regions])

    def offset(self, turn: int, nbytes: int) -> int:
        """Return where a turn writes, if others write as many bytes, no more than half of all; local."""
        step = -(-nbytes // ALIGNMENT) * ALIGNMENT
        return (turn & 1) * self.half_bytes + (turn >> 1) % (self.half_bytes // step) * step


class Scratch:
    """Buffers for what ranks put in and for results, in each rank's region: two places with both, or more.

    Args:
        arena: Where they are allocated; collective.
        chunk_bytes: Size of each buffer.
        spare: Serves where the arena has no memory: the buffers are as large as fit into it.
        one: Whether a place has one buffer for both, in which a rank puts its results where it has put nothing in.

    Attributes:
        chunk_bytes: Size of each buffer, as it has become.
        inputs: [places][local ranks] buffers that hold what each rank put in.
        outputs: [places][local ranks] buffers that hold what each rank has reduced.
        kept: What users of the buffers keep, for as long as there are these. What stays and is made between large
            tensors that come and go cuts up the memory that they leave: make it for all places `alike` at once.

    Raises:
        MemoryError: There is not enough memory, and nothing to spare.
    """

    def __init__(self, arena: Arena, chunk_bytes: int, spare: Segment | None = None, *, one: bool = False) -> None:
        self._buffers = 1 if one else 2
        # Halves by turn: what is written in a turn lies in that turn's half, as it does for direct all-reduces.
        block = arena.allocate(2 * self._buffers * chunk_bytes)
        if not isinstance(block, str):
            regions, start, half = arena.segments[block.segment].regions, block.start, self._buffers * chunk_bytes
        elif spare is not None:
            regions, start, half = spare.regions, 0, spare.region_bytes // 2
            chunk_bytes = min(chunk_bytes, half // self._buffers)
        else:
            raise MemoryError(f"no scratch memory could be shared with the other ranks of this node: {block}")
        self.chunk_bytes = chunk_bytes
        self.inputs: list[list[Bytes]] = []
        self.outputs: list[list[Bytes]] = []
        self.kept: dict[Any, Any] = {}
        self._views: dict[Any, list[Tensor]] = {}
        for place in (0, 1):
            self._add_place(regions, start + place * half)

    def widen(self, ring: Ring) -> None:
        """Add as many places as fit into a ring, up to a limit; local, on all ranks."""
        step = self._buffers * self.chunk_bytes
        pairs = min(ring.half_bytes // step, _PLACES_OF_ALL // 2)
        for number in range(2 * pairs):
            at = (number & 1) * ring.half_bytes + (number >> 1) * step
            self._add_place(ring.regions, at)

    @property
    def is_wide(self) -> bool:
        """Whether there are more than two places."""
        return len(self.inputs) > 2

    def place(self, turn: int, *, many: bool) -> int:
        """Return where a turn writes: in turn one of the first two places, or one of those that were added."""
        return 2 + turn % (len(self.inputs) - 2) if many else turn & 1

    def alike(self, place: int) -> range:
        """Return the places that take turns with one: the first two, or those that were added."""
        return range(2, len(self.inputs)) if place > 1 else range(2)

    def _add_place(self, regions: list[Bytes], start: int) -> None:
        starts = [start + number * self.chunk_bytes for number in range(self._buffers)]
        buffers = [[region[at : at + self.chunk_bytes] for region in regions] for at in starts]
        self.inputs.append(buffers[0])
        self.outputs.append(buffers[-1])

    def input_views(self, place: int, start: int, stop: int, dtype: torch.dtype) -> list[Tensor]:
        """Return bytes `start` to `stop` of all ranks' input buffers as tensors; local."""
        key = (place, start, stop, dtype)
        if key not in self._views:
            self._make_room()
            for each in self.alike(place):
                self._views[each, start, stop, dtype] = views_of(self.inputs[each], start, stop, dtype)
        return self._views[key]

    def output_view(self, place: int, rank: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return bytes `start` to `stop` of one rank's output buffer as a tensor; local."""
        key = (place, rank, start, stop, dtype)
        if key not in self._views:
            self._make_room()
            for each in self.alike(place):
                buffer = self.outputs[each][rank]
                self._views[each, rank, start, stop, dtype] = views_of([buffer], start, stop, dtype)
        return self._views[key][0]

    def _make_room(self) -> None:
        if len(self._views) * len(self.inputs[0]) >= _MAX_VIEWS:
            self._views.clear()


def views_of(buffers: Sequence[Bytes], start: int, stop: int, dtype: torch.dtype) -> list[Tensor]:
    """Return bytes `start` to `stop` of buffers as tensors, no inference tensors; local."""
    with torch.inference_mode(False):
        return [torch.from_numpy(buffer[start:stop]).view(dtype) for buffer in buffers]


def many_places(ranks: int) -> int:
    """Return how many places of scratch memory are more than caches hold; local.

    All together they are 32 MiB for up to 8 ranks, and 4 MiB a rank for more, which share more caches.
    """
    return max(4, _PLACES_OF_ALL // ranks // 2 * 2)


def slices_of(nbytes: int, ranks: int, unit: int) -> list[tuple[int, int]]:
    """Cut bytes into one slice a rank, of whole units but for the last one that is not empty; local."""
    each = -(-nbytes // (ranks * unit)) * unit
    return [(min(rank * each, nbytes), min((rank + 1) * each, nbytes)) for rank in range(ranks)]


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each of some blocks, end to end, begins and ends; local."""
    stops = np.cumsum(sizes).tolist()
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def round_down(size: int, unit: int) -> int:
    """Return the largest multiple of `unit` up to `size`, but at least one unit; local."""
    return max(size // unit * unit, unit)


def reduce_in_pieces(parts: list[Tensor], op: ReduceOp, result: Tensor) -> None:
    """Reduce tensors of any strides, a part that fits into the cache at a time."""
    if not result.numel():
        return
    if result.is_contiguous() and all(part.is_contiguous() for part in parts):
        parts, result = [part.view(-1) for part in parts], result.view(-1)
    rows = max(1, PIECE_BYTES * result.shape[0] // result.nbytes)
    for at in range(0, result.shape[0], rows):
        reduce_in_rank_order([part[at : at + rows] for part in parts], op, result[at : at + rows])
