"""Large data over MPI alone, wherever the ranks are.

Reductions go in pieces of about 1 MiB that stay in the cache:

    all_reduce, for each piece:   all-to-all of slices → local sum in rank order → all-gather of the sums

(reduce-scatter and all-gather, Thakur, Rabenseifner and Gropp 2005). That works for every dtype, gives the same
bits on every rank and from run to run, and needs no `MPI.Op`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..utils.memory import flat_zeros
from ..utils.partition import split_sizes
from .buffers import as_bytes, buffer_of, empty, flat_elements
from .call import Call
from .handshake import PAYLOAD_BYTES, SlotExchange
from .reduction import reduce_in_rank_order

__all__ = ["Limits", "Paths", "PlainPaths", "Plan"]

_HUGE_FROM = 4 << 20  # numpy asks for huge pages from this size on


class Limits(Protocol):
    """Sizes that may be changed at any time, on all ranks alike.

    Attributes:
        piece_bytes: How much of a large tensor is reduced at a time.
        max_message_bytes: The most that goes into one MPI call.
    """

    piece_bytes: int
    max_message_bytes: int


class Plan(Protocol):
    """Reduces tensors of one dtype and shape that were reduced before."""

    def run(self, tensor: Tensor) -> bool:
        """Reduce a contiguous tensor, in place; collective. False, and nothing done, if the plan is not for it."""


class _NoPlan:
    """Stands for a plan where there is nothing to prepare."""

    def run(self, tensor: Tensor) -> bool:
        """Do nothing."""
        return False


_NO_PLAN = _NoPlan()


class Paths(Protocol):
    """One way to move large data; every method is collective, and agrees on the call unless it says otherwise."""

    def all_reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data over all ranks, in place."""

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data onto the call's root, in place there, untouched elsewhere."""

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor and return the own slice along `dim`."""

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks."""

    def all_gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        """Put the blocks of all ranks, `rows` long each, one after the other into `result`; agreed already."""

    def is_small(self, call: Call) -> bool:
        """Say whether the plan for this kind of all-reduce serves all tensors; local."""

    def plan(self, call: Call) -> Plan:
        """Prepare all-reduces of tensors of this kind; local."""

    def note_address(self, tensor: Tensor) -> int:
        """Before agreeing on an all_gather: let the others know if the own block is symmetric; local."""

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8, symmetric where that is possible."""

    def break_down(self, reason: str) -> None:
        """Let ranks that wait for this one know that it does not come any more; local."""

    def free(self) -> None:
        """Release what the ranks share."""


class PlainPaths:
    """Moves large data by MPI calls on a communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator.
        slots: Exchanges fingerprints.
        limits: Sizes of pieces and messages.
    """

    def __init__(self, mpi: Any, comm: Any, slots: SlotExchange, limits: Limits) -> None:
        self.rank = slots.rank
        self.size = slots.size
        self._mpi = mpi
        self._comm = comm
        self._slots = slots
        self._agree = slots.agree
        self._limits = limits
        self._scratch: dict[str, Tensor] = {}

    def all_reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data over all ranks, in place; collective."""
        self._agree(call)
        for piece, slice_ in self._reduced_pieces(call, flat, in_place=True):
            self._comm.Allgather(self._mpi.IN_PLACE, self._spec(piece, slice_.nbytes))

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data onto the call's root, in place there, untouched elsewhere; collective."""
        self._agree(call)
        is_root = self.rank == call.root
        for piece, slice_ in self._reduced_pieces(call, flat, in_place=is_root):
            if is_root:
                self._comm.Gather(self._mpi.IN_PLACE, self._spec(piece, slice_.nbytes), call.root)
            else:
                self._comm.Gather(self._spec(slice_), None, call.root)

    def _reduced_pieces(self, call: Call, flat: Tensor, *, in_place: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Reduce `flat` piece by piece; yields (piece of W slices, own slice of it, reduced).

        With `in_place`, the own slice lies in the piece, and what the caller then writes into the piece lands in
        `flat`. The last piece is padded in scratch memory where the ranks do not divide it.
        """
        per_slice = max(1, self._limits.piece_bytes // (self.size * flat.element_size()))
        step = per_slice * self.size
        whole = flat.numel() // step * step
        for start in range(0, whole, step):
            piece = flat[start : start + step]
            yield piece, self._reduce_slice(call, piece, in_place)
        rest = flat.numel() - whole
        if rest:
            padded = self._buffer("rest", -(-rest // self.size) * self.size, flat.dtype)
            padded[:rest].copy_(flat[whole:])
            yield padded, self._reduce_slice(call, padded, True)
            if in_place:
                flat[whole:].copy_(padded[:rest])

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

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor and return the own slice along `dim`; collective."""
        self._agree(call)
        slices = [flat_elements(part) for part in tensor.tensor_split(self.size, dim)]
        shape = list(tensor.shape)
        shape[dim] = split_sizes(shape[dim], self.size)[self.rank]
        result = empty(shape, tensor.dtype)
        self.reduce_slices(call, slices, result.view(-1))
        return result

    def reduce_slices(self, call: Call, slices: list[Tensor], flat: Tensor) -> None:
        """Reduce slice i of all ranks on rank i, into `flat`; the slices may differ in size; agreed already."""
        longest = max(part.numel() for part in slices)
        step = max(1, self._limits.piece_bytes // (self.size * flat.element_size()))
        for start in range(0, longest, step):
            count = min(step, longest - start)
            piece = self._buffer("rest", count * self.size, flat.dtype)
            for row, source in zip(piece.view(self.size, count), slices, strict=True):
                part = source[start : start + count]
                row[: part.numel()].copy_(part)
            reduced = self._reduce_slice(call, piece, True)
            target = flat[start : start + count]
            target.copy_(reduced[: target.numel()])

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        self._agree(call)
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

    def is_small(self, call: Call) -> bool:
        """Say whether the data fits into a slot; local."""
        return call.nbytes <= PAYLOAD_BYTES

    def plan(self, call: Call) -> Plan:
        """Prepare all-reduces of data that fits into a slot; local."""
        return self._slots.plan(call) if self.is_small(call) else _NO_PLAN

    def note_address(self, tensor: Tensor) -> int:
        """Nothing is symmetric here; local."""
        return 0

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return ordinary memory, [nbytes] uint8; local."""
        return flat_zeros(nbytes, torch.uint8)

    def break_down(self, reason: str) -> None:
        """Ranks that wait inside MPI cannot be reached; local."""

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
