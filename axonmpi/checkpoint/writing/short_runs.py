"""Shards whose elements are short_runs over a file, put together by the ranks of a node.

    rank 0   # # . .         window in the memory of the node     rank 0 writes rows 0 and 1
    rank 1   . . # #    ->   # # # #                          ->  rank 1 writes rows 2 and 3
                             # # # #

Each rank copies its columns into the window; then each writes an equal share of it. Where another node has some of
the columns, each rank writes its own runs, however short. Runs have edges, which the ranks exchange after each such
window, so that they do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...groups.process_group import ProcessGroup
from ...utils.partition import split_bounds
from ..files.tensor_file import PAGE_BYTES, TensorEntry
from ..ranks import CheckpointRanks
from ..shards.subarrays import Subarray, subarrays_of_range
from ..shards.tensor_shard import Piece
from .local_plan import ShortRuns, TensorLocation
from .output import CHUNK_BYTES, Output, bytes_of


class _Window(NamedTuple):
    """Bytes of a tensor that fit in the memory of the node.

    Attributes:
        place: Of the tensor.
        low: Where they begin in its file.
        high: Where they end.
        is_whole: Whether this node has all of them.
    """

    place: TensorLocation
    low: int
    high: int
    is_whole: bool


def write_short_runs(short_runs: Sequence[ShortRuns], output: Output, ranks: CheckpointRanks) -> None:
    """Write short_runs shards; collective.

    Args:
        short_runs: Of this rank.
        output: The files.
        ranks: Who writes.
    """
    told = ranks.node.all_gather_object([(one.place, one.piece.subarray) for one in short_runs])
    subarrays: dict[TensorLocation, list[Subarray]] = defaultdict(list)
    for place, subarray in (pair for of_rank in told for pair in of_rank):
        subarrays[place].append(subarray)
    pieces: dict[TensorLocation, list[Piece]] = defaultdict(list)
    for one in short_runs:
        pieces[one.place].append(one.piece)
    windows = [window for place in sorted(subarrays) for window in _windows(place, subarrays[place])]
    left = _most_divided(windows, ranks)
    memory = ranks.node.node_empty((CHUNK_BYTES,), torch.uint8) if windows else torch.empty(0)
    for window in windows:
        _write(window, pieces[window.place], memory, output, ranks.node)
        if not window.is_whole:
            output.exchange_edges()
            left -= 1
    for _ in range(left):  # other nodes have more
        output.exchange_edges()


def _most_divided(windows: Iterable[_Window], ranks: CheckpointRanks) -> int:
    """Return how many windows a node has at most of which other nodes have a shard; collective."""
    if ranks.nodes == 1:
        return 0
    count = torch.tensor(sum(not window.is_whole for window in windows))
    ranks.all.all_reduce_max(count)
    return int(count)


def _write(window: _Window, pieces: Sequence[Piece], memory: Tensor, output: Output, node: ProcessGroup) -> None:
    place, low, high, is_whole = window
    shape, dtype = place.entry.spec.shape, place.entry.spec.dtype
    first, last = _elements(place.entry, low, high)
    filled = memory[: high - low]
    with output.noting():
        for piece in pieces:
            _copy_into(filled.view(dtype), shape, first, last, piece)
    node.barrier()
    own = [_pages(low, high, node.size)[node.rank]] if is_whole else _runs(pieces, place.entry, first, last)
    with output.noting():
        for begin, end in own:
            output.write(place.file, begin, bytes_of(filled[begin - low : end - low]))
    node.barrier()


def _windows(place: TensorLocation, subarrays: Sequence[Subarray]) -> Iterator[_Window]:
    """Yield the windows of a tensor of which this node has `subarrays`; they begin where pages do."""
    entry = place.entry
    for begin in range(entry.start // CHUNK_BYTES * CHUNK_BYTES, entry.stop, CHUNK_BYTES):
        low, high = max(begin, entry.start), min(begin + CHUNK_BYTES, entry.stop)
        first, last = _elements(entry, low, high)
        if held := _held(subarrays, entry.spec.shape, first, last):
            yield _Window(place, low, high, held == last - first)


def _elements(entry: TensorEntry, low: int, high: int) -> tuple[int, int]:
    """Return the first element from byte `low` of the file on, and the one from byte `high` on."""
    first, last = ((at - entry.start) // entry.spec.dtype.itemsize for at in (low, high))
    return first, last


def _pages(low: int, high: int, ranks: int) -> list[tuple[int, int]]:
    """Divide bytes of a file among ranks, where pages begin."""
    begin = low // PAGE_BYTES
    bounds = split_bounds(-(-high // PAGE_BYTES) - begin, ranks)
    cuts = [((begin + first) * PAGE_BYTES, (begin + last) * PAGE_BYTES) for first, last in bounds]
    return [(min(max(first, low), high), min(max(last, low), high)) for first, last in cuts]


def _held(subarrays: Iterable[Subarray], shape: Sequence[int], first: int, last: int) -> int:
    """Return how many elements from `first` up to `last` are in subarrays, which do not overlap."""
    wanted = subarrays_of_range(shape, first, last)
    met = (subarray.meet(other) for subarray in subarrays for other in wanted)
    return sum(common.numel for common in met if common is not None)


def _copy_into(window: Tensor, shape: Sequence[int], first: int, last: int, piece: Piece) -> None:
    at = 0
    for subarray in subarrays_of_range(shape, first, last):
        common = subarray.meet(piece.subarray)
        if common is not None:
            whole = window[at : at + subarray.numel].view(subarray.size)
            whole[common.within(subarray).slices].copy_(piece.view[common.within(piece.subarray).slices])
        at += subarray.numel


def _runs(pieces: Iterable[Piece], entry: TensorEntry, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield where this rank's runs among elements from `first` up to `last` begin and end in the file."""
    shape, itemsize = entry.spec.shape, entry.spec.dtype.itemsize
    for piece in pieces:
        for subarray in subarrays_of_range(shape, first, last):
            common = subarray.meet(piece.subarray)
            if common is None:
                continue
            run = common.run_in(shape)
            for number in range(0, common.numel, run):
                inner = subarrays_of_range(common.size, number, number + 1)[0]
                start = Subarray(tuple(a + b for a, b in zip(common.start, inner.start, strict=True)), inner.size)
                begin = entry.start + start.first_in(shape) * itemsize
                yield begin, begin + run * itemsize
