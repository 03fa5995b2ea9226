"""Parts whose elements are scattered over a file, put together by the ranks of a node.

    rank 0   # # . .         window in the memory of the node     rank 0 writes rows 0 and 1
    rank 1   . . # #    ->   # # # #                          ->  rank 1 writes rows 2 and 3
                             # # # #

Each rank copies its columns into the window; then each writes an equal share of it. Where another node has some of
the columns, each rank writes its own runs, however short.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...groups.process_group import ProcessGroup
from ...utils.partition import split_bounds
from ..files.tensor_file import PAGE_BYTES, TensorEntry
from ..parts.boxes import Box, boxes_of_range
from ..parts.part import Piece
from .output import CHUNK_BYTES, Output, bytes_of
from .plan import Place, Scattered

__all__ = ["write_scattered"]


def write_scattered(scattered: Sequence[Scattered], output: Output, node: ProcessGroup) -> None:
    """Write scattered parts; collective over the ranks of the node.

    Args:
        scattered: Of this rank.
        output: The files.
        node: The ranks of this node.
    """
    told = node.all_gather_object([(one.place, one.piece.box) for one in scattered])
    boxes: dict[Place, list[Box]] = defaultdict(list)
    for place, box in (pair for of_rank in told for pair in of_rank):
        boxes[place].append(box)
    if not boxes:
        return
    pieces: dict[Place, list[Piece]] = defaultdict(list)
    for one in scattered:
        pieces[one.place].append(one.piece)
    memory = node.node_empty((CHUNK_BYTES,), torch.uint8)
    for place in sorted(boxes):
        _write(place, boxes[place], pieces[place], memory, output, node)


def _write(
    place: Place,
    boxes: Sequence[Box],
    pieces: Sequence[Piece],
    memory: Tensor,
    output: Output,
    node: ProcessGroup,
) -> None:
    entry = place.entry
    shape, dtype = entry.spec.shape, entry.spec.dtype
    for low, high in _windows(entry, len(memory)):
        first, last = ((at - entry.start) // dtype.itemsize for at in (low, high))
        held = _held(boxes, shape, first, last)
        if not held:
            continue
        window = memory[: high - low]
        with output.noting():
            for piece in pieces:
                _copy_into(window.view(dtype), shape, first, last, piece)
        node.barrier()
        is_whole = held == last - first
        own = [_pages(low, high, node.size)[node.rank]] if is_whole else _runs(pieces, entry, first, last)
        with output.noting():
            for begin, end in own:
                output.write(place.file, begin, bytes_of(window[begin - low : end - low]))
        node.barrier()


def _windows(entry: TensorEntry, size: int) -> Iterator[tuple[int, int]]:
    """Yield where windows of a tensor begin and end in its file; they begin where pages do."""
    for low in range(entry.start // size * size, entry.stop, size):
        yield max(low, entry.start), min(low + size, entry.stop)


def _pages(low: int, high: int, ranks: int) -> list[tuple[int, int]]:
    """Divide bytes of a file among ranks, where pages begin."""
    begin = low // PAGE_BYTES
    bounds = split_bounds(-(-high // PAGE_BYTES) - begin, ranks)
    cuts = [((begin + first) * PAGE_BYTES, (begin + last) * PAGE_BYTES) for first, last in bounds]
    return [(min(max(first, low), high), min(max(last, low), high)) for first, last in cuts]


def _held(boxes: Iterable[Box], shape: Sequence[int], first: int, last: int) -> int:
    """Return how many elements from `first` up to `last` are in boxes, which do not overlap."""
    wanted = boxes_of_range(shape, first, last)
    met = (box.meet(other) for box in boxes for other in wanted)
    return sum(common.numel for common in met if common is not None)


def _copy_into(window: Tensor, shape: Sequence[int], first: int, last: int, piece: Piece) -> None:
    at = 0
    for box in boxes_of_range(shape, first, last):
        common = box.meet(piece.box)
        if common is not None:
            whole = window[at : at + box.numel].view(box.size)
            whole[common.within(box).slices].copy_(piece.view[common.within(piece.box).slices])
        at += box.numel


def _runs(pieces: Iterable[Piece], entry: TensorEntry, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield where this rank's runs among elements from `first` up to `last` begin and end in the file."""
    shape, itemsize = entry.spec.shape, entry.spec.dtype.itemsize
    for piece in pieces:
        for box in boxes_of_range(shape, first, last):
            common = box.meet(piece.box)
            if common is None:
                continue
            run = common.run_in(shape)
            for number in range(0, common.numel, run):
                inner = boxes_of_range(common.size, number, number + 1)[0]
                start = Box(tuple(a + b for a, b in zip(common.start, inner.start, strict=True)), inner.size)
                begin = entry.start + start.first_in(shape) * itemsize
                yield begin, begin + run * itemsize
