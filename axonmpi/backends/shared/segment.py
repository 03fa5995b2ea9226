"""Memory that the ranks of one node share.

A `Segment` is one anonymous file in memory, mapped by all ranks of a node, with a region for each of them:

    | region of local rank 0 | region of local rank 1 | ...         every rank reads and writes all of them

It is not limited by the size of /dev/shm, and its pages are asked for with a call that can fail (a full node is
an error that is dealt with) instead of appearing at the first write (which would be a SIGBUS). Each rank asks
for the pages of its own region, so that they lie near it.

An `Arena` is a few large segments, carved into blocks at the same offset in each rank's region. Blocks are freed
when their last tensor is gone, which ranks notice at different times: each notes it, and they compare notes
the next time that they allocate together.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Arena", "Block", "FreeList", "Segment", "remedy", "warn_no_shared_memory"]

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
FIRST_SEGMENT_BYTES = 64 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Segment:
    """One piece of shared memory, with a region of `region_bytes` for each rank of a node.

    Attributes:
        memory: All of it.
        region_bytes: Size of each region, a multiple of the page size.
        regions: [local ranks] the regions as bytes, in the order of the node's communicator.
        own: This rank's index in `regions`.
    """

    def __init__(self, memory: mmap.mmap, region_bytes: int, own: int, count: int) -> None:
        self.memory = memory
        self.region_bytes = region_bytes
        self.own = own
        self._descriptor: int | None = None
        whole = np.frombuffer(memory, dtype=np.uint8)
        self.regions = [whole[k * region_bytes : (k + 1) * region_bytes] for k in range(count)]
        self._address = self.regions[own].ctypes.data

    @classmethod
    def create(cls, comm: MPI.Intracomm, region_bytes: int) -> Segment | str:
        """Make a segment for the ranks of one node; collective.

        Args:
            comm: The ranks, all on one node.
            region_bytes: Bytes for each rank; rounded up to whole pages.

        Returns:
            The segment, not backed by memory yet (see `populate`), or why there is none, the same kind on all
            ranks.
        """
        region_bytes = _round_up(region_bytes, PAGE)
        total = region_bytes * comm.size
        first = _attempt(lambda: _offer(total)) if comm.rank == 0 else None
        offered = comm.bcast(first if isinstance(first, str) or first is None else first[1])
        memory: mmap.mmap | str
        if isinstance(offered, str):
            memory = offered
        elif first is not None and not isinstance(first, str):
            memory = _attempt(lambda: mmap.mmap(first[0], total))
        else:
            memory = _attempt(lambda: _accept(offered, total))
        problems = [text for text in comm.allgather(memory if isinstance(memory, str) else None) if text]
        segment: Segment | None = None
        if not problems and not isinstance(memory, str):
            segment = cls(memory, region_bytes, comm.rank, comm.size)
            segment.keep_open(offered[0], offered[1])
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _attempt(lambda: memory.madvise(mmap.MADV_HUGEPAGE))
        comm.Barrier()  # all have opened the file
        if first is not None and not isinstance(first, str):
            os.close(first[0])
        return str(problems[0]) if segment is None else segment

    def populate(self, start: int, stop: int, region: int | None = None) -> str | None:
        """Back bytes of a region, by default the own, with memory; local. Returns what went wrong."""
        first = (self.own if region is None else region) * self.region_bytes + start // PAGE * PAGE
        length = _round_up(stop, PAGE) - start // PAGE * PAGE
        try:
            if length:
                self._reserve(first, length)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _reserve(self, first: int, length: int) -> None:
        try:
            self.memory.madvise(_POPULATE_WRITE, first, length)
        except OSError as error:
            if error.errno != errno.EINVAL or self._descriptor is None:
                raise
            os.posix_fallocate(self._descriptor, first, length)  # a kernel before Linux 5.14

    def give_back(self, start: int, stop: int, region: int | None = None) -> None:
        """Return the memory behind bytes of a region, by default the own, to the system; local."""
        first = (self.own if region is None else region) * self.region_bytes
        if hasattr(mmap, "MADV_REMOVE"):
            _attempt(lambda: self.memory.madvise(mmap.MADV_REMOVE, first + start, stop - start))

    def keep_open(self, process: int, number: int) -> None:
        """Keep a descriptor of the file, for kernels on which only that gets its pages; local."""
        descriptor = _attempt(lambda: os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
        if isinstance(descriptor, int):
            self._descriptor = descriptor
            weakref.finalize(self, os.close, descriptor).atexit = False

    def offset_of(self, address: int, nbytes: int, region: int | None = None) -> int | None:
        """Return where in a region, by default the own, `nbytes` bytes at `address` lie, None if not; local."""
        offset = address - (self._address if region is None else self.regions[region].ctypes.data)
        return offset if offset >= 0 and offset + nbytes <= self.region_bytes else None


def _offer(total: int) -> tuple[int, tuple[int, int, int, int]]:
    """Make the file; return its descriptor, and how other processes find it."""
    descriptor = os.memfd_create("axonmpi", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, total)
    status = os.fstat(descriptor)
    return descriptor, (os.getpid(), descriptor, status.st_dev, status.st_ino)


def _accept(offered: tuple[int, int, int, int], total: int) -> mmap.mmap:
    """Map the file that another process has made."""
    process, number, device, inode = offered
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            raise OSError(errno.ENOENT, f"process {process} is not that of another rank here")
        return mmap.mmap(descriptor, total)
    finally:
        os.close(descriptor)


def _attempt(action: Callable[[], Any]) -> Any:
    """Return what `action` returns, or what went wrong as a text."""
    try:
        return action()
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


class FreeList:
    """Which ranges of a segment's regions are free; the first that fits is taken. The same on all ranks.

    Args:
        size: Bytes to hand out.
    """

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int, alignment: int) -> int | None:
        """Take `size` bytes; return where they begin, None if there is no such range."""
        for place, (start, stop) in enumerate(self._free):
            begin = _round_up(start, alignment)
            if begin + size <= stop:
                rest = ((start, begin), (begin + size, stop))
                self._free[place : place + 1] = [(low, high) for low, high in rest if low < high]
                return begin
        return None

    def give_back(self, start: int, size: int) -> None:
        """Return a range, which joins its neighbours."""
        ranges = sorted([*self._free, (start, start + size)])
        merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    @property
    def largest(self) -> int:
        """Size of the largest free range."""
        return max((stop - start for start, stop in self._free), default=0)


class Block:
    """A range at the same place in each rank's region.

    Attributes:
        number: Counts the blocks of an arena, the same on all ranks.
        segment: Index of its segment.
        start: Offset in the regions.
        size: Bytes.
    """

    def __init__(self, number: int, segment: int, start: int, size: int) -> None:
        self.number = number
        self.segment = segment
        self.start = start
        self.size = size


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
        self._next_number = 0

    def allocate(self, nbytes: int, *, common: bool = False) -> Block | str:
        """Find a block of `nbytes` bytes and back it with memory; collective. Returns what went wrong as a text.

        Args:
            nbytes: Its size.
            common: Back the first rank's memory only, which all ranks use; each asks for the pages of its part.
        """
        self._collect()
        size = _round_up(max(nbytes, 1), PAGE)
        alignment = HUGE_PAGE if size >= HUGE_PAGE else PAGE
        block = self._find(size, alignment)
        if block is None:
            problem = self._grow(size)
            block = self._find(size, alignment)
            if block is None:
                return problem or "no shared memory"
        own = self._populate(block, nbytes, common)
        problems = [text for text in self._comm.allgather(own) if text]
        if problems:
            segment = self.segments[block.segment]
            segment.give_back(block.start, block.start + block.size, 0 if common else None)
            self.release([block.number])
            return str(problems[0])
        return block

    def _populate(self, block: Block, nbytes: int, common: bool) -> str | None:
        segment = self.segments[block.segment]
        if not common:
            return segment.populate(block.start, block.start + nbytes)
        rank, ranks = self._comm.rank, self._comm.size
        low, high = (_round_up(nbytes * place // ranks, PAGE) for place in (rank, rank + 1))
        return segment.populate(block.start + low, block.start + min(high, _round_up(nbytes, PAGE)), 0)

    def _collect(self) -> None:
        """Free what all ranks have dropped; collective."""
        own = [self.dropped.pop() for _ in range(len(self.dropped))]
        for numbers in self._comm.allgather(own):
            self._droppers.update(numbers)
        self.release(sorted(number for number, ranks in self._droppers.items() if ranks == self._comm.size))

    def _find(self, size: int, alignment: int) -> Block | None:
        for index, free in enumerate(self._free):
            start = free.take(size, alignment)
            if start is not None:
                block = Block(self._next_number, index, start, size)
                self._blocks[block.number] = block
                self._next_number += 1
                return block
        return None

    def _grow(self, size: int) -> str | None:
        largest = max((segment.region_bytes for segment in self.segments), default=0)
        # Address space only: pages come with the blocks.
        wanted = _round_up(max(size, FIRST_SEGMENT_BYTES, 2 * largest), HUGE_PAGE)
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
        """Let go of the segments; each lives as long as a tensor on it. Local; nothing is allocated afterwards."""
        self.segments.clear()
        self._free.clear()
        self._blocks.clear()

    @property
    def bytes_in_use(self) -> int:
        """Size of the blocks in use, in each rank's region."""
        return sum(block.size for block in self._blocks.values())

    def tensor(self, block: Block, nbytes: int, *, common: bool = False) -> Tensor:
        """Return a block's memory, this rank's or that in common, [nbytes] uint8; local.

        The block is noted as dropped once no tensor uses it.
        """
        region = self.segments[block.segment].regions[0 if common else self._comm.rank]
        memory = region[block.start : block.start + nbytes]
        # A view has an owner of its own, whose end is the end of the last tensor on it.
        memory = np.frombuffer(memory.data, dtype=np.uint8) if nbytes else np.empty(0, np.uint8)
        weakref.finalize(memory, self.dropped.append, block.number).atexit = False
        return torch.from_numpy(memory)

    def address(self, tensor: Tensor) -> int:
        """Say where in the arena a tensor lies: a number above 0, equal on ranks if in the same place; local."""
        if not self.segments or not tensor.is_contiguous():
            return 0
        pointer, nbytes = tensor.data_ptr(), tensor.nbytes
        for index, segment in enumerate(self.segments):
            offset = segment.offset_of(pointer, nbytes)
            if offset is not None:
                return (index << 48) + offset + 1
        return 0

    def is_common(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in the first rank's memory, which is what all may have in common; local."""
        return any(segment.offset_of(tensor.data_ptr(), tensor.nbytes, 0) is not None for segment in self.segments)

    def parts(self, address: int, nbytes: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the memory of all local ranks at an address; local."""
        segment, offset = self.segments[(address - 1) >> 48], (address - 1) & ((1 << 48) - 1)
        return [region[offset : offset + nbytes] for region in segment.regions]

    def rows(self, address: int, nbytes: int) -> Tensor:
        """Return the memory of all local ranks at an address, [ranks, nbytes] uint8; local."""
        segment, offset = self.segments[(address - 1) >> 48], (address - 1) & ((1 << 48) - 1)
        whole = np.frombuffer(segment.memory, dtype=np.uint8).reshape(len(segment.regions), segment.region_bytes)
        return torch.from_numpy(whole[:, offset : offset + nbytes])


_warned = False


def warn_no_shared_memory(reason: str) -> None:
    """Say once in a process that ordinary memory serves in place of shared memory; local."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"no memory could be shared with the other ranks of this node ({reason}); ordinary memory is used, "
            f"which makes collectives slower. What helps: {remedy(reason)}",
            RuntimeWarning,
            stacklevel=2,
        )


def remedy(reason: str) -> str:
    """Say what helps where memory could not be shared for a reason; local."""
    if os.strerror(errno.EMFILE) in reason:
        return (
            "raise the limit on open files (ulimit -n), or release groups that are used no more with group.close()"
        )
    if "/proc/" in reason:
        return "ranks have to be processes of one user who see each other: start those of a node in one container"
    return (
        "give the job more memory (sbatch --mem, the limit of the container or cgroup), or raise the limit on file "
        "sizes (ulimit -f unlimited)"
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
