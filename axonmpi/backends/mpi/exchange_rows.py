"""Exchange of rows: each rank shows some of its rows, and copies those that it needs of other ranks'.

    on a node        a chunk of what is shown is copied into staging, once; all who need rows of it copy them out
    between nodes    a message to each rank that needs rows, while the ranks of a node pass theirs through staging

All ranks have the plan beforehand, so no sizes are sent. Each rank writes the rows that others need once.
Between nodes a row goes once to each rank that needs it, and all messages are under way at once: one round.

Source: MPI 4.1, section 8.6 (neighborhood collectives), which serve the same halo exchange.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...utils.rows import Exchange, Piece
from ..buffers import empty
from ..call import Call
from ..connection.connection import Connection

Begin = Callable[[dict[int, Tensor], dict[int, Tensor]], Callable[[], None]]
"""Called with contiguous tensors to send and to receive, each by its rank: begins, and returns how to wait."""


class _Rows(NamedTuple):
    """Rows that lie one after the other.

    Attributes:
        first: The number of the first one, counted over all rows that its rank shows.
        tensor: [rows, *row].
    """

    first: int
    tensor: Tensor

    @property
    def end(self) -> int:
        """The number after the last one's."""
        return self.first + self.tensor.shape[0]

    def part(self, low: int, high: int) -> Tensor:
        """Return the rows with the numbers `low` to `high`."""
        if high - low == self.tensor.shape[0]:
            return self.tensor
        return self.tensor.narrow(0, low - self.first, high - low)


def exchange_rows(
    ranks: Connection, call: Call, shown: Sequence[Tensor], outputs: Sequence[Tensor], plan: Exchange, begin: Begin
) -> None:
    """Copy rows that other ranks show; collective.

    Args:
        ranks: The group.
        call: The call; its shape is that of a row.
        shown: This rank's rows, each [rows, *row] with any strides, one after the other.
        outputs: Memory for the pieces of the plan that this rank takes, each [rows, *row] with any strides.
        plan: The plan.
        begin: Begins messages between ranks.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    if call.nbytes > ranks.chunk_bytes:  # a chunk holds less than a row: its elements are the rows
        flat = [empty([output.numel()], call.dtype) for output in outputs]
        _exchange(ranks, call, (), [each.reshape(-1) for each in shown], flat, plan.scaled(call.numel), begin)
        for output, elements in zip(outputs, flat, strict=True):
            output.copy_(elements.view(output.shape))
    else:
        _exchange(ranks, call, call.shape, shown, outputs, plan, begin)


def _exchange(
    ranks: Connection,
    call: Call,
    row: tuple[int, ...],
    shown: Sequence[Tensor],
    outputs: Sequence[Tensor],
    plan: Exchange,
    begin: Begin,
) -> None:
    starts = accumulate((each.shape[0] for each in shown), initial=0)
    own = [_Rows(first, each) for first, each in zip(starts, shown, strict=False)]
    taken = list(zip(plan.wanted[ranks.topology.rank], outputs, strict=True))
    if ranks.rounds is None:
        _pass_on_node(ranks, call, row, own, taken, plan, is_agreed=False)
        return
    ranks.agreement.agree(call)
    finish = _send_to_nodes(ranks, own, taken, plan, begin)
    _pass_on_node(ranks, call, row, own, taken, plan, is_agreed=True)
    finish()


def _pass_on_node(
    ranks: Connection,
    call: Call,
    row: tuple[int, ...],
    own: Sequence[_Rows],
    taken: Sequence[tuple[Piece, Tensor]],
    plan: Exchange,
    *,
    is_agreed: bool,
) -> None:
    """Copy the rows that ranks of this node show; collective on the node."""
    topology, staging = ranks.topology, ranks.staging
    local = {rank: index for index, rank in enumerate(topology.node_ranks)}
    pieces = [(local[p.source], _Rows(p.start, output)) for p, output in taken if p.source in local]
    nbytes = prod(row) * call.dtype.itemsize
    # Of all ranks the same, if a chunk holds all rows: no larger than they are, so that views need no narrowing.
    most = max(plan.shown[rank] for rank in local)
    step = min(ranks.chunk_bytes // max(nbytes, 1), max(most, 1))
    is_needed = nbytes and (pieces or any(piece.source in local for rank in local for piece in plan.wanted[rank]))
    chunks = -(-most // step) if is_needed else 0

    def chunk_of(number: int, index: int, peer: int) -> _Rows:
        memory = staging.views(index, 0, step * nbytes, call.dtype)[peer]
        return _Rows(number * step, memory.view(step, *row))

    def copy_in(number: int, index: int, now: int) -> None:
        for rows in own:
            _copy(rows, chunk_of(number, index, topology.local_rank))

    def copy_out(number: int, index: int, now: int) -> None:
        for peer, rows in pieces:
            _copy(chunk_of(number, index, peer), rows)

    ranks.run_chunks(call, chunks, [copy_in, copy_out], is_agreed=is_agreed)


def _send_to_nodes(
    ranks: Connection, own: Sequence[_Rows], taken: Sequence[tuple[Piece, Tensor]], plan: Exchange, begin: Begin
) -> Callable[[], None]:
    """Begin messages with the rows that ranks of other nodes need; return how to wait for them."""
    rank, here = ranks.topology.rank, ranks.topology.node_ranks
    sends, receives, outputs = {}, {}, defaultdict(list)
    for reader, pieces in enumerate(plan.wanted):
        parts = [_rows_of(own, piece) for piece in pieces if piece.source == rank]
        if reader not in here and parts:
            sends[reader] = torch.cat(parts).contiguous()  # which a cat of one memory format need not be
    for piece, output in taken:
        if piece.source not in here:
            outputs[piece.source].append(output)
    for source, parts in outputs.items():
        receives[source] = empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    wait = begin(sends, dict(receives))

    def finish() -> None:
        wait()
        for source, parts in outputs.items():
            for part, rows in zip(parts, receives[source].split([part.shape[0] for part in parts]), strict=True):
                part.copy_(rows)

    return finish


def _rows_of(own: Sequence[_Rows], piece: Piece) -> Tensor:
    """Return the rows of a piece, which are in one of the tensors that this rank shows; local."""
    rows = next(rows for rows in own if rows.first <= piece.start and piece.stop <= rows.end)
    return rows.part(piece.start, piece.stop)


def _copy(source: _Rows, target: _Rows) -> None:
    """Copy the rows that both have; local."""
    low, high = max(source.first, target.first), min(source.end, target.end)
    if low < high:
        target.part(low, high).copy_(source.part(low, high))
