"""Large sums and exchanges within a lane, the ranks with one local rank, by MPI's own collectives.

The ranks of a lane call these functions only once all ranks have agreed on the call, in an order and in chunks
that follow from the call alone: mismatched MPI collectives would hang, crash or return garbage. A function is a
generator of `Steps`: it yields each request that has to be complete before it goes on, so that a rank can do
something else meanwhile, and wait asleep beside a computation.

Sums are MPI's own for dtypes that it adds as torch does. The rest is exchanged in slices and reduced here, in the
order of the nodes: 16-bit types, MIN and MAX of floats, for which MPI loses NaN, and large data, of which MPICH
sends more than it has to, and for which Open MPI's non-blocking reductions take twice as long (Rabenseifner 2004,
"Optimization of collective reduction operations"):

    all-to-all of slices → local reduction → all-gather         2(n−1)/n of the bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.memory import flat_zeros
from ...utils.waiting import RequestWaiter
from ..buffers import as_bytes
from ..reduction import finish, fold_rows, sum_of, wide_dtype
from ..tuning import SLICED_FROM_BYTES, SLICED_FROM_BYTES_OPEN_MPI
from .topology import Blocks, Integers

Steps = Iterator[Any]
"""An operation under way: each request that has to be complete before its next step."""

_INTEGERS = {
    torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T",
    torch.uint8: "UINT8_T", torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
}  # fmt: skip
_FLOATS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_COMPLEX = {torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX"}
_NATIVE = {
    ReduceOp.SUM: ("SUM", {**_INTEGERS, **_FLOATS, **_COMPLEX}),
    ReduceOp.PRODUCT: ("PROD", {**_INTEGERS, **_FLOATS}),
    ReduceOp.MIN: ("MIN", _INTEGERS),
    ReduceOp.MAX: ("MAX", _INTEGERS),
    ReduceOp.BAND: ("BAND", _INTEGERS),
    ReduceOp.BOR: ("BOR", _INTEGERS),
    ReduceOp.BXOR: ("BXOR", _INTEGERS),
}
"""MPI's names of reductions, and of the datatypes for which they are torch's."""
_given_up: list[Flight] = []
"""Operations under way of groups that have failed: MPI may still write to their memory."""
_IN_FLIGHT = 3
"""The most operations of a lane that are under way at a time."""


def is_sliced(dtype: torch.dtype, op: ReduceOp, nbytes: int, nodes: int, *, is_open_mpi: bool) -> bool:
    """Return True if a sum of so many bytes over so many nodes, perhaps in chunks, exchanges slices; local."""
    if dtype not in _NATIVE[sum_of(op)][1]:
        return True
    if is_open_mpi:
        return nbytes >= nodes * SLICED_FROM_BYTES_OPEN_MPI
    return nodes > 2 and nbytes >= SLICED_FROM_BYTES


class Lane:
    """One rank of each node, and the collectives among them.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Their communicator, in the order of the nodes.
        most: The most bytes of one MPI call.
        waiter: Waits for requests.

    Attributes:
        size: Number of ranks.
        index: This rank's number among them.
    """

    def __init__(self, mpi: Any, comm: Any, most: int, waiter: RequestWaiter) -> None:
        self._mpi, self._comm, self._most, self._waiter = mpi, comm, most, waiter
        self._is_open_mpi = mpi.Get_library_version().startswith("Open MPI")
        self.size: int = comm.Get_size()
        self.index: int = comm.Get_rank()
        self._turn = 0
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._under_way: set[Flight] = set()

    def complete(self, steps: Steps) -> None:
        """Run an operation to its end; collective over the lane."""
        for request in steps:
            self._waiter.wait(request)

    def start(self, steps: Steps) -> Flight:
        """Run an operation up to its first request; collective over the lane."""
        return Flight(steps, self._waiter, self._under_way)

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, op: ReduceOp, ranks: int, *, sliced: bool) -> Steps:
        """Reduce [numel] contiguous elements in place, an average over `ranks` ranks; 16-bit values in float32."""
        if sliced:
            return self._exchange_slices(flat, op, ranks)
        return self._reduce_by_mpi(flat, op, ranks)

    def _reduce_by_mpi(self, flat: Tensor, op: ReduceOp, ranks: int) -> Steps:
        operation, names = _NATIVE[sum_of(op)]
        spec = [self._memory(flat), flat.numel(), getattr(self._mpi, names[flat.dtype])]
        call = self._comm.Allreduce if self._is_open_mpi else self._comm.Iallreduce
        if (request := call(self._mpi.IN_PLACE, spec, getattr(self._mpi, operation))) is not None:
            yield request
        finish(flat, op, ranks, flat)

    def adds(self, op: ReduceOp, flat: Tensor) -> bool:
        """Return True if `reduce_scatter` takes a tensor: quicker than an exchange of slices; local."""
        return flat.dtype in _NATIVE[sum_of(op)][1] and flat.nbytes <= self._most and not self._is_open_mpi

    def reduce_scatter(self, flat: Tensor, blocks: Blocks, output: Tensor, op: ReduceOp) -> Steps:
        """Reduce contiguous elements over this lane, the own block into `output`, by MPI."""
        operation, names = _NATIVE[sum_of(op)]
        kind, by = getattr(self._mpi, names[flat.dtype]), getattr(self._mpi, operation)
        if blocks.are_equal:
            count = output.numel()  # of a block, for MPI in both
            sent, received = ([self._memory(tensor), count, kind] for tensor in (flat, output))
            yield self._comm.Ireduce_scatter_block(sent, received, by)
        else:
            counts = (blocks.sizes // flat.itemsize).astype(np.int32)
            sent, received = ([self._memory(tensor), kind] for tensor in (flat, output))
            yield self._comm.Ireduce_scatter(sent, received, counts, by)
        finish(output, op, self.size, output)

    def _exchange_slices(self, flat: Tensor, op: ReduceOp, ranks: int) -> Steps:
        count = -(-flat.numel() // self.size)
        padded = flat
        turn = self._turn = (self._turn + 1) % _IN_FLIGHT
        if count * self.size != flat.numel():
            padded = self.buffer("padded", count * self.size, flat.dtype, turn)
            padded[: flat.numel()].copy_(flat)
        own = padded[self.index * count : (self.index + 1) * count]
        yield from self.exchange_and_reduce(padded, op, ranks, own, turn)
        yield from self.all_gather(padded)
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])

    def exchange_and_reduce(self, flat: Tensor, op: ReduceOp, ranks: int, output: Tensor, turn: int = 0) -> Steps:
        """Reduce the own one of equal slices of contiguous elements into `output`; see `all_reduce`.

        Args:
            flat: [size * numel] the slices.
            op: The reduction.
            ranks: Number of ranks of an average.
            output: [numel] of the dtype of `flat` or of `wide_dtype`; may be the own slice.
            turn: Which scratch memory to use.
        """
        received = self.buffer("received", flat.numel(), flat.dtype, turn)
        yield from self.all_to_all(flat, received)
        wide = wide_dtype(flat.dtype)
        total = output if output.dtype is wide else self.buffer("wide", output.numel(), wide)
        fold_rows(received.view(self.size, -1), op, total)
        finish(total, op, ranks, output)

    # ---- copies -------------------------------------------------------------------------------------------

    def all_to_all(self, data: Tensor, received: Tensor) -> Steps:
        """Send the i-th of equal slices of contiguous data to rank i, and receive one from each."""
        nbytes = data.nbytes // self.size
        yield self._comm.Ialltoall(self._spec(data, nbytes), self._spec(received, nbytes))

    def all_to_all_uneven(self, data: Tensor, counts: Integers, received: Tensor, count: int) -> Steps:
        """Send `counts[i]` bytes of contiguous data to rank i, and receive `count` from each."""
        sent = [self._memory(data), counts.astype(np.int32), None, self._mpi.BYTE]
        counts_of_mine = np.full(self.size, count, np.int32)
        taken = [self._memory(received), counts_of_mine, None, self._mpi.BYTE]
        yield self._comm.Ialltoallv(sent, taken)

    def all_gather(self, data: Tensor, counts: Integers | None = None, own: Tensor | None = None) -> Steps:
        """Fill contiguous data, slice i of which is rank i's.

        Args:
            data: The memory of all slices.
            counts: [ranks] size of each slice in bytes; None: they are equal.
            own: This rank's slice; None: it is there already.
        """
        if data.nbytes > self._most:
            slices = as_bytes(data).split(data.nbytes // self.size if counts is None else counts.tolist())
            yield from self._broadcast_each(slices, own)
        elif counts is None:
            nbytes = data.nbytes // self.size
            sent = self._mpi.IN_PLACE if own is None else self._spec(own, nbytes)
            yield self._comm.Iallgather(sent, self._spec(data, nbytes))
        else:
            sent = self._mpi.IN_PLACE if own is None else self._spec(own, own.nbytes)
            received = [self._memory(data), counts.astype(np.int32), None, self._mpi.BYTE]
            yield self._comm.Iallgatherv(sent, received)

    def _broadcast_each(self, slices: Sequence[Tensor], own: Tensor | None) -> Steps:
        if own is not None:
            slices[self.index].copy_(as_bytes(own))
        for root, data in enumerate(slices):
            yield from self.broadcast(data, root)

    def broadcast(self, data: Tensor, root: int) -> Steps:
        """Copy a root's contiguous data to all."""
        for part in (data,) if data.nbytes <= self._most else as_bytes(data).split(self._most):
            yield self._comm.Ibcast(self._spec(part, part.nbytes), root)

    # ---- memory -------------------------------------------------------------------------------------------

    def buffer(self, purpose: str, numel: int, dtype: torch.dtype, turn: int = 0) -> Tensor:
        """Return [numel] of scratch memory, the same for the same purpose and turn; local."""
        nbytes = numel * dtype.itemsize
        scratch = self._scratch.get((purpose, turn))
        if scratch is None or scratch.numel() < nbytes:
            with torch.inference_mode(False):  # memory made in that mode could not be reused outside of it
                scratch = flat_zeros(max(nbytes, 1 << 16), torch.uint8)
            self._scratch[purpose, turn] = scratch
        return scratch[:nbytes].view(dtype)

    def clear(self) -> None:
        """Release scratch memory; operations that were given up keep theirs; local."""
        self._scratch.clear()
        _given_up.extend(self._under_way)

    def _memory(self, tensor: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _spec(self, tensor: Tensor, count: int) -> list[Any]:
        return [self._memory(tensor), count, self._mpi.BYTE]


class Flight:
    """An operation of a lane under way.

    Args:
        steps: The operation.
        waiter: Waits for its requests.
        under_way: The set in which it is until its end.
    """

    def __init__(self, steps: Steps, waiter: RequestWaiter, under_way: set[Flight]) -> None:
        self._steps, self._waiter, self._under_way = steps, waiter, under_way
        self._request = next(steps, None)
        if self._request is not None:
            under_way.add(self)

    def go_on(self) -> None:
        """Wait for the request under way, then run up to the next one, if any; collective over the lane."""
        if self._request is not None:
            self._waiter.wait(self._request)
            self._request = next(self._steps, None)

    def finish(self) -> None:
        """Run to the end; collective over the lane."""
        while self._request is not None:
            self.go_on()
        self._under_way.discard(self)
