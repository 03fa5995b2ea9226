"""An allocator of symmetric tensors: blocks at the same offset in the region of each rank of a node.

An `Arena` is a few large segments, carved into blocks. A block is freed when its last tensor is gone on all ranks,
which they notice at different times: each notes it, and they compare notes the next time that they allocate.
Free ranges keep some memory for the next blocks; the memory beyond that goes back to the system.

A tensor of `common` is the same memory on all ranks. It has a segment of its own, which the system frees with the
last tensor on it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...utils.memory import flat_zeros
from ..tuning import FIRST_SEGMENT_BYTES, KEPT_FREE_BYTES
from .segment import HUGE_PAGE, PAGE, Segment, remedy, round_up, warn_no_shared_memory

if TYPE_CHECKING:
    from mpi4py import MPI


class FreeList:
    """Which ranges of a segment's regions are free; the first that fits is taken. The same on all ranks.

    Args:
        size: Bytes to hand out.

    Attributes:
        ranges: Beginnings and ends of the free ranges, in order; neighbours are joined.
    """

    def __init__(self, size: int) -> None:
        self.ranges = [(0, size)]

    def take(self, size: int, alignment: int) -> int | None:
        """Take `size` bytes; return their offset, None if there is no such range."""
        for index, (start, stop) in enumerate(self.ranges):
            begin = round_up(start, alignment)
            if begin + size <= stop:
                rest = ((start, begin), (begin + size, stop))
                self.ranges[index : index + 1] = [(low, high) for low, high in rest if low < high]
                return begin
        return None

    def give_back(self, start: int, size: int) -> None:
        """Return a range, which joins its neighbours."""
        ranges = sorted([*self.ranges, (start, start + size)])
        merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self.ranges = merged


class Block(NamedTuple):
    """A range at the same offset in each rank's region.

    Attributes:
        number: Counts the blocks of an arena, the same on all ranks.
        segment: Index of its segment.
        start: Offset in the regions.
        size: Bytes.
    """

    number: int
    segment: int
    start: int
    size: int


def _backed(segment: Segment, nbytes: int) -> Tensor | str:
    """Return a segment's first bytes, this rank's region backed with memory, or the reason of a failure; local."""
    # Python's mapping keeps a file open, and a process may have some hundred: the result is on another mapping.
    return segment.populate(0, segment.region_bytes) or segment.remapped(nbytes)


class Arena:
    """Blocks of shared memory for the ranks of one node, all of which call `allocate` together.

    Attributes:
        segments: The segments, oldest first.
        dropped: Numbers of blocks that this rank no longer uses and has not told the others about.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.segments: list[Segment] = []
        self.dropped: list[int] = []
        self._free: list[FreeList] = []
        self._blocks: dict[int, Block] = {}
        self._droppers: Counter[int] = Counter()
        self._numbers = count()
        self._commons: set[tuple[int, int]] = set()  # address and bytes of each

    def allocate(self, nbytes: int) -> Block | str:
        """Find a block of `nbytes` bytes and back it with memory; collective. Returns the reason of a failure."""
        has_freed = self._free_dropped()
        size = round_up(max(nbytes, 1), PAGE)
        alignment = HUGE_PAGE if size >= HUGE_PAGE else PAGE
        block, problem = self._find(size, alignment), None
        if block is None:
            problem = self._grow(size)
            block = self._find(size, alignment)
        # The new block is no longer free, and no rank populates another one before all have come to the exchange
        # below: a slow rank never returns pages that another rank has populated meanwhile.
        if has_freed:
            self._return_memory()
        if block is None:
            return problem or "no shared memory"
        segment = self.segments[block.segment]
        own = segment.populate(block.start, block.start + nbytes)
        problems = [text for text in self._comm.allgather(own) if text]
        if problems:
            segment.give_back(block.start, block.start + block.size)
            self.release([block.number])
            return str(problems[0])
        return block

    def _free_dropped(self) -> bool:
        """Free the blocks that all ranks have dropped; collective. Return True if there were any."""
        own = [self.dropped.pop() for _ in range(len(self.dropped))]
        for numbers in self._comm.allgather(own):
            self._droppers.update(numbers)
        numbers = sorted(number for number, ranks in self._droppers.items() if ranks == self._comm.size)
        self.release(numbers)
        return bool(numbers)

    def _return_memory(self) -> None:
        """Return the memory of free ranges in this rank's regions to the system, the first of them excepted; local.

        Free ranges are taken in the same order, so that the kept memory is used first.
        """
        kept = KEPT_FREE_BYTES // self._comm.size // PAGE * PAGE
        for segment, free in zip(self.segments, self._free, strict=True):
            for start, stop in free.ranges:
                first = min(start + kept, stop)
                kept -= first - start
                if first < stop:
                    segment.give_back(first, stop)

    def _find(self, size: int, alignment: int) -> Block | None:
        for index, free in enumerate(self._free):
            start = free.take(size, alignment)
            if start is not None:
                block = Block(next(self._numbers), index, start, size)
                self._blocks[block.number] = block
                return block
        return None

    def _grow(self, size: int) -> str | None:
        largest = max((segment.region_bytes for segment in self.segments), default=0)
        # Address space only: pages come with the blocks.
        wanted = round_up(max(size, FIRST_SEGMENT_BYTES, 2 * largest), HUGE_PAGE)
        segment = Segment.create(self._comm, wanted)
        if isinstance(segment, str):
            return segment
        self.segments.append(segment)
        self._free.append(FreeList(segment.region_bytes))
        return None

    def release(self, numbers: Iterable[int]) -> None:
        """Free blocks that no rank uses any more; local, called with the same numbers on all ranks."""
        for number in numbers:
            self._droppers.pop(number, None)
            block = self._blocks.pop(number)
            self._free[block.segment].give_back(block.start, block.size)

    def close(self) -> None:
        """Release the segments; each lives as long as a tensor on it. Local; nothing is allocated afterwards."""
        self.segments.clear()
        self._free.clear()
        self._blocks.clear()

    def symmetric(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 of shared memory, ordinary memory if there is not enough; collective."""
        block = self.allocate(nbytes)
        if isinstance(block, Block):
            return self.tensor(block, nbytes)
        warn_no_shared_memory(block)
        return flat_zeros(nbytes, torch.uint8)

    def tensor(self, block: Block, nbytes: int) -> Tensor:
        """Return this rank's memory of a block, [nbytes] uint8, which is dropped once no tensor uses it; local."""
        memory = self.segments[block.segment].regions[self._comm.rank][block.start : block.start + nbytes]
        # A view has an owner of its own, whose end is the end of the last tensor on it.
        memory = np.frombuffer(memory.data, dtype=np.uint8) if nbytes else np.empty(0, np.uint8)
        weakref.finalize(memory, self.dropped.append, block.number).atexit = False
        return torch.from_numpy(memory)

    def common(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 of memory that is the same on all ranks; collective.

        It spans the regions of a segment, and each rank asks for the pages of its own.

        Raises:
            MemoryError: There is not enough, on any rank.
        """
        segment = Segment.create(self._comm, -(-nbytes // self._comm.size))
        mapped: Tensor | str = segment if isinstance(segment, str) else _backed(segment, nbytes)
        problems = [text for text in self._comm.allgather(mapped if isinstance(mapped, str) else "") if text]
        if isinstance(mapped, str) or problems:
            raise MemoryError(
                f"no {nbytes / 2**20:.0f} MiB could be shared with the other ranks of this node ({problems[0]}). "
                f"What helps: {remedy(problems[0])}"
            )
        memory = np.frombuffer(mapped.numpy().data, dtype=np.uint8)
        key = memory.ctypes.data, nbytes
        self._commons.add(key)
        weakref.finalize(memory, self._commons.discard, key).atexit = False
        return torch.from_numpy(memory)

    def address(self, tensor: Tensor) -> int:
        """Return a tensor's address in the arena, above 0 and equal on ranks if at the same offset; local."""
        if not self.segments or not tensor.is_contiguous():
            return 0
        pointer, nbytes = tensor.data_ptr(), tensor.nbytes
        for index, segment in enumerate(self.segments):
            offset = pointer - segment.addresses[segment.own]
            if 0 <= offset <= segment.region_bytes - nbytes:
                return (index << 48) + offset + 1
        return 0

    def is_common(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in memory of `common`; local."""
        pointer, nbytes = tensor.data_ptr(), tensor.nbytes
        return any(0 <= pointer - address <= size - nbytes for address, size in tuple(self._commons))

    def parts(self, address: int, nbytes: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the memory of all local ranks at an address; local."""
        segment, offset = self.segments[(address - 1) >> 48], (address - 1) & ((1 << 48) - 1)
        return [region[offset : offset + nbytes] for region in segment.regions]

    def rows(self, address: int, nbytes: int) -> Tensor:
        """Return the memory of all local ranks at an address, [ranks, nbytes] uint8; local."""
        segment, offset = self.segments[(address - 1) >> 48], (address - 1) & ((1 << 48) - 1)
        whole = np.frombuffer(segment.memory, dtype=np.uint8).reshape(len(segment.regions), segment.region_bytes)
        return torch.from_numpy(whole[:, offset : offset + nbytes])
