"""Segments: anonymous shared memory, mapped by the ranks of one node.

A `Segment` is one anonymous file in memory, mapped by all ranks of a node, with a region for each of them:

    | region of local rank 0 | region of local rank 1 | ...         every rank reads and writes all of them

It is not limited by the size of /dev/shm, and its pages are asked for with a call that can fail (a full node is
an error that is dealt with) instead of appearing at the first write (which would be a SIGBUS). Each rank asks
for the pages of its own region, so that they lie near it.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Segment:
    """One piece of shared memory, with a region of `region_bytes` for each rank of a node.

    Attributes:
        memory: All of it.
        region_bytes: Size of each region, a multiple of the page size.
        regions: [local ranks] the regions as bytes, in the order of the node's communicator.
        own: This rank's index in `regions`.
        addresses: [local ranks] address of each region in this process.
    """

    def __init__(
        self, memory: mmap.mmap, region_bytes: int, own: int, count: int, descriptor: int | None = None
    ) -> None:
        self.memory = memory
        self.region_bytes = region_bytes
        self.own = own
        self._descriptor = descriptor
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor).atexit = False
        whole = np.frombuffer(memory, dtype=np.uint8)
        self.regions = [whole[k * region_bytes : (k + 1) * region_bytes] for k in range(count)]
        self.addresses: list[int] = [region.ctypes.data for region in self.regions]

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
        region_bytes = round_up(region_bytes, PAGE)
        total = region_bytes * comm.size

        def join() -> Segment:
            memory, descriptor = _accept(offered, total)
            return cls(memory, region_bytes, comm.rank, comm.size, descriptor)

        offered = comm.bcast(_attempt(lambda: _offer(total)) if comm.rank == 0 else None)
        joined: Segment | str = offered if isinstance(offered, str) else _attempt(join)
        problems = [text for text in comm.allgather(joined if isinstance(joined, str) else None) if text]
        if comm.rank == 0 and not isinstance(offered, str):
            os.close(offered[1])  # by now all have opened the file
        return str(problems[0]) if problems else joined

    def populate(self, start: int, stop: int) -> str | None:
        """Back bytes of this rank's region with memory; local. Returns the reason of a failure."""
        first = self.own * self.region_bytes + start // PAGE * PAGE
        length = round_up(stop, PAGE) - start // PAGE * PAGE
        return _attempt(lambda: self._reserve(first, length)) if length else None

    def _reserve(self, first: int, length: int) -> None:
        try:
            self.memory.madvise(_POPULATE_WRITE, first, length)
        except OSError as error:
            if error.errno != errno.EINVAL or self._descriptor is None:
                raise
            os.posix_fallocate(self._descriptor, first, length)  # a kernel before Linux 5.14

    def remapped(self, nbytes: int) -> Tensor | str:
        """Return its first bytes, [nbytes] uint8, on a mapping that keeps no file open, or why not; local."""
        file = f"/proc/self/fd/{self._descriptor}"
        found: Tensor | str = _attempt(lambda: torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8))
        return found

    def give_back(self, start: int, stop: int) -> None:
        """Return the memory behind bytes of this rank's region to the system; local."""
        first = self.own * self.region_bytes
        _attempt(lambda: self.memory.madvise(mmap.MADV_REMOVE, first + start, stop - start))


def _offer(total: int) -> tuple[int, int, int, int]:
    """Make the file; return the process that has it open, its descriptor there, its device and its number."""
    descriptor = os.memfd_create("axonmpi", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, total)
    status = os.fstat(descriptor)
    return os.getpid(), descriptor, status.st_dev, status.st_ino


def _accept(offered: tuple[int, int, int, int], total: int) -> tuple[mmap.mmap, int]:
    """Map the file; return a descriptor, too, for kernels on which only that gets its pages."""
    process, number, device, inode = offered
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            raise OSError(errno.ENOENT, f"process {process} is not that of another rank here")
        memory = mmap.mmap(descriptor, total)
    except BaseException:
        os.close(descriptor)
        raise
    _attempt(lambda: memory.madvise(mmap.MADV_HUGEPAGE))
    return memory, descriptor


def _attempt(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or the reason of its failure as a text."""
    try:
        return action()
    except (OSError, ValueError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


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
    """Return the remedy for a reason for which memory could not be shared; local."""
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


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `size`; local."""
    return -(-size // unit) * unit
