"""Memory that the ranks of a node have in common, and the two collectives on it.

A model's parameters exist once a node: all ranks read them, each updates its own part. Where a rank shares memory
with nobody, the same operations work on memory of its own.

    one node          all_gather_into    each rank puts its part in its place, if it is not there; a barrier
                      reduce_scatter_into  through scratch memory, in chunks that stay in the cache
    several nodes     all_gather_into    each part crosses to each other node once, into the memory in common
    no shared memory  both               MPI's
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...utils.memory import flat_zeros
from ..call import Call
from ..concat_view import FlatParts
from ..handshake import SlotExchange
from ..plain import PlainPaths
from ..reduction import reduce_wide_into
from .barrier import NodeBarrier
from .collectives import NodePaths
from .handshake import NodeSlots
from .segment import Arena, remedy
from .staging import ALIGNMENT, bounds_of, round_down

__all__ = ["Common", "NodeMemory", "OneNode", "OwnMemory"]


class NodeMemory(Protocol):
    """What a group can do with memory that the ranks of a node have in common."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group that have memory in common with this one, in order, this one among them."""

    def empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that those ranks have in common; collective, agreed already.

        Raises:
            MemoryError: There is not enough, on any rank.
        """

    def is_common(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in such memory; local."""

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks into the memory of each node; None: the own part is there; collective."""

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""


class OwnMemory:
    """For ranks that share no memory: each is a node to itself."""

    def __init__(self, slots: SlotExchange, paths: PlainPaths) -> None:
        self._slots = slots
        self._paths = paths

    @property
    def ranks(self) -> tuple[int, ...]:
        """This rank alone."""
        return (self._slots.rank,)

    def empty(self, nbytes: int) -> Tensor:
        """Return ordinary memory, [nbytes] uint8; local."""
        return flat_zeros(nbytes, torch.uint8)

    def is_common(self, tensor: Tensor) -> bool:
        """Any memory will do."""
        return True

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks one after the other; collective."""
        self._slots.agree(call)
        own = output.split(sizes)[self._slots.rank]
        if tensor is not None:
            own.copy_(tensor)
        if output.numel():
            self._paths.all_gather(call, own, sizes, output)

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        self._slots.agree(call)
        self._paths.reduce_slices(call, list(parts.flat(output.dtype).split(sizes)), output)


class Common:
    """Memory in common, from an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that the ranks of the node have in common; collective."""
        block = self._arena.allocate(nbytes, common=True)
        if isinstance(block, str):
            raise MemoryError(
                f"no {nbytes / 2**20:.0f} MiB could be shared with the other ranks of this node ({block}). "
                f"What helps: {remedy(block)}"
            )
        return self._arena.tensor(block, nbytes, common=True)

    def is_common(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in memory from `empty`; local."""
        return self._arena.is_common(tensor)


class OneNode(Common):
    """For groups that lie on one node."""

    def __init__(self, slots: NodeSlots, barrier: NodeBarrier, arena: Arena, paths: NodePaths) -> None:
        super().__init__(arena)
        self._slots = slots
        self._barrier = barrier
        self._paths = paths

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return tuple(range(self._slots.size))

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks in their places; a barrier if they are there; collective."""
        in_place = self._slots.agree(call, tensor is None)
        if tensor is not None:
            output.split(sizes)[self._slots.rank].copy_(tensor)
        if not all(in_place):
            self._barrier.wait(call)

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        op, dtype, rank = call.op, parts.dtype, self._slots.rank
        assert op is not None
        agreed = self._paths.begin_ordinary(call)
        scratch = self._paths.room.scratch()
        step = round_down(self._paths.room.chunk_bytes() // self._slots.size, max(ALIGNMENT, dtype.itemsize))
        count = step // dtype.itemsize
        bounds = bounds_of(sizes)

        def copy_in(chunk: int, place: int, before: int) -> None:
            target = scratch.inputs[place][rank]
            for slice_, (low, high) in enumerate(bounds):
                start, stop = low + chunk * count, min(low + (chunk + 1) * count, high)
                if start < stop:
                    parts.read(start, stop, target[slice_ * step :])

        def reduce(chunk: int, place: int, before: int) -> None:
            target = output[chunk * count : (chunk + 1) * count]
            if target.numel():
                low = rank * step
                views = scratch.input_views(before, low, low + target.numel() * dtype.itemsize, dtype)
                reduce_wide_into(views, op, target)

        chunks, chunk_bytes = -(-max(sizes) // count), min(max(sizes), count) * dtype.itemsize * len(sizes)
        self._paths.pipeline(call, chunks, (copy_in, reduce), agreed, chunk_bytes)
