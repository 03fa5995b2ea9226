"""What of a checkpoint this rank writes.

    ranks with equal shards    one     two                  each tensor's place in its file is known to all;
                              |       |                    equal shards, laid end to end, are cut evenly
    file     | a ........ | b .... | c ...... |
               one  one  one two two two two

Bytes that follow each other in the file are a file_slice, which its rank writes from its own memory. A column of a
matrix is many short runs: those are short_runs, and the ranks of a node put them together first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...utils.partition import split_range
from ..files.tensor_file import PAGE_BYTES, TensorEntry, TensorFile
from ..shards.subarrays import Subarray
from ..shards.tensor_shard import Piece, TensorShard

LONG_RUN_BYTES = 1 << 16
"""Runs of a subarray that are as long are written one by one."""


class TensorLocation(NamedTuple):
    """Where a tensor is.

    Attributes:
        file: Number of the file.
        entry: The tensor in it.
    """

    file: int
    entry: TensorEntry


class FileSlice(NamedTuple):
    """Bytes of a file that follow each other.

    Attributes:
        file: Number of the file.
        start: Where they begin, in bytes from the beginning of the file.
        view: This rank's memory.
        first: Number of the first element in it, in row-major order.
        last: Number of the last element, plus one.
        may_wait: Whether the values stay as they are until the optimizer steps.
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
        """Return the bytes from `begin` up to `end` of it, whole elements."""
        first, last = (self.first + at // self.view.itemsize for at in (begin, end))
        return self._replace(start=self.start + begin, first=first, last=last)


class ShortRuns(NamedTuple):
    """A subarray of a tensor whose runs are short.

    Attributes:
        place: Where the tensor is.
        piece: The subarray, and this rank's memory for it.
        may_wait: Whether the values stay as they are until the optimizer steps.
    """

    place: TensorLocation
    piece: Piece
    may_wait: bool


@dataclass(frozen=True)
class LocalPlan:
    """What this rank writes.

    Attributes:
        slices: In the order of files, and of bytes in a file where shards are.
        short_runs: What the ranks of the node put together.
    """

    slices: Iterable[FileSlice]
    short_runs: Sequence[ShortRuns]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        short_runs = sum(one.piece.subarray.numel * one.piece.view.itemsize for one in self.short_runs)
        return short_runs + sum(file_slice.nbytes for file_slice in self.slices)


def locations_in(files: Mapping[str, Sequence[TensorFile]]) -> dict[tuple[str, str], TensorLocation]:
    """Return where each tensor is, by the kind of file and the tensor's name; files are numbered in order."""
    numbered = enumerate((kind, file) for kind, of_kind in files.items() for file in of_kind)
    return {
        (kind, name): TensorLocation(number, entry)
        for number, (kind, file) in numbered
        for name, entry in file.entries.items()
    }


def joined(shares: Sequence[LocalPlan]) -> LocalPlan:
    """Return what this rank writes of all kinds of files, in the order of the files."""
    return LocalPlan(
        [file_slice for share in shares for file_slice in share.slices],
        [short_runs for share in shares for short_runs in share.short_runs],
    )


def local_plan_of(
    placed: Iterable[tuple[TensorShard, TensorLocation]], count: int = 1, number: int = 0
) -> LocalPlan:
    """Choose what this rank writes of the files of a kind; local, on all ranks together every element once.

    Args:
        placed: This rank's shards, and where each tensor is.
        count: How many ranks have shards of the same subarrays as this one.
        number: This rank's number among them.
    """
    slices: dict[tuple[int, int], list[FileSlice]] = defaultdict(list)
    short_runs: list[ShortRuns] = []
    for shard, place in sorted(placed, key=lambda pair: (pair[1].file, pair[1].entry.start)):
        equal, own = shard.copies * count, shard.copy * count + number
        if not shard.is_split and own:
            continue
        equal, own = (equal, own) if shard.is_split else (1, 0)
        for piece in shard.pieces:
            if not piece.subarray.numel:
                continue
            run = piece.subarray.run_in(shard.shape)
            if run == piece.subarray.numel or run * shard.dtype.itemsize >= LONG_RUN_BYTES:
                slices[equal, own] += _runs(shard, place, piece, run)
            elif (mine := _cut_rows(piece, equal, own)) is not None:
                short_runs.append(ShortRuns(place, mine, shard.may_wait))
    chosen = [file_slice for key, own in slices.items() for file_slice in _evenly(own, *key)]
    return LocalPlan(sorted(chosen, key=lambda file_slice: (file_slice.file, file_slice.start)), short_runs)


def _runs(shard: TensorShard, place: TensorLocation, piece: Piece, run: int) -> Iterator[FileSlice]:
    size = piece.subarray.size
    for first in range(0, piece.subarray.numel, run):
        index = np.unravel_index(first, size) if size else ()
        start = tuple(int(at) + begin for at, begin in zip(index, piece.subarray.start, strict=True))
        offset = Subarray(start, size).first_in(shard.shape) * shard.dtype.itemsize
        yield FileSlice(place.file, place.entry.start + offset, piece.view, first, first + run, shard.may_wait)


def _cut_rows(piece: Piece, equal: int, own: int) -> Piece | None:
    first, last = split_range(piece.subarray.size[0], equal, own)
    if first == last:
        return None
    subarray = piece.subarray
    start, size = (subarray.start[0] + first, *subarray.start[1:]), (last - first, *subarray.size[1:])
    return Piece(Subarray(start, size), piece.view[first:last])


def _evenly(slices: Sequence[FileSlice], equal: int, own: int) -> Iterator[FileSlice]:
    """Yield one of `equal` shards of about as many bytes each; cuts are where pages of the file begin."""
    total = sum(file_slice.nbytes for file_slice in slices)
    low, high = total * own // equal, total * (own + 1) // equal
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
