"""Large data between nodes, by the MPI library's own collectives.

A lane has one rank of each node. Its ranks call these functions only once all have agreed on the call, in an order
and in pieces that follow from the call alone: mismatched MPI collectives would hang, crash or return garbage. Those
that take long are non-blocking, so that a thread beside a computation can wait asleep. Whether the call was
asynchronous makes no difference: MPI does not match a blocking collective with a non-blocking one.

Sums of what MPI adds as torch does are MPI's own. For the rest, 16-bit types, and MIN and MAX of floats, for which
MPI loses NaN, and of large data, where MPICH sends more than it has to and Open MPI's non-blocking reductions take
twice as long, slices are exchanged and reduced here, in the order of the nodes:

    all-to-all of slices → local reduction → all-gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.memory import flat_zeros
from ..buffers import as_bytes, buffer_of
from ..connection import Limits
from ..reduction import reduce_rows_into
from ..shared.staging import Bytes
from ..tuning import (
    LEAST_SLICE_BYTES,
    NETWORK_CHUNK_BYTES,
    PIECE_BYTES,
    SLICED_CHUNKS,
    SLICED_FROM_BYTES,
    SLICED_FROM_BYTES_OPEN_MPI,
)
from .nodes import Blocks, Integers
from .patience import Patience

__all__ = ["Lane"]

_INTEGERS = {
    torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T",
    torch.uint8: "UINT8_T", torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
}  # fmt: skip
_FLOATS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_COMPLEX = {torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX"}
_NAMES = {
    ReduceOp.SUM: {**_INTEGERS, **_FLOATS, **_COMPLEX},
    ReduceOp.AVERAGE: {**_FLOATS, **_COMPLEX},
    ReduceOp.PRODUCT: {**_INTEGERS, **_FLOATS},
    ReduceOp.MIN: _INTEGERS,
    ReduceOp.MAX: _INTEGERS,
    ReduceOp.BAND: _INTEGERS,
    ReduceOp.BOR: _INTEGERS,
    ReduceOp.BXOR: _INTEGERS,
}


class Lane:
    """One rank of each node, and what they do together.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Their communicator, in the order of the nodes.
        limits: The most that goes into one MPI call, and how much is exchanged at a time.
        patience: How a rank waits.
        ordered: Whether sums are taken in the order of the nodes, never by MPI.

    Attributes:
        size: How many ranks it has.
        index: This rank's number among them.
    """

    def __init__(self, mpi: Any, comm: Any, limits: Limits, patience: Patience, *, ordered: bool) -> None:
        self._mpi, self._comm, self._limits = mpi, comm, limits
        self._patience = patience
        self._ordered, self._is_open_mpi = ordered, mpi.Get_library_version().startswith("Open MPI")
        self.size: int = comm.Get_size()
        self.index: int = comm.Get_rank()
        self._ops = {
            ReduceOp.SUM: mpi.SUM, ReduceOp.AVERAGE: mpi.SUM, ReduceOp.PRODUCT: mpi.PROD,
            ReduceOp.MIN: mpi.MIN, ReduceOp.MAX: mpi.MAX,
            ReduceOp.BAND: mpi.BAND, ReduceOp.BOR: mpi.BOR, ReduceOp.BXOR: mpi.BXOR,
        }  # fmt: skip
        self._scratch: dict[str, Tensor] = {}

    def all_reduce(self, flat: Tensor, op: ReduceOp, ranks: int) -> None:
        """Reduce [numel], in place, 16-bit values in float32; an average is that of so many ranks."""
        name = None if self._ordered else _NAMES[op].get(flat.dtype)
        if name is None or self._is_large(flat.nbytes):
            self._reduce_slices(flat, op, ranks)
            return
        kind, most = getattr(self._mpi, name), self._limits.max_message_bytes // flat.itemsize
        for piece in (flat,) if flat.numel() <= most else flat.split(most):
            spec = [buffer_of(self._mpi, piece), piece.numel(), kind]
            self._do("Allreduce" if self._is_open_mpi else "Iallreduce", self._mpi.IN_PLACE, spec, self._ops[op])
        if op is ReduceOp.AVERAGE:
            flat.div_(ranks)

    def _is_large(self, nbytes: int) -> bool:
        if self._is_open_mpi:
            return nbytes >= self.size * SLICED_FROM_BYTES_OPEN_MPI
        return self.size > 2 and nbytes >= SLICED_FROM_BYTES

    def reduces(self, op: ReduceOp, flat: Tensor) -> bool:
        """Say whether `reduce_scatter` takes a tensor; local."""
        is_known = flat.dtype in _NAMES[op] and flat.nbytes <= self._limits.max_message_bytes
        return is_known and not self._ordered and not self._is_open_mpi

    def reduce_scatter(self, flat: Tensor, blocks: Blocks, output: Tensor, op: ReduceOp) -> None:
        """Reduce [numel], the own one of so many blocks into `output`."""
        kind = getattr(self._mpi, _NAMES[op][flat.dtype])
        sent, received = (buffer_of(self._mpi, tensor) for tensor in (flat, output))
        if blocks.are_equal:
            count = output.numel()  # of a block, for MPI in both
            self._do("Ireduce_scatter_block", [sent, count, kind], [received, count, kind], self._ops[op])
        else:
            counts = (blocks.sizes // flat.itemsize).astype(np.int32)
            self._do("Ireduce_scatter", [sent, kind], [received, kind], counts, self._ops[op])
        if op is ReduceOp.AVERAGE:
            output.div_(self.size)

    def _reduce_slices(self, flat: Tensor, op: ReduceOp, ranks: int) -> None:
        step = SLICED_CHUNKS * self.step(self.size, flat.itemsize) // flat.itemsize * self.size
        for piece in flat.split(step):
            count = -(-piece.numel() // self.size)
            padded = piece
            if count * self.size != piece.numel():
                padded = self.buffer("padded", count * self.size, flat.dtype)
                padded[: piece.numel()].copy_(piece)
            received = self.buffer("received", padded.numel(), flat.dtype)
            self.all_to_all(padded, received)
            own = padded[self.index * count : (self.index + 1) * count]
            reduce_rows_into(received.view(self.size, count), op, own, ranks)
            self.all_gather(padded)
            if padded is not piece:
                piece.copy_(padded[: piece.numel()])

    def all_to_all(self, data: Tensor, received: Tensor) -> None:
        """Send the i-th of equal slices of contiguous data to rank i, and receive one from each."""
        nbytes = data.nbytes // self.size
        self._do("Ialltoall", self._spec(data, nbytes), self._spec(received, nbytes))

    def all_to_all_uneven(self, data: Tensor, counts: Integers, received: Tensor, count: int) -> None:
        """Send `counts[i]` bytes of contiguous data to rank i, and receive `count` from each."""
        sent = [buffer_of(self._mpi, data), counts.astype(np.int32), None, self._mpi.BYTE]
        counts_of_mine = np.full(self.size, count, np.int32)
        self._do("Ialltoallv", sent, [buffer_of(self._mpi, received), counts_of_mine, None, self._mpi.BYTE])

    def all_gather(self, data: Tensor, own: Tensor | None = None) -> None:
        """Fill contiguous data, in which the i-th of equal slices is rank i's; None: the own one is there."""
        nbytes = data.nbytes // self.size
        if data.nbytes <= self._limits.max_message_bytes:
            sent = self._mpi.IN_PLACE if own is None else self._spec(own, nbytes)
            self._do("Iallgather", sent, self._spec(data, nbytes))
        else:
            self._broadcast_each(as_bytes(data).split(nbytes), own)

    def all_gather_uneven(self, data: Tensor, counts: Integers, own: Tensor | None = None) -> None:
        """Fill contiguous data, in which `counts[i]` bytes are rank i's; None: the own ones are there."""
        if data.nbytes <= self._limits.max_message_bytes:
            sent = self._mpi.IN_PLACE if own is None else self._spec(own, own.nbytes)
            received = [buffer_of(self._mpi, data), counts.astype(np.int32), None, self._mpi.BYTE]
            self._do("Iallgatherv", sent, received)
        else:
            self._broadcast_each(as_bytes(data).split(counts.tolist()), own)

    def _broadcast_each(self, blocks: Sequence[Tensor], own: Tensor | None) -> None:
        if own is not None:
            blocks[self.index].copy_(as_bytes(own))
        for root, block in enumerate(blocks):
            self.broadcast(block, root)

    def broadcast(self, data: Tensor, root: int) -> None:
        """Copy a root's contiguous data to all."""
        most = self._limits.max_message_bytes
        for piece in (data,) if data.nbytes <= most else as_bytes(data).split(most):
            self._do("Ibcast", self._spec(piece, piece.nbytes), root)

    def step(self, rows: int, itemsize: int) -> int:
        """Return how many bytes of each of so many rows are copied and exchanged at a time."""
        chunk = NETWORK_CHUNK_BYTES // PIECE_BYTES * self._limits.piece_bytes
        most = min(chunk, self._limits.max_message_bytes // SLICED_CHUNKS)
        return max(most // rows, LEAST_SLICE_BYTES) // itemsize * itemsize

    def buffer(self, purpose: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] of scratch memory, reused from call to call."""
        nbytes = numel * dtype.itemsize
        scratch = self._scratch.get(purpose)
        if scratch is None or scratch.numel() < nbytes:
            with torch.inference_mode(False):  # what is made in that mode could not be reused outside of it
                scratch = flat_zeros(max(nbytes, 1 << 16), torch.uint8)
            self._scratch[purpose] = scratch
        return scratch[:nbytes].view(dtype)

    def rows(self, purpose: str, count: int, nbytes: int) -> Bytes:
        """Return [count, nbytes] of scratch memory; see `buffer`."""
        return self.buffer(purpose, count * nbytes, torch.uint8).numpy().reshape(count, nbytes)

    def clear(self) -> None:
        """Release scratch memory; local."""
        self._scratch.clear()

    def _spec(self, tensor: Tensor, count: int) -> list[Any]:
        return [buffer_of(self._mpi, tensor), count, self._mpi.BYTE]

    def _do(self, name: str, *arguments: Any) -> None:
        """Call one of MPI's collectives and wait for it; collective."""
        request = getattr(self._comm, name)(*arguments)
        if request is not None:
            self._patience.wait(request)
