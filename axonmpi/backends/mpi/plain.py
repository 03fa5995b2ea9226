"""Large data over MPI alone, wherever the ranks are.

Reductions go in pieces of about 1 MiB that stay in the cache:

    all_reduce, for each piece:   all-to-all of slices → local sum in rank order → all-gather of the sums

(reduce-scatter and all-gather, Thakur, Rabenseifner and Gropp 2005). That works for every dtype, gives the same
bits on every rank and from run to run, and needs no `MPI.Op`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...utils.memory import flat_zeros
from ..buffers import as_bytes, buffer_of
from ..call import Call
from ..concat_view import FlatParts
from ..connection import Connection, Limits
from ..handshake import PAYLOAD_BYTES, Handshake
from ..reduction import reduce_in_rank_order

__all__ = ["PlainConnection"]

_HUGE_FROM = 4 << 20  # numpy asks for huge pages from this size on


class PlainConnection(Connection):
    """Moves large data by MPI calls on a communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator.
        handshake: Compares the calls of the ranks.
        limits: Sizes of pieces and messages.
    """

    path = "plain"

    def __init__(self, mpi: Any, comm: Any, handshake: Handshake, limits: Limits) -> None:
        super().__init__(handshake)
        self._mpi = mpi
        self._comm = comm
        self._limits = limits
        self._scratch: dict[str, Tensor] = {}

    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective."""
        if call.nbytes <= PAYLOAD_BYTES:
            self.handshake.reduce(call, tensor)
            return
        self.handshake.agree(call)
        flat = tensor.view(-1)
        gets_result = call.root in (None, self.rank)
        per_slice = max(1, self._limits.piece_bytes // (self.size * flat.element_size()))
        step = per_slice * self.size
        whole = flat.numel() // step * step
        for start in range(0, whole, step):
            self._reduce_piece(call, flat[start : start + step], gets_result)
        rest = flat.numel() - whole
        if rest:  # padded where the ranks do not divide it
            padded = self._buffer("rest", -(-rest // self.size) * self.size, flat.dtype)
            padded[:rest].copy_(flat[whole:])
            self._reduce_piece(call, padded, True)
            if gets_result:
                flat[whole:].copy_(padded[:rest])
        if gets_result:
            torch.autograd.graph.increment_version(tensor)

    def _reduce_piece(self, call: Call, piece: Tensor, in_place: bool) -> None:
        """Reduce a piece of as many elements for each rank; with `in_place` the own slice may be written to."""
        own = self._reduce_slice(call, piece, in_place)
        if call.root is None:
            self._comm.Allgather(self._mpi.IN_PLACE, self._spec(piece, own.nbytes))
        elif call.root == self.rank:
            self._comm.Gather(self._mpi.IN_PLACE, self._spec(piece, own.nbytes), call.root)
        else:
            self._comm.Gather(self._spec(own), None, call.root)

    def _reduce_slice(self, call: Call, piece: Tensor, in_place: bool) -> Tensor:
        """Exchange the slices of `piece` and reduce the own one."""
        count = piece.numel() // self.size
        received = self._buffer("received", piece.numel(), piece.dtype)
        nbytes = count * piece.element_size()
        self._comm.Alltoall(self._spec(piece, nbytes), self._spec(received, nbytes))
        own = piece[self.rank * count : (self.rank + 1) * count]
        target = own if in_place else self._buffer("slice", count, piece.dtype)
        assert call.op is not None
        reduce_in_rank_order(received.view(self.size, count).unbind(0), call.op, target)
        return target

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        self.handshake.agree(call)
        slices = parts.flat(output.dtype).split(sizes)
        longest = max(sizes)
        step = max(1, self._limits.piece_bytes // (self.size * output.element_size()))
        for start in range(0, longest, step):
            count = min(step, longest - start)
            piece = self._buffer("rest", count * self.size, output.dtype)
            for row, source in zip(piece.view(self.size, count), slices, strict=True):
                part = source[start : start + count]
                row[: part.numel()].copy_(part)
            reduced = self._reduce_slice(call, piece, True)
            target = output[start : start + count]
            target.copy_(reduced[: target.numel()])

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        self.handshake.agree(call)
        self._broadcast_flat(flat, call.root)

    def _broadcast_flat(self, flat: Tensor, root: int) -> None:
        for piece in as_bytes(flat).split(self._limits.max_message_bytes):
            self._comm.Bcast(self._spec(piece), root)

    def all_gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        """Put the blocks of all ranks one after the other into `result`; collective, agreed already."""
        row_bytes = result.nbytes // sum(rows)
        counts = [count * row_bytes for count in rows]
        data, target = as_bytes(own), as_bytes(result)
        low = sum(counts[: self.rank])
        if data.numel() and data.data_ptr() == target[low:].data_ptr():  # MPI does not take overlapping buffers
            data = data.clone()
        if sum(counts) <= self._limits.max_message_bytes:
            if min(counts) == max(counts):
                self._comm.Allgather(self._spec(data), self._spec(target, counts[0]))
            else:
                self._comm.Allgatherv(
                    self._spec(data), [buffer_of(self._mpi, target), counts, None, self._mpi.BYTE]
                )
            return
        for root, block in enumerate(target.split(counts)):
            if root == self.rank:
                block.copy_(data)
            self._broadcast_flat(block, root)

    def free(self) -> None:
        """Release scratch memory; local."""
        self._scratch.clear()

    def _buffer(self, purpose: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return scratch memory, reused from call to call."""
        nbytes = numel * dtype.itemsize
        scratch = self._scratch.get(purpose)
        if scratch is None or scratch.numel() < nbytes:
            with torch.inference_mode(False):  # what is made in that mode could not be reused outside of it
                scratch = flat_zeros(max(nbytes, self._limits.piece_bytes, _HUGE_FROM), torch.uint8)
            self._scratch[purpose] = scratch
        return scratch[:nbytes].view(dtype)

    def _spec(self, tensor: Tensor, count: int | None = None) -> list[Any]:
        """Describe contiguous memory to MPI; `count` is the bytes per rank where an operation wants that."""
        return [buffer_of(self._mpi, tensor), tensor.nbytes if count is None else count, self._mpi.BYTE]
