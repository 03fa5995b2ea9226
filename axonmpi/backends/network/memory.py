"""Memory that the ranks of each node have in common, where a group lies on several nodes."""

from __future__ import annotations

from torch import Tensor

from ..call import Call
from ..concat_view import FlatParts
from ..handshake import SlotExchange
from ..shared.barrier import NodeBarrier
from ..shared.node_memory import Common
from ..shared.segment import Arena
from .collectives import TwoLevelPaths

__all__ = ["SeveralNodes"]


class SeveralNodes(Common):
    """For groups that lie on several nodes."""

    def __init__(self, slots: SlotExchange, barrier: NodeBarrier, arena: Arena, paths: TwoLevelPaths) -> None:
        super().__init__(arena)
        self._slots = slots
        self._barrier = barrier
        self._paths = paths

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self._paths.nodes.of[self._paths.nodes.own]

    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks in their places on every node; collective."""
        self._slots.agree(call)
        own = output.split(sizes)[self._slots.rank]
        if tensor is not None:
            own.copy_(tensor)
        if output.numel():
            self._paths.all_gather(call, own, sizes, output, common=True)
        self._barrier.wait(call)

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        self._slots.agree(call)
        self._paths.reduce_slices(call, parts.flat(output.dtype), sizes, output)
