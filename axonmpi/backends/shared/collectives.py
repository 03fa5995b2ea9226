"""Collectives through memory that the ranks of one node share.

A symmetric tensor lies at the same place in each rank's region, so nothing is copied. Each rank reduces its
own slice over the memory of all ranks, piece by piece, and writes the result where it is wanted:

    rank 0's memory  | a0 | b0 |      rank 0: a0 + a1 → both a      rank 1: b0 + b1 → both b
    rank 1's memory  | a1 | b1 |      two barriers, the first with the fingerprint of the call

An ordinary tensor goes through scratch memory, in chunks that stay in the cache: `chunks` has the reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...utils.memory import flat_zeros
from ...utils.partition import split_sizes
from ..buffers import as_bytes, empty, flat_elements
from ..call import Call
from ..handshake import PAYLOAD_BYTES
from ..plain import Limits, Plan
from ..reduction import Reduction, choose_reduction, reduce_in_rank_order
from .all_reduce import DirectPlan, MediumPlan, Piece, SymmetricPlan, direct_bytes
from .barrier import NodeBarrier
from .chunk_pipeline import Stage
from .chunks import ChunkPlan
from .handshake import NodeSlots
from .room import NodeRoom
from .segment import Arena, Block, warn_no_shared_memory
from .staging import (
    ALIGNMENT,
    PIECE_BYTES,
    bounds_of,
    reduce_in_pieces,
    round_down,
    slices_of,
)

__all__ = ["NodePaths"]

_MAX_TENSORS = 64
_MAX_PIECES = 4096
_MAX_PLANS = 256
_MAX_VIEWS = 1 << 14


class NodePaths:
    """Moves large data between the ranks of a group that lies on one node.

    Every method agrees on the call first.

    Args:
        slots: Exchanges fingerprints.
        barrier: The barrier that they travel with.
        arena: Where symmetric tensors lie.
        room: Where ordinary tensors go through.
        limits: How much of a symmetric tensor is reduced at a time.
        release: Called by `free`, in order.

    Attributes:
        room: The same.
    """

    def __init__(
        self,
        slots: NodeSlots,
        barrier: NodeBarrier,
        arena: Arena,
        room: NodeRoom,
        limits: Limits,
        *,
        release: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.rank = slots.rank
        self.size = slots.size
        self._slots = slots
        self._barrier = barrier
        self._arena = arena
        self.room = room
        self._limits = limits
        self._release = release
        self._total = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        self._cut_before: dict[Any, list[Piece]] = {}
        self._chunk_plans: dict[int, ChunkPlan] = {}
        self._kept_views = 0

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data over all ranks, in place; collective."""
        assert call.op is not None
        agreed, address = self._begin(call, flat)
        if address:
            assert call.dtype is not None
            self.reduce_pieces(call, self.pieces(flat, address), choose_reduction(call.dtype, call.op, self.size))
        else:
            self.ordinary(call).run(flat, agreed)

    def reduce_pieces(self, call: Call, pieces: Sequence[Piece], reduction: Reduction) -> None:
        """Reduce this rank's pieces of a symmetric tensor for all ranks; collective, agreed already."""
        for piece in pieces:
            piece.reduce(reduction)
        self._barrier.wait(call)

    def ordinary(self, call: Call, *, has_result: bool = True) -> ChunkPlan:
        """Find or make the plan that reduces tensors which are not symmetric; collective the first time."""
        plan = self._chunk_plans.get(call.key)
        if plan is None:
            self.room.scratch()
            if len(self._chunk_plans) >= _MAX_PLANS:
                self._chunk_plans.clear()
                self._kept_views = 0
            plan = ChunkPlan(self._slots, self._barrier, self.room, self.may_keep, call, has_result=has_result)
            self._chunk_plans[call.key] = plan
        return plan

    def may_keep(self, views: int) -> bool:
        """Say whether that many views of a tensor may be kept; lets go of others where they would be too many."""
        if views > _MAX_VIEWS:
            return False
        self._kept_views += views
        if self._kept_views > _MAX_VIEWS:
            for plan in self._chunk_plans.values():
                plan.forget()
            self._kept_views = views
        return True

    def is_small(self, call: Call) -> bool:
        """Say whether every rank reduces all of the data itself; local."""
        return call.nbytes <= self.room.direct.region_bytes // 2

    def plan(self, call: Call) -> Plan:
        """Prepare all-reduces of tensors of this kind; local."""
        if call.nbytes <= direct_bytes(self.size):
            return DirectPlan(self._slots, self.room, call)
        if self.is_small(call):
            return MediumPlan(self._slots, self, call)
        return SymmetricPlan(self._slots, self, call)

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce flat contiguous data onto the call's root, in place there, untouched elsewhere; collective."""
        assert call.op is not None
        assert call.root is not None
        agreed, address = self._begin(call, flat)
        is_root = self.rank == call.root
        if address:
            for piece in self.pieces(flat, address):
                reduce_in_rank_order(piece.parts, call.op, piece.total)
                piece.parts[call.root].copy_(piece.total)
            self._barrier.wait(call)
            return
        self.ordinary(call, has_result=is_root).run(flat, agreed)

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor and return the own slice along `dim`; collective."""
        op = call.op
        assert op is not None
        agreed, address = self._begin(call, tensor)
        shape = list(tensor.shape)
        shape[dim] = split_sizes(shape[dim], self.size)[self.rank]
        result = empty(shape, tensor.dtype)
        if address:
            slices = [part.tensor_split(self.size, dim)[self.rank] for part in self._peers_of(tensor, address)]
            reduce_in_pieces(slices, op, result)
            self._barrier.wait(call)
        else:
            self._reduce_scatter_chunks(call, tensor, dim, result.view(-1), agreed)
        return result

    def _reduce_scatter_chunks(self, call: Call, tensor: Tensor, dim: int, flat: Tensor, agreed: bool) -> None:
        op, scratch = call.op, self.room.scratch()
        assert op is not None
        slices = [flat_elements(part) for part in tensor.tensor_split(self.size, dim)]
        sources = [as_bytes(part).numpy() for part in slices]
        itemsize = tensor.element_size()
        step = round_down(self.room.chunk_bytes() // self.size, max(ALIGNMENT, itemsize))
        longest = sources[0].nbytes if slices[0].numel() else 0  # tensor_split puts the larger slices first
        count = -(-longest // step)

        def copy_in(chunk: int, place: int, before: int) -> None:
            for rank, source in enumerate(sources):
                part = source[chunk * step : (chunk + 1) * step]
                if rank != self.rank:
                    scratch.inputs[place][self.rank][rank * step : rank * step + part.nbytes] = part

        def reduce(chunk: int, place: int, before: int) -> None:
            target = flat[chunk * step // itemsize : (chunk + 1) * step // itemsize]
            if not target.numel():
                return
            low = self.rank * step
            parts = list(scratch.input_views(before, low, low + target.nbytes, tensor.dtype))
            parts[self.rank] = slices[self.rank][chunk * step // itemsize :][: target.numel()]
            reduce_in_rank_order(parts, op, target)

        self.pipeline(call, count, (copy_in, reduce), agreed, min(longest, step) * self.size)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        root, is_root = call.root, self.rank == call.root
        agreed, address = self._begin(call, flat)
        data = as_bytes(flat).numpy()
        if address:
            if not is_root:
                data[...] = self._arena.parts(address, data.nbytes)[root]
            self._barrier.wait(call)
            return
        scratch = self.room.scratch()
        size = self.room.chunk_bytes()

        def copy_in(chunk: int, place: int, before: int) -> None:
            if is_root:
                part = data[chunk * size : (chunk + 1) * size]
                scratch.inputs[place][root][: part.nbytes] = part

        def copy_out(chunk: int, place: int, before: int) -> None:
            if not is_root:
                part = data[chunk * size : (chunk + 1) * size]
                part[...] = scratch.inputs[before][root][: part.nbytes]

        self.pipeline(call, -(-data.nbytes // size), (copy_in, copy_out), agreed, min(data.nbytes, size))

    def all_gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        """Put the blocks of all ranks one after the other into `result`; collective, after agreeing on the call.

        Args:
            call: The call that was agreed on.
            own: This rank's block, contiguous.
            rows: Size of each rank's block along dim 0.
            result: Contiguous, as large as all blocks together.
        """
        target = as_bytes(result).numpy()
        row_bytes = result.nbytes // sum(rows)
        bounds = bounds_of([count * row_bytes for count in rows])
        source = as_bytes(own).numpy() if own.numel() else target[:0]
        low, high = bounds[self.rank]
        target[low:high] = source
        address = self._common_address(own, [count * row_bytes for count in rows])
        if address:
            for rank, (low, high) in enumerate(bounds):
                if rank != self.rank:
                    target[low:high] = self._arena.parts(address, high - low)[rank]
            self._barrier.wait(call)
            return
        scratch = self.room.scratch()
        size = self.room.chunk_bytes()

        def copy_in(chunk: int, place: int, before: int) -> None:
            part = source[chunk * size : (chunk + 1) * size]
            scratch.inputs[place][self.rank][: part.nbytes] = part

        def copy_out(chunk: int, place: int, before: int) -> None:
            for rank, (low, high) in enumerate(bounds):
                part = target[low:high][chunk * size : (chunk + 1) * size]
                if rank != self.rank:
                    part[...] = scratch.inputs[before][rank][: part.nbytes]

        longest = max(rows) * row_bytes
        self.pipeline(call, -(-longest // size), (copy_in, copy_out), True, min(longest, size))

    def note_address(self, tensor: Tensor) -> int:
        """Put the place of a tensor, if it is symmetric, into the own slot; local. Returns it, 0 for others."""
        address = self._arena.address(tensor)
        self._slots.own_words[0] = address
        return address

    def address(self, tensor: Tensor) -> int:
        """Say where a contiguous tensor lies if it is symmetric, 0 if it is not; local."""
        return self._arena.address(tensor)

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 of shared memory, ordinary memory where there is not enough; collective."""
        block = self._arena.allocate(nbytes)
        if isinstance(block, Block):
            return self._arena.tensor(block, nbytes)
        warn_no_shared_memory(block)
        return flat_zeros(nbytes, torch.uint8)

    def break_down(self, reason: str) -> None:
        """Let ranks that wait for this one know that it does not come any more; local."""
        self._barrier.break_down(reason)

    def free(self) -> None:
        """Let go of the shared memory, not waiting for Python's garbage; tensors on it keep theirs; collective."""
        self._cut_before.clear()
        self._chunk_plans.clear()
        self.room.free()
        for release in (self._arena.close, *self._release):
            release()

    def _begin(self, call: Call, tensor: Tensor) -> tuple[bool, int]:
        """Agree on the call, unless the tensor's first chunk can be copied in before that.

        Returns:
            Whether the ranks have agreed, and where the tensor lies if it is symmetric on all of them, else 0.
        """
        address = self.note_address(tensor)
        if self.room.has_scratch and not address:
            return False, 0
        self._slots.agree(call)
        return True, self._common([True] * self.size)

    def _common(self, present: Sequence[bool]) -> int:
        """Return the place that all ranks have named, 0 if they differ."""
        named: list[int] = self._slots.words[:, 0].tolist()
        return named[0] if all(present) and named.count(named[0]) == self.size else 0

    def _common_address(self, own: Tensor, sizes: list[int]) -> int:
        # A block that fits into the payload lies there in place of its address.
        return self._common([size > PAYLOAD_BYTES for size in sizes])

    def begin_ordinary(self, call: Call) -> bool:
        """Agree on a call without a symmetric tensor, unless its first chunk can be copied in before that."""
        self._slots.own_words[0] = 0
        if self.room.has_scratch:
            return False
        self._slots.agree(call)
        return True

    def pipeline(self, call: Call, chunks: int, stages: Sequence[Stage], agreed: bool, chunk_bytes: int) -> None:
        """Run each chunk through the stages, a barrier between them; the first barrier agrees on the call.

        All ranks name the same number of chunks, and how large most of them are, `chunk_bytes`.
        """
        turns = self.room.turns()
        if agreed:
            turns.run(call, chunks, stages, 0, chunk_bytes)
            return
        if chunks:
            turns.put_first(stages[0])
        self._slots.agree(call)
        # If some ranks have a symmetric tensor, they have put nothing in yet: begin anew, with them.
        anew = any(self._slots.words[:, 0].tolist())
        turns.run(call, chunks, stages, 0 if anew or not chunks else 1, chunk_bytes)

    def pieces(self, flat: Tensor, address: int) -> list[Piece]:
        """Cut this rank's slice of a symmetric tensor into pieces; local."""
        key = (address, flat.dtype, flat.numel())
        pieces = self._cut_before.get(key)
        if pieces is None:
            pieces = self._cut(flat, address)
            held = sum(map(len, self._cut_before.values()))
            if held + len(pieces) > _MAX_PIECES or len(self._cut_before) >= _MAX_TENSORS:
                self._cut_before.clear()
            self._cut_before[key] = pieces
        return pieces

    def _cut(self, flat: Tensor, address: int) -> list[Piece]:
        itemsize = flat.element_size()
        low, high = slices_of(flat.nbytes, self.size, max(ALIGNMENT, itemsize))[self.rank]
        step = max(ALIGNMENT, min(PIECE_BYTES, self._limits.piece_bytes) // ALIGNMENT * ALIGNMENT)
        with torch.inference_mode(False):
            total = self._total[:step].view(flat.dtype)
            rows = self._arena.rows(address + low, high - low).view(flat.dtype)
            return (
                [Piece(part, total, self.rank) for part in rows.split(step // itemsize, dim=1)]
                if low < high
                else []
            )

    def _peers_of(self, tensor: Tensor, address: int) -> list[Tensor]:
        bytes_of = map(torch.from_numpy, self._arena.parts(address, tensor.nbytes))
        return [part.view(tensor.dtype).view(tensor.shape) for part in bytes_of]
