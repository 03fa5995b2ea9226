"""What of a checkpoint this rank writes.

    ranks with equal parts    one     two                  each tensor's place in its file is known to all;
                              |       |                    equal parts, laid end to end, are cut evenly
    file     | a ........ | b .... | c ...... |
               one  one  one two two two two

Bytes that follow each other in the file are a stretch, which its rank writes from its own memory. A column of a
matrix is many short runs: those are scattered, and the ranks of a node put them together first.
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
from ..shards.subarrays import Box
from ..shards.tensor_shard import Part, Piece

LONG_RUN_BYTES = 1 << 16
"""Runs of a box that are as long are written one by one."""


class Place(NamedTuple):
    """Where a tensor is.

    Attributes:
        file: Number of the file.
        entry: The tensor in it.
    """

    file: int
    entry: TensorEntry


class Stretch(NamedTuple):
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

    def cut(self, begin: int, end: int) -> Stretch:
        """Return the bytes from `begin` up to `end` of it, whole elements."""
        first, last = (self.first + at // self.view.itemsize for at in (begin, end))
        return self._replace(start=self.start + begin, first=first, last=last)


class Scattered(NamedTuple):
    """A box of a tensor whose runs are short.

    Attributes:
        place: Where the tensor is.
        piece: The box, and this rank's memory for it.
        may_wait: Whether the values stay as they are until the optimizer steps.
    """

    place: Place
    piece: Piece
    may_wait: bool


@dataclass(frozen=True)
class Share:
    """What this rank writes.

    Attributes:
        stretches: In the order of files, and of bytes in a file where parts are.
        scattered: What the ranks of the node put together.
    """

    stretches: Iterable[Stretch]
    scattered: Sequence[Scattered]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        scattered = sum(one.piece.box.numel * one.piece.view.itemsize for one in self.scattered)
        return scattered + sum(stretch.nbytes for stretch in self.stretches)


def places_in(files: Mapping[str, Sequence[TensorFile]]) -> dict[tuple[str, str], Place]:
    """Return where each tensor is, by the kind of file and the tensor's name; files are numbered in order."""
    numbered = enumerate((kind, file) for kind, of_kind in files.items() for file in of_kind)
    return {
        (kind, name): Place(number, entry)
        for number, (kind, file) in numbered
        for name, entry in file.entries.items()
    }


def joined(shares: Sequence[Share]) -> Share:
    """Return what this rank writes of all kinds of files, in the order of the files."""
    return Share(
        [stretch for share in shares for stretch in share.stretches],
        [scattered for share in shares for scattered in share.scattered],
    )


def share_of(placed: Iterable[tuple[Part, Place]], count: int = 1, number: int = 0) -> Share:
    """Choose what this rank writes of the files of a kind; local, on all ranks together every element once.

    Args:
        placed: This rank's parts, and where each tensor is.
        count: How many ranks have parts of the same boxes as this one.
        number: This rank's number among them.
    """
    stretches: dict[tuple[int, int], list[Stretch]] = defaultdict(list)
    scattered: list[Scattered] = []
    for part, place in sorted(placed, key=lambda pair: (pair[1].file, pair[1].entry.start)):
        equal, own = part.copies * count, part.copy * count + number
        if not part.is_split and own:
            continue
        equal, own = (equal, own) if part.is_split else (1, 0)
        for piece in part.pieces:
            if not piece.box.numel:
                continue
            run = piece.box.run_in(part.shape)
            if run == piece.box.numel or run * part.dtype.itemsize >= LONG_RUN_BYTES:
                stretches[equal, own] += _runs(part, place, piece, run)
            elif (mine := _cut_rows(piece, equal, own)) is not None:
                scattered.append(Scattered(place, mine, part.may_wait))
    chosen = [stretch for key, own in stretches.items() for stretch in _evenly(own, *key)]
    return Share(sorted(chosen, key=lambda stretch: (stretch.file, stretch.start)), scattered)


def _runs(part: Part, place: Place, piece: Piece, run: int) -> Iterator[Stretch]:
    size = piece.box.size
    for first in range(0, piece.box.numel, run):
        index = np.unravel_index(first, size) if size else ()
        start = tuple(int(at) + begin for at, begin in zip(index, piece.box.start, strict=True))
        offset = Box(start, size).first_in(part.shape) * part.dtype.itemsize
        yield Stretch(place.file, place.entry.start + offset, piece.view, first, first + run, part.may_wait)


def _cut_rows(piece: Piece, equal: int, own: int) -> Piece | None:
    first, last = split_range(piece.box.size[0], equal, own)
    if first == last:
        return None
    box = piece.box
    start, size = (box.start[0] + first, *box.start[1:]), (last - first, *box.size[1:])
    return Piece(Box(start, size), piece.view[first:last])


def _evenly(stretches: Sequence[Stretch], equal: int, own: int) -> Iterator[Stretch]:
    """Yield one of `equal` parts of about as many bytes each; cuts are where pages of the file begin."""
    total = sum(stretch.nbytes for stretch in stretches)
    low, high = total * own // equal, total * (own + 1) // equal
    at = 0
    for stretch in stretches:
        begin, end = (_page_cut(stretch, wanted - at) for wanted in (low, high))
        if begin < end:
            yield stretch.cut(begin, end)
        at += stretch.nbytes


def _page_cut(stretch: Stretch, wanted: int) -> int:
    if wanted <= 0 or wanted >= stretch.nbytes:
        return min(max(wanted, 0), stretch.nbytes)
    page = (stretch.start + wanted) // PAGE_BYTES * PAGE_BYTES
    return max(page - stretch.start, 0)
