"""The ranges of bytes of the files that this rank writes, and the memory that they come from.

    ranks with equal shards  one     two                   the offset of each tensor in its file is known to all;
                              |       |                    equal shards, laid end to end, are cut evenly
    file     | a ........ | b .... | c ...... |
               one  one  one two two two two

A rank writes contiguous slices of a file from its own memory. A column of a matrix is many short runs, which the
ranks of a node assemble first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ...utils.partition import split_range
from ..files.tensor_file import PAGE_BYTES, TensorEntry, TensorFile
from ..shards.subarrays import Subarray
from ..shards.tensor_shard import UNREPLICATED, Piece, Replicas, TensorShard

LONG_RUN_BYTES = 1 << 16
"""Contiguous runs of at least this size are written one by one."""


class TensorLocation(NamedTuple):
    """The location of a tensor.

    Attributes:
        file: Index of the file.
        entry: The tensor in it.
    """

    file: int
    entry: TensorEntry


class FileSlice(NamedTuple):
    """Contiguous bytes of a file.

    Attributes:
        file: Index of the file.
        start: Offset of the first byte in it.
        view: This rank's memory.
        first: Row-major number of the first element in it.
        last: Row-major number of the last element, plus one.
        may_wait: The values do not change before the optimizer steps.
    """

    file: int
    start: int
    view: Tensor
    first: int
    last: int
    may_wait: bool

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return (self.last - self.first) * self.view.itemsize

    def cut(self, begin: int, end: int) -> FileSlice:
        """Return its bytes from `begin` up to `end`, full elements."""
        first, last = (self.first + at // self.view.itemsize for at in (begin, end))
        return self._replace(start=self.start + begin, first=first, last=last)


class ShortRuns(NamedTuple):
    """A subarray of a tensor whose contiguous runs are short.

    Attributes:
        location: Of the tensor.
        piece: The subarray in this rank's memory.
        may_wait: The values do not change before the optimizer steps.
    """

    location: TensorLocation
    piece: Piece
    may_wait: bool


class LocalPlan(NamedTuple):
    """The bytes that this rank writes.

    Attributes:
        slices: In the order of files and of bytes in a file.
        short_runs: Subarrays that the ranks of the node assemble.
    """

    slices: Iterable[FileSlice]
    short_runs: Sequence[ShortRuns]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        assembled = sum(each.piece.subarray.numel * each.piece.view.itemsize for each in self.short_runs)
        return assembled + sum(file_slice.nbytes for file_slice in self.slices)


def locations_in(files: Mapping[str, Sequence[TensorFile]]) -> dict[tuple[str, str], TensorLocation]:
    """Return the location of each tensor, by the kind of file and the tensor's name."""
    numbered = enumerate((kind, file) for kind, of_kind in files.items() for file in of_kind)
    return {
        (kind, name): TensorLocation(number, entry)
        for number, (kind, file) in numbered
        for name, entry in file.entries.items()
    }


def local_plan_of(
    shards: Mapping[str, Sequence[TensorShard]],
    locations: Mapping[tuple[str, str], TensorLocation],
    equal_ranks: Mapping[str, Replicas],
) -> LocalPlan:
    """Choose the bytes that this rank writes; local. All ranks together write each byte once.

    Args:
        shards: This rank's, by the kind of file.
        locations: Of all tensors, by the kind of file and the tensor's name.
        equal_ranks: The ranks with the same shards as this one, by the kind of file.
    """
    slices: list[FileSlice] = []
    short_runs: list[ShortRuns] = []
    for kind, own in shards.items():
        located = [(shard, locations[kind, shard.name]) for shard in own]
        shared: dict[Replicas, list[FileSlice]] = defaultdict(list)
        for shard, location in sorted(located, key=lambda pair: (pair[1].file, pair[1].entry.start)):
            writers = shard.replicas.times(equal_ranks[kind])
            if not shard.is_split:
                if writers.rank:
                    continue
                writers = UNREPLICATED
            for piece in shard.pieces:
                if not piece.subarray.numel:
                    continue
                run = piece.subarray.run_in(shard.shape)
                if run == piece.subarray.numel or run * shard.dtype.itemsize >= LONG_RUN_BYTES:
                    shared[writers] += _runs(shard, location, piece, run)
                elif (rows := _rows_of(piece, writers)) is not None:
                    short_runs.append(ShortRuns(location, rows, shard.may_wait))
        for writers, of_writers in shared.items():
            slices += _evenly(of_writers, writers)
    return LocalPlan(sorted(slices, key=lambda each: (each.file, each.start)), short_runs)


def _runs(shard: TensorShard, location: TensorLocation, piece: Piece, run: int) -> Iterator[FileSlice]:
    """Yield the contiguous runs of a piece, of `run` elements each."""
    first = 0
    for offset in piece.subarray.run_offsets(shard.shape):
        start = location.entry.start + offset * shard.dtype.itemsize
        yield FileSlice(location.file, start, piece.view, first, first + run, shard.may_wait)
        first += run


def _rows_of(piece: Piece, writers: Replicas) -> Piece | None:
    """Return the rows of a piece that this one of its writers writes, None if there are none."""
    first, last = split_range(piece.subarray.size[0], *writers)
    if first == last:
        return None
    start, size = piece.subarray.start, piece.subarray.size
    rows = Subarray((start[0] + first, *start[1:]), (last - first, *size[1:]))
    return Piece(rows, piece.view[first:last])


def _evenly(slices: Sequence[FileSlice], writers: Replicas) -> Iterator[FileSlice]:
    """Yield the bytes that this one of the writers writes, about as many for each, cut at pages of the file."""
    total = sum(file_slice.nbytes for file_slice in slices)
    low, high = (total * index // writers.size for index in (writers.rank, writers.rank + 1))
    at = 0
    for file_slice in slices:
        begin, end = (_page_cut(file_slice, wanted - at) for wanted in (low, high))
        if begin < end:
            yield file_slice.cut(begin, end)
        at += file_slice.nbytes


def _page_cut(file_slice: FileSlice, wanted: int) -> int:
    if wanted <= 0 or wanted >= file_slice.nbytes:
        return min(max(wanted, 0), file_slice.nbytes)
    page = (file_slice.start + wanted) // PAGE_BYTES * PAGE_BYTES
    return max(page - file_slice.start, 0)
