"""Reading what the ranks of a node need of files, each block once for all of them.

    rank 0 needs    # # # # . . . # .       blocks of 1 MiB of a file
    rank 1 needs    . . # # . # . . .
    read by         0 0 0 1 . 1 . 1 .       the next needed blocks are a window, of which each rank reads a share

Windows are memory that the node has in common. Each rank copies its own shards out of a window; meanwhile others
read the next one into a second memory. Blocks are read whole, so their checksums are checked.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..utils.partition import split_range
from ..utils.text import text_of_problems
from .files.checksums import BLOCK_BYTES, block_count, crc32
from .files.tensor_file import TensorEntry, TensorFile, check_size
from .ranks import CheckpointRanks
from .shards.subarrays import Subarray, strides_of, subarrays_of_range
from .shards.tensor_shard import TensorShard

WINDOW_BYTES = 4 << 20
_BEFORE = 4096  # bytes of the window before, for elements that begin in it
_MOST_BLOCKS = 64  # of a window
_MOST_PROBLEMS = 8
_MOST_NAMES = 4

Blocks = npt.NDArray[np.int64]


@torch.no_grad()
def read_shards(
    folder: Path,
    files: Sequence[TensorFile],
    shards: Sequence[tuple[str, TensorShard]],
    ranks: CheckpointRanks,
    checksums: Mapping[str, npt.NDArray[np.uint32]],
    *,
    dtype: torch.dtype | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Fill shards with the values that files have, in the dtype and on the device of each shard; collective.

    The ranks of a node read together; each has two windows of memory for it, and no more.

    Args:
        folder: Where the files are.
        files: The same on all ranks.
        shards: What this rank needs, with the tensor's name in the files; shapes are equal.
        ranks: Who reads.
        checksums: By name of a file, uint32 [blocks]; files without them are not checked.
        dtype: What floating-point values are rounded to first; None means nothing.
        window_bytes: Bytes of a window for each rank.

    Raises:
        CheckpointError: Something cannot be read, or is damaged; on all ranks, when they have read all. Names the
            files, the tensors and the ranks; the values of the shards are then undefined.
    """
    sources = [_Source(folder / file.name, file, shards, checksums.get(file.name), dtype) for file in files]
    problems: list[str] = []
    needed = _needed_on_node(ranks.node, sources)
    windows = _Windows(ranks.node, window_bytes, sum(map(len, needed)))
    for source, blocks in zip(sources, needed, strict=True):
        if len(blocks):
            with closing(source):
                with _noted(problems):
                    source.open()
                windows.read(source, blocks, problems)
    _raise_on_all(problems, ranks)


def check_blocks(
    folder: Path,
    files: Sequence[TensorFile],
    ranks: CheckpointRanks,
    checksums: Mapping[str, npt.NDArray[np.uint32]],
) -> None:
    """Compare all blocks of files with their checksums, each block by one rank; collective.

    Args:
        folder: Where the files are.
        files: The same on all ranks; those without checksums are left out.
        ranks: Who reads.
        checksums: By name of a file, uint32 [blocks].

    Raises:
        CheckpointError: Something cannot be read, or is damaged; on all ranks. Names files, tensors and ranks.
    """
    problems: list[str] = []
    memory = memoryview(bytearray(BLOCK_BYTES))  # one block, which stays in the processor's cache
    for file in files:
        if file.name in checksums:
            start, stop = split_range(block_count(file.size), ranks.all.size, ranks.all.rank)
            with closing(_Source(folder / file.name, file, (), checksums[file.name], None)) as source:
                with _noted(problems):
                    source.open()
                for block in range(start, stop):
                    with _noted(problems):
                        source.read(block, memory)
    _raise_on_all(problems, ranks)


def _raise_on_all(problems: Sequence[str], ranks: CheckpointRanks) -> None:
    if text := text_of_problems(ranks.all.all_gather_object("\n  ".join(problems))):
        raise CheckpointError(text)


def _needed_on_node(node: ProcessGroup, sources: Sequence[_Source]) -> list[Blocks]:
    """Return the numbers of the blocks of each file that any rank of the node needs; collective over it."""
    marks = [source.marks() for source in sources]
    union = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *marks]))
    node.all_reduce_max(union)
    return [np.flatnonzero(mark.numpy()) for mark in union.split([len(mark) for mark in marks])]


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Keep an error for later: the other ranks of the node go on, and wait for this one at each window."""
    try:
        yield
    except Exception as error:
        if len(problems) < _MOST_PROBLEMS:
            problems.append(str(error) or type(error).__name__)


class _Windows:
    """Two windows that the ranks of a node fill and use in turn.

    A rank fills one while others still copy out of the other one, so the ranks meet once a window.

    Args:
        node: The ranks.
        nbytes: Bytes of a window for each rank.
        most: How many blocks are read in all.
    """

    def __init__(self, node: ProcessGroup, nbytes: int, most: int) -> None:
        self._node = node
        self._count = max(1, min(max(1, nbytes // BLOCK_BYTES) * node.size, _MOST_BLOCKS, most))
        self._filled, self._next = node.node_empty((2, _BEFORE + self._count * BLOCK_BYTES), torch.uint8)

    def read(self, source: _Source, blocks: Blocks, problems: list[str]) -> None:
        """Read blocks of a file and copy this rank's shards out of them; collective over the node."""
        last = -2
        for at in range(0, len(blocks), self._count):
            window = blocks[at : at + self._count]
            if window[0] == last + 1 and self._node.rank == 0:
                self._next[:_BEFORE] = self._filled[-_BEFORE:]
            self._filled, self._next, last = self._next, self._filled, window[-1]
            self._fill(source, window, problems)
            self._node.barrier()
            with _noted(problems):
                source.copy(window, self._filled)

    def _fill(self, source: _Source, window: Blocks, problems: list[str]) -> None:
        memory = memoryview(self._filled[_BEFORE:].numpy())
        start, stop = split_range(len(window), self._node.size, self._node.rank)
        for place in range(start, stop):
            with _noted(problems):
                source.read(int(window[place]), memory[place * BLOCK_BYTES :])


class _Source:
    """A file, and what this rank needs of it.

    Args:
        path: Of the file.
        file: What is in it.
        shards: What this rank needs, with the tensor's name; of other files, too.
        checksums: Of its blocks, None if they are not known.
        dtype: What floating-point values are rounded to first.
    """

    def __init__(
        self,
        path: Path,
        file: TensorFile,
        shards: Sequence[tuple[str, TensorShard]],
        checksums: npt.NDArray[np.uint32] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._path = path
        self._file = file
        self._checksums = checksums
        self._dtype = dtype
        found = [(file.entries[name], shard) for name, shard in shards if name in file.entries]
        self._needed = sorted((each for each in found if each[0].spec.nbytes), key=lambda each: each[0].start)
        self._stops = [entry.stop for entry, _ in self._needed]
        self._opened: FileIO | None = None

    def marks(self) -> npt.NDArray[np.uint8]:
        """Return 1 for each block of the file that this rank needs, 0 for the others; local."""
        change = np.zeros(block_count(self._file.size) + 1, dtype=np.int64)
        for entry, shard in self._needed:
            for piece in shard.pieces:
                starts, nbytes = _stretches(piece.subarray, entry)
                np.add.at(change, starts // BLOCK_BYTES, 1)
                np.add.at(change, (starts + nbytes - 1) // BLOCK_BYTES + 1, -1)
        return (np.cumsum(change)[:-1] > 0).astype(np.uint8)

    # ---- from the file into a window --------------------------------------------------------------------------

    def open(self) -> None:
        """Open the file; local.

        Raises:
            CheckpointError: It cannot be opened, or has another size than it had for rank 0.
        """
        try:
            check_size(self._path, self._file, self._path.stat().st_size, self._file.size)
            self._opened = self._path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be opened: {error.strerror}") from error

    def close(self) -> None:
        """Close the file, if it is open; local."""
        if self._opened is not None:
            self._opened.close()

    def read(self, block: int, memory: memoryview) -> None:
        """Read a block to the beginning of some memory, and check it; local. Nothing, if the file is not open.

        Raises:
            CheckpointError: It cannot be read, or is damaged. Names the tensors in it.
        """
        if self._opened is None:
            return
        start = block * BLOCK_BYTES
        memory = memory[: min(BLOCK_BYTES, self._file.size - start)]
        at = 0
        try:
            while at < len(memory):
                count = os.preadv(self._opened.fileno(), [memory[at:]], start + at)
                if not count:
                    raise self._error(block, "it is cut off")
                at += count
        except OSError as error:
            raise self._error(block, f"cannot be read: {error.strerror}") from error
        if self._checksums is not None and crc32(memory) != self._checksums[block]:
            raise self._error(block, "its bytes are not those that were written: the file is damaged")

    def _error(self, block: int, what: str) -> CheckpointError:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._file.size)
        names = [repr(entry.spec.name) for entry in self._file.touching(start, stop)]
        shown = ", ".join(names[:_MOST_NAMES] + ["..."] * (len(names) > _MOST_NAMES)) or "its header"
        return CheckpointError(f"{self._path}: bytes {start} to {stop}, with {shown}: {what}")

    # ---- from a window into shards -----------------------------------------------------------------------------

    def copy(self, window: Blocks, memory: Tensor) -> None:
        """Copy out of a window what this rank needs; local.

        Args:
            window: Numbers of the blocks in it.
            memory: [bytes] with the bytes before the first block, and then the blocks end to end.
        """
        gaps = np.flatnonzero(np.diff(window) != 1) + 1
        for first, last in zip([0, *gaps], [*gaps, len(window)], strict=True):
            start = int(window[first]) * BLOCK_BYTES
            stop = start + int(last - first) * BLOCK_BYTES
            bytes_before = _BEFORE + int(first) * BLOCK_BYTES - start
            for entry, shard in self._between(start, stop):
                self._copy_shard(entry, shard, start, stop, memory, bytes_before)

    def _between(self, start: int, stop: int) -> Iterator[tuple[TensorEntry, TensorShard]]:
        for index in range(bisect_right(self._stops, start), len(self._needed)):
            if self._needed[index][0].start >= stop:
                return
            yield self._needed[index]

    def _copy_shard(
        self, entry: TensorEntry, shard: TensorShard, start: int, stop: int, memory: Tensor, shift: int
    ) -> None:
        """Copy the elements of a tensor that end after `start`, and at `stop` at the latest.

        Of one that begins before `start`, the first bytes are before it in memory too, if this rank needs it: then
        it needs the block before as well.

        Args:
            entry: The tensor.
            shard: What this rank needs of it.
            start: Where blocks that follow each other begin in the file.
            stop: Where they end.
            memory: [bytes] the window.
            shift: How much further back in memory bytes are than in the file.
        """
        shape, size = entry.spec.shape, entry.spec.dtype.itemsize
        first = max(0, start - entry.start) // size
        last = min(stop - entry.start, entry.spec.nbytes) // size
        place = entry.start + shift + first * size
        values = _elements(memory[place : place + (last - first) * size], entry.spec.dtype)
        for subarray in subarrays_of_range(shape, first, last):
            at = subarray.first_in(shape) - first
            source = values[at : at + subarray.numel].view(subarray.size)
            for piece in shard.pieces:
                if common := subarray.meet(piece.subarray):
                    found = source[common.within(subarray).slices]
                    if self._dtype is not None and found.is_floating_point():
                        found = found.to(self._dtype)
                    piece.view[common.within(piece.subarray).slices].copy_(found)


def _elements(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of a dtype; where they are not aligned, as other tools may leave them, a copy."""
    return (values.clone() if values.storage_offset() % dtype.itemsize else values).view(dtype)


def _stretches(subarray: Subarray, entry: TensorEntry) -> tuple[npt.NDArray[np.int64], int]:
    """Return where in the file the slices of bytes with a subarray of a tensor begin, and the bytes of each.

    Gaps below a block are shard of a file_slice, so there are no more slices than blocks.
    """
    starts = np.zeros(1 if subarray.numel else 0, dtype=np.int64)
    nbytes = entry.spec.dtype.itemsize
    for size, stride in zip(reversed(subarray.size), reversed(strides_of(entry.spec.shape)), strict=True):
        step = stride * entry.spec.dtype.itemsize
        if len(starts) == 1 and step - nbytes < BLOCK_BYTES:
            nbytes += (size - 1) * step
        else:
            starts = (np.arange(size, dtype=np.int64)[:, None] * step + starts).reshape(-1)
    offset = subarray.first_in(entry.spec.shape) * entry.spec.dtype.itemsize
    return starts + (entry.start + offset), nbytes
