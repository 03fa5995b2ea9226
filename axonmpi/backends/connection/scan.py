"""Scan: rank r gets the reduction of ranks 0 to r, or of those before it; in place.

    on one node      chunks go through staging: each rank copies its chunk in, and reduces those up to its own
    between nodes    Hillis and Steele's doubling: in each of log2 n rounds a rank sends what it has to the rank at
                     twice the distance of the round before
    ordered          every rank gathers a chunk of all ranks, and reduces those up to its own

For `bytes` on n ranks, rank r reads (r+1)·bytes on a node. Between nodes each rank sends log2(n)·bytes, in any
placement of the ranks, added in pairs: so the last rank need not have the bits of an all-reduce.

Source: MPI 4.1, section 6.11; Hillis and Steele 1986, "Data parallel algorithms".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..buffers import bytes_of, empty, flat_elements, write_back
from ..call import Call
from ..reduction import choose_reduction, reduce_in_rank_order, wide_dtype
from .all_gather import all_gather
from .connection import Connection

Shift = Callable[[Tensor, Tensor, int], bool]
"""Called with contiguous data, memory of its size and a distance: sends the data to the rank at that distance, and
receives from the rank that far behind. Returns whether there is one behind."""


def scan(ranks: Connection, call: Call, tensor: Tensor, shift: Shift, chosen: range, *, reverse: bool) -> None:
    """Reduce the tensors of a range of ranks that ends or begins at this one, in place; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Of the call's dtype and shape, any strides.
        shift: Sends data along the ranks, between nodes.
        chosen: The range, with or without this rank; the result for an empty one is the identity.
        reverse: Whether the range begins at this rank.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    flat = flat_elements(tensor)
    if ranks.rounds is None:
        _scan_on_node(ranks, call, flat, slice(chosen.start, chosen.stop))
    elif ranks.ordered:
        _scan_gathered(ranks, call, flat, slice(chosen.start, chosen.stop))
    else:
        exclusive = ranks.topology.rank not in chosen
        _scan_by_doubling(ranks, call, flat, shift, exclusive=exclusive, reverse=reverse)
    write_back(flat, tensor)


def _scan_on_node(ranks: Connection, call: Call, flat: Tensor, chosen: slice) -> None:
    op, own, staging = call.op, ranks.topology.local_rank, ranks.staging
    chunks = flat.split(ranks.chunk_bytes // flat.itemsize)

    def copy_in(number: int, index: int, now: int) -> None:
        staging.buffers[index][own][: chunks[number].nbytes] = bytes_of(chunks[number])

    def reduce(number: int, index: int, now: int) -> None:
        chunk = chunks[number]
        reduce_in_rank_order(staging.views(index, 0, chunk.nbytes, chunk.dtype)[chosen], op, chunk)

    ranks.run_chunks(call, len(chunks), [copy_in, reduce], is_agreed=False)


def _scan_gathered(ranks: Connection, call: Call, flat: Tensor, chosen: slice) -> None:
    step = max(ranks.chunk_bytes // (ranks.topology.size * flat.itemsize), 1)
    for chunk in flat.split(step):
        rows = all_gather(ranks, call, chunk).view(ranks.topology.size, -1)
        reduce_in_rank_order(rows.unbind(0)[chosen], call.op, chunk)


def _scan_by_doubling(
    ranks: Connection, call: Call, flat: Tensor, shift: Shift, *, exclusive: bool, reverse: bool
) -> None:
    ranks.agreement.agree(call)
    wide = wide_dtype(flat.dtype)
    for chunk in flat.split(max(ranks.chunk_bytes // wide.itemsize, 1)):
        _double(ranks, call, chunk, wide, shift, exclusive=exclusive, reverse=reverse)


def _double(
    ranks: Connection,
    call: Call,
    flat: Tensor,
    wide: torch.dtype,
    shift: Shift,
    *,
    exclusive: bool,
    reverse: bool,
) -> None:
    """Scan one chunk between nodes; collective, after the agreement."""
    total, received = flat.to(wide, copy=True), empty(flat.shape, wide)
    # Each sum is one of two neighbouring ranges of ranks; the lower one comes first.
    pair = [total, received] if reverse else [received, total]
    reduce = choose_reduction(wide, call.op, 2).run
    direction, distance = -1 if reverse else 1, 1
    while distance < ranks.topology.size:
        if shift(total, received, direction * distance):
            reduce(pair, total)
        distance *= 2
    if not exclusive:
        flat.copy_(total)
    elif shift(total, received, direction):
        flat.copy_(received)
    else:
        reduce_in_rank_order([], call.op, flat)
