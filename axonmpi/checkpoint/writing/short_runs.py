"""Subarrays whose contiguous runs are short, assembled by the ranks of a node before they are written.

    rank 0   # # . .         window in the memory of the node     rank 0 writes rows 0 and 1
    rank 1   . . # #    ->   # # # #                          ->  rank 1 writes rows 2 and 3
                             # # # #

Each rank copies its columns into the window, and then writes an equal slice of it. If another node has some of the
columns, each rank writes its own runs instead, however short. After each such window the ranks exchange the edges
of the runs, so that edges do not pile up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...groups.process_group import ProcessGroup
from ...utils.partition import split_range
from ..files.tensor_file import PAGE_BYTES, TensorEntry
from ..ranks import CheckpointRanks
from ..shards.subarrays import Subarray, subarrays_of_range
from ..shards.tensor_shard import Piece, pieces_of_range
from .local_plan import ShortRuns, TensorLocation
from .output import CHUNK_BYTES, Output, bytes_of


class _Window(NamedTuple):
    """Bytes of a tensor that the ranks of a node assemble at once.

    Attributes:
        location: Of the tensor.
        low: Offset of the first byte in the file.
        high: Offset after the last byte.
        is_complete: True if this node has all of them.
    """

    location: TensorLocation
    low: int
    high: int
    is_complete: bool


def write_short_runs(short_runs: Sequence[ShortRuns], output: Output, ranks: CheckpointRanks) -> None:
    """Write subarrays with short runs; collective.

    Args:
        short_runs: Of this rank.
        output: The files.
        ranks: All ranks that write.
    """
    of_node: dict[TensorLocation, list[Subarray]] = defaultdict(list)
    for of_rank in ranks.node.all_gather_object([(each.location, each.piece.subarray) for each in short_runs]):
        for location, subarray in of_rank:
            of_node[location].append(subarray)
    pieces: dict[TensorLocation, list[Piece]] = defaultdict(list)
    for each in short_runs:
        pieces[each.location].append(each.piece)

    windows = [window for location in sorted(of_node) for window in _windows(location, of_node[location])]
    exchanges = _most_incomplete(windows, ranks)
    memory = ranks.node.node_empty((CHUNK_BYTES,), torch.uint8) if windows else torch.empty(0)
    for window in windows:
        _write(window, pieces[window.location], memory, output, ranks.node)
        if not window.is_complete:
            output.exchange_edges()
            exchanges -= 1
    for _ in range(exchanges):  # other nodes have more incomplete windows
        output.exchange_edges()


def _most_incomplete(windows: Iterable[_Window], ranks: CheckpointRanks) -> int:
    """Return the largest number of incomplete windows of a node; collective."""
    if ranks.nodes == 1:
        return 0
    count = torch.tensor(sum(not window.is_complete for window in windows))
    ranks.all.all_reduce_max(count)
    return int(count)


def _write(window: _Window, pieces: Sequence[Piece], memory: Tensor, output: Output, node: ProcessGroup) -> None:
    location, low, high, is_complete = window
    shape, dtype = location.entry.spec.shape, location.entry.spec.dtype
    first, last = _elements(location.entry, low, high)
    filled = memory[: high - low]
    with output.errors.recorded():
        for target in pieces_of_range(filled.view(dtype), shape, first):
            for piece in pieces:
                target.copy_from(piece)
    node.barrier()
    own = [_pages_of(low, high, node)] if is_complete else _runs(pieces, location.entry, first, last)
    with output.errors.recorded():
        for begin, end in own:
            output.write(location.file, begin, bytes_of(filled[begin - low : end - low]))
    node.barrier()


def _windows(location: TensorLocation, subarrays: Sequence[Subarray]) -> Iterator[_Window]:
    """Yield the windows of a tensor of which this node has `subarrays`; they begin at pages of the file."""
    entry = location.entry
    for begin in range(entry.start // CHUNK_BYTES * CHUNK_BYTES, entry.stop, CHUNK_BYTES):
        low, high = max(begin, entry.start), min(begin + CHUNK_BYTES, entry.stop)
        first, last = _elements(entry, low, high)
        in_window = subarrays_of_range(entry.spec.shape, first, last)
        common = (subarray.intersection(other) for subarray in subarrays for other in in_window)
        count = sum(each.numel for each in common if each is not None)
        if count:
            yield _Window(location, low, high, count == last - first)


def _elements(entry: TensorEntry, low: int, high: int) -> tuple[int, int]:
    """Return the numbers of the first elements at or after two offsets in the file."""
    first, last = ((at - entry.start) // entry.spec.dtype.itemsize for at in (low, high))
    return first, last


def _pages_of(low: int, high: int, node: ProcessGroup) -> tuple[int, int]:
    """Return this rank's slice of the bytes from `low` to `high`, if slices are cut at pages of the file."""
    first_page = low // PAGE_BYTES
    begin, end = split_range(-(-high // PAGE_BYTES) - first_page, node.size, node.rank)
    first, last = ((first_page + page) * PAGE_BYTES for page in (begin, end))
    return min(max(first, low), high), min(max(last, low), high)


def _runs(pieces: Iterable[Piece], entry: TensorEntry, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets in the file of this rank's runs among the elements from `first` up to `last`."""
    shape, itemsize = entry.spec.shape, entry.spec.dtype.itemsize
    for piece in pieces:
        for subarray in subarrays_of_range(shape, first, last):
            common = subarray.intersection(piece.subarray)
            if common is not None:
                nbytes = common.run_in(shape) * itemsize
                for offset in common.run_offsets(shape):
                    yield entry.start + offset * itemsize, entry.start + offset * itemsize + nbytes
