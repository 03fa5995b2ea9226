"""Reading shards from files: each needed block once for all ranks of a node.

    rank 0 needs    # # # # . . . # .       blocks of 1 MiB of a file
    rank 1 needs    . . # # . # . . .
    read by         0 0 0 1 . 1 . 1 .       the next needed blocks are a window; each rank reads a slice of it

Windows are shared memory of the node. Each rank copies its own shards out of a window; meanwhile others read the
next window into a second memory. Blocks are read in full, so that their checksums can be checked.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from ..utils.partition import split_range
from ..utils.text import quoted
from .files.checksums import BLOCK_BYTES, Checksums, block_count, crc32
from .files.tensor_file import TensorEntry, TensorFile, check_size
from .rank_errors import RankErrors
from .ranks import CheckpointRanks
from .shards.subarrays import Subarray, strides_of
from .shards.tensor_shard import TensorShard, pieces_of_range

WINDOW_BYTES = 4 << 20
_BEFORE = 4096  # bytes of the window before, for an element that begins in it
_MOST_BLOCKS = 64  # of a window
_MOST_NAMES = 4

Blocks = npt.NDArray[np.int64]


@torch.no_grad()
def read_shards(
    folder: Path,
    files: Sequence[TensorFile],
    shards: Sequence[tuple[str, TensorShard]],
    ranks: CheckpointRanks,
    checksums: Mapping[str, Checksums],
    *,
    dtype: torch.dtype | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Fill shards with the values in files, in the dtype and on the device of each shard; collective.

    The ranks of a node read together, with two windows of memory for each of them.

    Args:
        folder: Of the files.
        files: The same on all ranks.
        shards: Of this rank, with the tensor's name in the files; shapes are equal.
        ranks: All ranks that read.
        checksums: By file name; files without them are not checked.
        dtype: Floating-point values are rounded to it first; None means no rounding.
        window_bytes: Bytes of a window for each rank.

    Raises:
        CheckpointError: A file cannot be read or is damaged; on all ranks, when they have read all files. Names
            files, tensors and ranks; the values of the shards are then undefined.
    """
    readers = [_Reader(folder / file.name, file, shards, checksums.get(file.name), dtype) for file in files]
    errors = RankErrors(folder)
    needed = _needed_on_node(ranks.node, readers)
    windows = _Windows(ranks.node, window_bytes, sum(map(len, needed)))
    for reader, blocks in zip(readers, needed, strict=True):
        if len(blocks):
            with closing(reader):
                with errors.recorded():
                    reader.open()
                windows.read(reader, blocks, errors)
    errors.raise_on_all(ranks.all, None)


def check_blocks(
    folder: Path, files: Sequence[TensorFile], ranks: CheckpointRanks, checksums: Mapping[str, Checksums]
) -> None:
    """Compare all blocks of files with their checksums, each block by one rank; collective.

    Args:
        folder: Of the files.
        files: The same on all ranks; files without checksums are left out.
        ranks: All ranks that read.
        checksums: By file name.

    Raises:
        CheckpointError: A file cannot be read or is damaged; on all ranks. Names files, tensors and ranks.
    """
    errors = RankErrors(folder)
    memory = memoryview(bytearray(BLOCK_BYTES))  # one block, which stays in the processor's cache
    for file in files:
        if file.name in checksums:
            start, stop = split_range(block_count(file.size), ranks.all.size, ranks.all.rank)
            with closing(_Reader(folder / file.name, file, (), checksums[file.name], None)) as reader:
                with errors.recorded():
                    reader.open()
                for block in range(start, stop):
                    with errors.recorded():
                        reader.read(block, memory)
    errors.raise_on_all(ranks.all, None)


def _needed_on_node(node: ProcessGroup, readers: Sequence[_Reader]) -> list[Blocks]:
    """Return the numbers of the blocks of each file that any rank of the node needs; collective over the node."""
    marks = [reader.needed() for reader in readers]
    union = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *marks]))
    node.all_reduce_max(union)
    return [np.flatnonzero(mark.numpy()) for mark in union.split([len(mark) for mark in marks])]


class _Windows:
    """Two windows that the ranks of a node fill in turn.

    A rank fills one window while others still copy out of the other one, so one barrier a window is enough.

    Args:
        node: The ranks.
        nbytes: Bytes of a window for each rank.
        most: Number of blocks in all.
    """

    def __init__(self, node: ProcessGroup, nbytes: int, most: int) -> None:
        self._node = node
        self._count = max(1, min(max(1, nbytes // BLOCK_BYTES) * node.size, _MOST_BLOCKS, most))
        self._filled, self._next = node.node_empty((2, _BEFORE + self._count * BLOCK_BYTES), torch.uint8)

    def read(self, reader: _Reader, blocks: Blocks, errors: RankErrors) -> None:
        """Read blocks of a file and copy this rank's shards out of them; collective over the node."""
        last = -2
        for at in range(0, len(blocks), self._count):
            window = blocks[at : at + self._count]
            # An element may begin in the window before.
            if window[0] == last + 1 and self._node.rank == 0:
                self._next[:_BEFORE] = self._filled[-_BEFORE:]
            self._filled, self._next, last = self._next, self._filled, window[-1]
            self._fill(reader, window, errors)
            self._node.barrier()
            with errors.recorded():
                reader.copy(window, self._filled)

    def _fill(self, reader: _Reader, window: Blocks, errors: RankErrors) -> None:
        memory = memoryview(self._filled[_BEFORE:].numpy())
        start, stop = split_range(len(window), self._node.size, self._node.rank)
        for index in range(start, stop):
            with errors.recorded():
                reader.read(int(window[index]), memory[index * BLOCK_BYTES :])


class _Reader:
    """A file, and the shards that this rank reads from it.

    Args:
        path: Of the file.
        file: Its tensors.
        shards: Of this rank, with the tensor's name; also shards in other files.
        checksums: Of its blocks; None if it has none.
        dtype: Floating-point values are rounded to it first.
    """

    def __init__(
        self,
        path: Path,
        file: TensorFile,
        shards: Sequence[tuple[str, TensorShard]],
        checksums: Checksums | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._path = path
        self._file = file
        self._checksums = checksums
        self._dtype = dtype
        found = [(file.entries[name], shard) for name, shard in shards if name in file.entries]
        self._shards = sorted((each for each in found if each[0].spec.nbytes), key=lambda each: each[0].start)
        self._stops = [entry.stop for entry, _ in self._shards]
        self._opened: FileIO | None = None

    def needed(self) -> npt.NDArray[np.uint8]:
        """Return [blocks] 1 for each block of the file that this rank needs, else 0; local."""
        change = np.zeros(block_count(self._file.size) + 1, dtype=np.int64)
        for entry, shard in self._shards:
            for piece in shard.pieces:
                starts, nbytes = _ranges(piece.subarray, entry)
                np.add.at(change, starts // BLOCK_BYTES, 1)
                np.add.at(change, (starts + nbytes - 1) // BLOCK_BYTES + 1, -1)
        return (np.cumsum(change)[:-1] > 0).astype(np.uint8)

    # ---- from the file into a window --------------------------------------------------------------------------

    def open(self) -> None:
        """Open the file; local.

        Raises:
            CheckpointError: It cannot be opened, or its size has changed since rank 0 read the header.
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
        """Read a block to the beginning of memory and check it; local. Do nothing if the file is not open.

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

    def _error(self, block: int, problem: str) -> CheckpointError:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._file.size)
        names = [entry.spec.name for entry in self._file.touching(start, stop)]
        shown = quoted(names, _MOST_NAMES) or "its header"
        return CheckpointError(f"{self._path}: bytes {start} to {stop}, with {shown}: {problem}")

    # ---- from a window into shards ----------------------------------------------------------------------------

    def copy(self, window: Blocks, memory: Tensor) -> None:
        """Copy this rank's values out of a window; local.

        Args:
            window: Numbers of its blocks.
            memory: [bytes] the bytes before the first block, and then the blocks end to end.
        """
        gaps = np.flatnonzero(np.diff(window) != 1) + 1
        for first, last in zip([0, *gaps], [*gaps, len(window)], strict=True):
            start = int(window[first]) * BLOCK_BYTES
            stop = start + int(last - first) * BLOCK_BYTES
            shift = _BEFORE + int(first) * BLOCK_BYTES - start
            for entry, shard in self._between(start, stop):
                self._copy_shard(entry, shard, start, stop, memory, shift)

    def _between(self, start: int, stop: int) -> Iterator[tuple[TensorEntry, TensorShard]]:
        for index in range(bisect_right(self._stops, start), len(self._shards)):
            if self._shards[index][0].start >= stop:
                return
            yield self._shards[index]

    def _copy_shard(
        self, entry: TensorEntry, shard: TensorShard, start: int, stop: int, memory: Tensor, shift: int
    ) -> None:
        """Copy the elements of a tensor that end after `start`, and at `stop` at the latest.

        The first bytes of an element that begins before `start` are before it in memory, too: a rank that needs the
        element needs the block before as well.

        Args:
            entry: The tensor.
            shard: This rank's shard of it.
            start: Offset in the file of contiguous blocks.
            stop: Offset after them.
            memory: [bytes] the window.
            shift: Offset in memory less offset in the file.
        """
        itemsize = entry.spec.dtype.itemsize
        first = max(0, start - entry.start) // itemsize
        last = min(stop - entry.start, entry.spec.nbytes) // itemsize
        begin = entry.start + shift + first * itemsize
        values = _elements(memory[begin : begin + (last - first) * itemsize], entry.spec.dtype)
        for source in pieces_of_range(values, entry.spec.shape, first):
            for piece in shard.pieces:
                piece.copy_from(source, self._dtype)


def _elements(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of a dtype; as a copy if they are not aligned, as in files of other tools."""
    return (values.clone() if values.storage_offset() % dtype.itemsize else values).view(dtype)


def _ranges(subarray: Subarray, entry: TensorEntry) -> tuple[npt.NDArray[np.int64], int]:
    """Return the offsets in the file of ranges of bytes that contain a subarray, and the bytes of a range.

    Gaps below a block are part of a range, so there are no more ranges than blocks.
    """
    starts = np.zeros(1 if subarray.numel else 0, dtype=np.int64)
    itemsize = nbytes = entry.spec.dtype.itemsize
    for size, stride in zip(reversed(subarray.size), reversed(strides_of(entry.spec.shape)), strict=True):
        step = stride * itemsize
        if len(starts) == 1 and step - nbytes < BLOCK_BYTES:
            nbytes += (size - 1) * step
        else:
            starts = (np.arange(size, dtype=np.int64)[:, None] * step + starts).reshape(-1)
    return starts + (entry.start + subarray.offset_in(entry.spec.shape) * itemsize), nbytes
