"""Collectives through memory that the ranks of one node share.

A symmetric tensor lies at the same offset in each rank's region, so nothing is copied: each rank reads the memory
of all and writes the result where it is wanted. An ordinary tensor goes through staging, in chunks that stay in the
cache. `all_reduce` has the reductions onto one rank and all; this file has the rest, and what groups on several
nodes share with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.cache import BoundedCache
from ...utils.partition import split_range
from ..buffers import as_bytes, empty
from ..call import Call
from ..concat_view import FlatParts
from ..connection import Connection, target_of
from ..handshake import PAYLOAD_BYTES, Words
from ..reduction import reduce_in_rank_order, reduce_wide_into
from ..tuning import MAX_PLANS, SLICE_BYTES
from .all_reduce import NodeMemory, NodeReduction
from .arena import Arena
from .barrier import NodeBarrier
from .chunk_pipeline import Stage, run_stages
from .staging import ALIGNMENT, bounds_of, round_down

__all__ = ["NodeConnection", "SharedConnection"]


class SharedConnection(Connection):
    """What connections have in common where the ranks of a node share memory.

    Args:
        rank: This rank's number in the group.
        size: How many ranks there are.
        barrier: The barrier of this node's ranks.
        arena: Their memory.
        release: Called by `free`, in order.
    """

    def __init__(
        self, rank: int, size: int, barrier: NodeBarrier, arena: Arena, release: Sequence[Callable[[], None]]
    ) -> None:
        super().__init__(rank, size)
        self._barrier = barrier
        self._arena = arena
        self._release = release

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 of shared memory, ordinary memory where there is not enough; collective."""
        return self._arena.symmetric(nbytes)

    def node_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that the ranks of the node have in common; collective. See `Connection`."""
        return self._arena.common(nbytes)

    def is_common(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in memory of `node_empty`; local."""
        return self._arena.is_common(tensor)

    def check_node(self, what: str) -> None:
        """Raise if the process of another rank of this node has ended; local."""
        self._barrier.check_alive(what)

    def set_timeout(self, timeout: float | None) -> None:
        """Change after how many seconds a rank gives up waiting for those of its node; local."""
        self._barrier.timeout = timeout

    def mark_failed(self, reason: str) -> None:
        """Tell ranks of this node that wait for this one that it does not come any more; local."""
        self._barrier.mark_failed(reason)

    def free(self) -> None:
        """Release the shared memory, not waiting for Python's garbage; tensors on it keep theirs; collective."""
        for release in (self._arena.close, *self._release):
            release()


class NodeConnection(SharedConnection):
    """Moves data between the ranks of a group that lies on one node.

    Args:
        memory: What they share.
        release: Called by `free`, in order.
    """

    path = "node"

    def __init__(self, memory: NodeMemory, *, release: Sequence[Callable[[], None]] = ()) -> None:
        handshake = memory.handshake
        super().__init__(handshake.rank, handshake.size, memory.barrier, memory.arena, release)
        self._memory = memory
        self._handshake = handshake
        self._staging = memory.staging
        self._reductions: BoundedCache[int, NodeReduction] = BoundedCache(MAX_PLANS)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(range(self.size))

    def free(self) -> None:
        """Release the shared memory; see `SharedConnection`."""
        self._reductions.clear()
        self._memory.views.clear()
        del self._memory, self._staging
        super().free()

    # ---- agreement ------------------------------------------------------------------------------------------

    def agree(self, call: Call) -> None:
        """Return once all ranks have made this call; collective."""
        self._handshake.agree(call)

    def sizes(self, call: Call, own: int) -> list[int]:
        """Agree on a call and return a number of each rank; collective."""
        return self._handshake.agree(call, own)

    def words_of_root(self, call: Call, words: Words | None) -> Words:
        """Agree on a call and return 14 integers that its root has; collective."""
        assert call.root is not None
        if words is not None:
            self._handshake.own_words[:] = words
        self._handshake.agree(call)
        found: Words = self._handshake.words[call.root]
        return found

    # ---- reductions ---------------------------------------------------------------------------------------

    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective."""
        reduction = self._reductions.get(call.key)
        if reduction is None:
            reduction = self._reductions.add(call.key, NodeReduction(self._memory, call))
        reduction.run(tensor)

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor and return the own slice along `dim`; collective."""
        assert call.op is not None
        agreed, address = self._begin(call, tensor)
        shape = list(tensor.shape)
        start, stop = split_range(shape[dim], self.size, self.rank)
        shape[dim] = stop - start
        result = empty(shape, tensor.dtype)
        if address:
            memory = map(torch.from_numpy, self._arena.parts(address, tensor.nbytes))
            tensors = [part.view(tensor.dtype).view(tensor.shape) for part in memory]
            _reduce_in_pieces([part.tensor_split(self.size, dim)[self.rank] for part in tensors], call.op, result)
            self._barrier.wait(call)
        else:
            slices = tensor.tensor_split(self.size, dim)
            sizes = [part.numel() for part in slices]
            self._reduce_parts(call, FlatParts(slices, tensor.dtype), result.view(-1), sizes, agreed=agreed)
        return result

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        self._handshake.own_words[0] = 0
        self._reduce_parts(call, parts, output, sizes, agreed=False)

    def _reduce_parts(
        self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int], *, agreed: bool
    ) -> None:
        op, dtype, rank, staging = call.op, parts.dtype, self.rank, self._staging
        assert op is not None
        step = round_down(self._memory.chunk_bytes() // self.size, max(ALIGNMENT, dtype.itemsize))
        count = step // dtype.itemsize
        bounds = bounds_of(sizes)
        own = _apart(parts.view(*bounds[rank]), output)
        slices = [(slice_, *bounds[slice_]) for slice_ in range(self.size) if slice_ != rank or own is None]

        def copy_in(chunk: int, index: int, before: int) -> None:
            target = staging.buffers[index][rank]
            for slice_, low, high in slices:
                start, stop = low + chunk * count, min(low + (chunk + 1) * count, high)
                if start < stop:
                    parts.read(start, stop, target[slice_ * step :])

        def reduce(chunk: int, index: int, before: int) -> None:
            target = output[chunk * count : (chunk + 1) * count]
            if target.numel():
                low = rank * step
                views = [*staging.views(before, low, low + target.numel() * dtype.itemsize, dtype)]
                if own is not None:
                    views[rank] = own[chunk * count : (chunk + 1) * count]
                reduce_wide_into(views, op, target)

        self._pipeline(call, -(-max(sizes) // count), (copy_in, reduce), agreed=agreed)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        root, is_root = call.root, self.rank == call.root
        if call.nbytes <= PAYLOAD_BYTES:
            own, parts = self._handshake.views(call)
            own.view(-1).copy_(flat)
            self._handshake.agree(call)
            if not is_root:
                flat.copy_(parts[root].view(-1))
            return
        agreed, address = self._begin(call, flat)
        data = as_bytes(flat).numpy()
        if address:
            if not is_root:
                data[...] = self._arena.parts(address, data.nbytes)[root]
            self._barrier.wait(call)
            return
        buffers, size = self._staging.buffers, self._memory.chunk_bytes()

        def copy_in(chunk: int, index: int, before: int) -> None:
            if is_root:
                part = data[chunk * size : (chunk + 1) * size]
                buffers[index][root][: part.nbytes] = part

        def copy_out(chunk: int, index: int, before: int) -> None:
            if not is_root:
                part = data[chunk * size : (chunk + 1) * size]
                part[...] = buffers[before][root][: part.nbytes]

        self._pipeline(call, -(-data.nbytes // size), (copy_in, copy_out), agreed=agreed)

    def all_gather(self, call: Call, own: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the blocks of all ranks, one after the other along dim 0; collective. See `Connection`."""
        if own.nbytes <= PAYLOAD_BYTES:
            self._handshake.own_payload[: own.nbytes].copy_(as_bytes(own))
        else:
            self._publish_address(own)
        rows = self._handshake.agree(call, own.shape[0])
        result = target_of(output, sum(rows), own)
        counts = [count * result[:1].nbytes for count in rows]
        if max(counts) <= PAYLOAD_BYTES:
            for payload, block in zip(self._handshake.payloads, as_bytes(result).split(counts), strict=True):
                block.copy_(payload[: block.numel()])
        else:
            self._gather(call, own, rows, result)
        return result

    def _gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        target = as_bytes(result).numpy()
        sizes = [count * (result.nbytes // sum(rows)) for count in rows]
        bounds = bounds_of(sizes)
        low, high = bounds[self.rank]
        source = as_bytes(own).numpy() if own.numel() else target[:0]
        if result.data_ptr() + low != own.data_ptr():  # FSDP2 of torch has put it there
            target[low:high] = source
        # A block that fits into the payload lies there in place of its address.
        address = self._common_address() if min(sizes) > PAYLOAD_BYTES else 0
        if address:
            for rank, (low, high) in enumerate(bounds):
                if rank != self.rank:
                    target[low:high] = self._arena.parts(address, high - low)[rank]
            self._barrier.wait(call)
            return
        buffers, size = self._staging.buffers, self._memory.chunk_bytes()

        def copy_in(chunk: int, index: int, before: int) -> None:
            part = source[chunk * size : (chunk + 1) * size]
            buffers[index][self.rank][: part.nbytes] = part

        def copy_out(chunk: int, index: int, before: int) -> None:
            for rank, (low, high) in enumerate(bounds):
                part = target[low:high][chunk * size : (chunk + 1) * size]
                if rank != self.rank:
                    part[...] = buffers[before][rank][: part.nbytes]

        self._pipeline(call, -(-max(sizes) // size), (copy_in, copy_out), agreed=True)

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks where they belong; a barrier if they are there; collective."""
        in_place = self._handshake.agree(call, tensor is None)
        if tensor is not None:
            output.split(sizes)[self.rank].copy_(tensor)
        if not all(in_place):
            self._barrier.wait(call)

    # ---- common to them -----------------------------------------------------------------------------------

    def _publish_address(self, tensor: Tensor) -> None:
        """Name a tensor's address in the own message, 0 if it is not symmetric; local."""
        self._handshake.own_words[0] = self._arena.address(tensor)

    def _begin(self, call: Call, tensor: Tensor) -> tuple[bool, int]:
        """Agree on the call if the tensor is symmetric; others are copied in before; collective in that case.

        Returns:
            Whether the ranks have agreed, and the tensor's address if it is symmetric on all of them, else 0.
        """
        self._publish_address(tensor)
        if not self._handshake.own_words[0]:
            return False, 0
        self._handshake.agree(call)
        return True, self._common_address()

    def _common_address(self) -> int:
        """Return the address that all ranks have named, 0 if they differ; local."""
        named: list[int] = self._handshake.words[:, 0].tolist()
        return named[0] if named.count(named[0]) == self.size else 0

    def _pipeline(self, call: Call, chunks: int, stages: Sequence[Stage], *, agreed: bool) -> None:
        """Run chunks through the stages; the first barrier agrees on the call if need be; collective."""
        barrier, count = self._barrier, self._staging.count
        first = 0
        if not agreed:
            if chunks:
                stages[0](0, barrier.count % count, 0)
            self._handshake.agree(call)
            # If some ranks have a symmetric tensor, they have put nothing in: begin anew, with them.
            first = 1 if chunks and not self._handshake.words[:, 0].any() else 0
        run_stages(barrier, count, call, chunks, stages, first)


def _apart(tensor: Tensor | None, output: Tensor) -> Tensor | None:
    """Return a contiguous tensor unless it shares memory with a contiguous output; local."""
    if tensor is None:
        return None
    first, second = tensor.data_ptr(), output.data_ptr()
    return tensor if first + tensor.nbytes <= second or second + output.nbytes <= first else None


def _reduce_in_pieces(parts: list[Tensor], op: ReduceOp, result: Tensor) -> None:
    """Reduce tensors of any strides, a piece that fits into the cache at a time; local."""
    if not result.numel():
        return
    if result.is_contiguous() and all(part.is_contiguous() for part in parts):
        parts, result = [part.view(-1) for part in parts], result.view(-1)
    rows = max(1, SLICE_BYTES * result.shape[0] // result.nbytes)
    for at in range(0, result.shape[0], rows):
        reduce_in_rank_order([part[at : at + rows] for part in parts], op, result[at : at + rows])
