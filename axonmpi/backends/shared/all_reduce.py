"""Reductions over the ranks of one node, onto one rank or all, by the strategy that suits size and memory.

    strategy     how                                                              barriers          copies
    replicated   each rank puts its data into staging and reduces all of it       1                 1 in
    in place     each reduces its slice over all ranks' memory, writes it to all  2                 none
    staged       chunks go through staging: copy in, reduce a slice, copy out     1 a chunk, and 2  1 in, 1 out

    tensor       up to 32 KiB of all ranks   up to `replicated_bytes`   larger
    symmetric    replicated                  in place                   in place
    ordinary     replicated                  replicated                 staged

The first barrier carries the fingerprint of the call, and whether all ranks have a symmetric tensor at the same
address: where they do not, the tensor is staged. What can be done before that barrier is done: data is copied in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ..buffers import bytes_of
from ..call import Call
from ..reduction import Reduction, choose_reduction, plain_binary
from ..tuning import (
    REPLICATED_BYTES,
    REPLICATED_ORDINARY_BYTES,
    REPLICATED_PAIR_BYTES,
    SLICE_BYTES,
)
from .staged import NodeMemory, StagedReduction
from .staging import ALIGNMENT, Bytes, round_down, slices_of, views_of

__all__ = ["NodeReduction", "replicated_bytes"]

_PAGE = 4096


def replicated_bytes(ranks: int, *, symmetric: bool) -> int:
    """Return the size up to which every rank of so many reduces all of a tensor; local."""
    if symmetric:
        return max(REPLICATED_BYTES // ranks // _PAGE * _PAGE, _PAGE)
    if ranks == 2:
        return REPLICATED_PAIR_BYTES
    return max(REPLICATED_ORDINARY_BYTES // ranks**2 // _PAGE * _PAGE, replicated_bytes(ranks, symmetric=True))


class NodeReduction:
    """Reductions of one dtype, shape, operation and root.

    Args:
        memory: What the ranks share.
        call: The call.
    """

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        self._call = call
        self._handshake = memory.handshake
        ranks = memory.handshake.size
        self._replicated = self._in_place = None
        if call.nbytes > replicated_bytes(ranks, symmetric=True):
            self._in_place = _InPlace(memory, call)
        if call.nbytes <= min(replicated_bytes(ranks, symmetric=False), memory.staging.buffer_bytes):
            self._replicated = _Replicated(memory, call)
        self._staged = StagedReduction(memory, call)

    def run(self, tensor: Tensor) -> None:
        """Reduce contiguous data, in place on ranks that get the result; collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        slices = None if self._in_place is None else self._in_place.find(tensor)
        if slices is not None:
            assert self._in_place is not None
            if self._handshake.meet(self._call, slices.address):
                self._in_place.run(slices, tensor)
            else:
                self._staged.run(tensor)
        elif self._replicated is not None:
            index = self._replicated.put(tensor)
            if self._handshake.meet(self._call, 0):
                self._replicated.take(tensor, index)
            else:
                self._staged.run(tensor)
        else:
            self._staged.put_first(tensor)
            # If some ranks have a symmetric tensor, they have put nothing in: begin anew, with them.
            self._staged.run(tensor, first=1 if self._handshake.meet(self._call, 0) else 0)


class _Replicated:
    """Each rank reduces all of the data."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        rank, ranks = memory.handshake.rank, memory.handshake.size
        staging = memory.staging
        self._barrier = memory.barrier
        self._nbytes = call.nbytes
        self._count = staging.count
        self._gets_result = call.root in (None, rank)
        self._own = [buffers[rank][: call.nbytes] for buffers in staging.buffers]
        self._parts = [
            [part.view(call.shape) for part in views_of(buffers, 0, call.nbytes, call.dtype)]
            for buffers in staging.buffers
        ]
        self._reduction = choose_reduction(call.dtype, call.op, ranks)
        # The sum of two is the same in either order, and the own part is in the tensor already.
        adds = ranks == 2 and plain_binary(call.dtype, call.op) is torch.add
        self._other = [parts[1 - rank] for parts in self._parts] if adds else None
        self._sources: BoundedCache[int, Bytes] = BoundedCache(256)

    def put(self, tensor: Tensor) -> int:
        """Copy the own data to where the others find it; returns the index of the buffer; local."""
        index = self._barrier.count % self._count
        pointer = tensor.data_ptr()
        source = self._sources.get(pointer)
        if source is None:
            source = self._sources.add(pointer, bytes_of(tensor))
        self._own[index][...] = source
        return index

    def take(self, tensor: Tensor, index: int) -> None:
        """Reduce what all ranks have put in; local, after they have met."""
        if not self._gets_result:
            return
        if self._other is not None:
            tensor.add_(self._other[index])
        else:
            self._reduction.run(self._parts[index], tensor)


class _Slices:
    """This rank's slice of a symmetric tensor, over the memory of all ranks, in pieces that fit into a cache.

    Attributes:
        address: Where the tensor lies.
        pieces: The pieces.
    """

    __slots__ = ("address", "pieces")

    def __init__(self, address: int, pieces: list[_Piece]) -> None:
        self.address = address
        self.pieces = pieces


class _Piece:
    """A piece of a slice.

    Args:
        rows: [ranks, elements] the piece in the memory of each rank.
        total: [elements] memory for its sum.
    """

    __slots__ = ("_raw", "_sum", "_total", "parts")

    def __init__(self, rows: Tensor, total: Tensor) -> None:
        self.parts = list(rows.unbind(0))
        self._total = total[: rows.shape[1]]
        # Numpy has copied before torch has begun to; bytes, since it does not know all dtypes.
        self._raw = rows.view(torch.uint8).numpy()
        self._sum = self._total.view(torch.uint8).numpy()

    def reduce(self, reduction: Reduction, rank: int, root: int | None) -> None:
        """Reduce the piece onto one rank or all; local."""
        parts, raw = self.parts, self._raw
        if root is not None:
            reduction.run(parts, self._total)
            raw[root] = self._sum
        elif reduction.in_place:  # of two
            reduction.run(parts, parts[rank])
            raw[1 - rank] = raw[rank]
        else:
            reduction.run(parts, self._total)
            raw[...] = self._sum


class _InPlace:
    """Each rank reduces its slice of a symmetric tensor, in the memory of all ranks."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self._memory = memory
        self._call = call
        self._dtype = call.dtype
        self._rank = memory.handshake.rank
        self._reduction = choose_reduction(call.dtype, call.op, memory.handshake.size)
        self._gets_result = call.root in (None, self._rank)
        self._total: Tensor | None = None

    def find(self, tensor: Tensor) -> _Slices | None:
        """Return this rank's slices of a contiguous tensor, None if it is not symmetric; local."""
        key = (self._call.key, tensor.data_ptr())
        slices: _Slices | None = self._memory.views.get(key)
        if slices is None:
            address = self._memory.arena.address(tensor)
            if not address:
                return None
            slices = _Slices(address, self._cut(address))
            self._memory.views.add(key, slices, 1 + len(slices.pieces) * self._memory.handshake.size)
        return slices

    def run(self, slices: _Slices, tensor: Tensor) -> None:
        """Reduce the own slices; collective, after all ranks have met."""
        if self._gets_result:
            torch.autograd.graph.increment_version(tensor)  # before what may fail halfway
        for piece in slices.pieces:
            piece.reduce(self._reduction, self._rank, self._call.root)
        self._memory.barrier.wait(self._call)

    def _cut(self, address: int) -> list[_Piece]:
        memory, itemsize = self._memory, self._dtype.itemsize
        unit = max(ALIGNMENT, itemsize)
        low, high = slices_of(self._call.nbytes, memory.handshake.size, unit)[self._rank]
        if low == high:
            return []
        step = round_down(min(SLICE_BYTES, memory.limits.piece_bytes), ALIGNMENT)
        with torch.inference_mode(False):
            if self._total is None or self._total.nbytes < step:
                self._total = torch.empty(step, dtype=torch.uint8, device="cpu").view(self._dtype)
            rows = memory.arena.rows(address + low, high - low).view(self._dtype)
            return [
                _Piece(
                    part,
                    self._total,
                )
                for part in rows.split(step // itemsize, dim=1)
            ]
