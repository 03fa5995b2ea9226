"""What one lane does for a collective between nodes.

    Chain      a reduction: sums go up the chain of nodes, results come back down
    Relay      a broadcast: from the root's node both ways along the chain
    Exchange   an all-gather: each node's blocks to all others

Each takes a chunk of data out of the memory that a node's ranks share, or puts one there, and passes it on to
another node. `collectives` cuts the chunks, gives each its turn, and lets the ranks of a node meet between
turns. A rank without a lane takes part in the turns and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...types import ReduceOp
from ..reduction import reduce_in_rank_order, wide_dtype
from ..shared.staging import Bytes, Staging
from .channels import COPIES, RESULTS, SUMS, Inbox, Lane, Nodes, wait_gently

__all__ = ["Chain", "Exchange", "Relay", "nothing", "reduce_terms"]

_TURNS_PER_NODE = 4


def nothing(chunk: int, index: int, before: int) -> None:
    """Do nothing: a turn in which a chunk is on its way; local."""


class Chain:
    """One reduction along the chain of nodes, as one lane sees it; ranks without a lane do nothing.

    Args:
        nodes: Where the group's ranks are.
        lane: Messages to the other nodes.
        inputs: Where the node's ranks put their data in.
        outputs: Where they take the result.
        chunks: Start and stop of each chunk, and the slice of it that each lane carries, in bytes.
        dtype: Of the data.
        op: The reduction.

    Attributes:
        stages_after: The turns of a chunk between `add` and the one in which its result is there for all.
    """

    def __init__(
        self,
        nodes: Nodes,
        lane: Lane | None,
        inputs: Staging,
        outputs: Staging,
        chunks: list[tuple[int, int, list[tuple[int, int]]]],
        dtype: torch.dtype,
        op: ReduceOp,
    ) -> None:
        self._lane = lane
        self._inputs, self._outputs = inputs, outputs
        self._chunks, self._dtype, self._op = chunks, dtype, op
        self._place, self._node, self._last = nodes.place, nodes.own, len(nodes.of) - 1
        self._ranks = sum(map(len, nodes.of))
        self._wide = wide_dtype(dtype)
        # Sums go on to be sent while the first results are on their way back.
        away = self._last - self._node
        self.stages_after = [*([nothing] * (_TURNS_PER_NODE * away)), self.finish] if away else []
        self._sums = self._results = None
        if self._lane is not None:
            sizes = [high - low for low, high in (slices[self._place] for _, _, slices in chunks) if low < high]
            scale = self._wide.itemsize // dtype.itemsize
            if self._node:
                self._sums = Inbox(self._lane, self._node - 1, SUMS, [size * scale for size in sizes])
            if self._node < self._last:
                self._results = Inbox(self._lane, self._node + 1, RESULTS, sizes)

    def add(self, chunk: int, index: int, before: int) -> None:
        """Add this node's part of a chunk to the sum, and send it on; the last node has the result."""
        low, high = self._bounds(chunk)
        if self._lane is None or low == high:
            return
        parts = self._inputs.views(before, low, high, self._dtype)
        message = self._sums.take() if self._sums is not None else None
        count = (high - low) // self._dtype.itemsize
        total = self._lane.message(count * self._wide.itemsize)
        wide = total.view(self._wide)
        terms = parts if message is None else [message.view(self._wide), *parts]
        reduce_terms(terms, self._op, wide)
        if message is not None:
            self._lane.give_back(message)
        if self._node < self._last:
            self._lane.send(total, self._node + 1, SUMS)
            return
        if self._op is ReduceOp.AVERAGE:
            wide.div_(self._ranks)
        result = self._outputs.views(index, low, high, self._dtype)[self._place]
        result.copy_(wide)
        self._lane.give_back(total)
        self._pass_back(result)

    def finish(self, chunk: int, index: int, before: int) -> None:
        """Receive the result of a chunk, and send it on."""
        low, high = self._bounds(chunk)
        if self._results is None or self._lane is None or low == high:
            return
        message = self._results.take()
        result = self._outputs.views(index, low, high, self._dtype)[self._place]
        result.copy_(message.view(self._dtype))
        self._lane.give_back(message)
        self._pass_back(result)

    def _pass_back(self, result: Tensor) -> None:
        if self._node and self._lane is not None:
            copy = self._lane.message(result.nbytes)
            copy.view(result.dtype).copy_(result)
            self._lane.send(copy, self._node - 1, RESULTS)

    def end(self) -> None:
        """Wait until everything is sent."""
        if self._lane is not None:
            self._lane.flush()

    def _bounds(self, chunk: int) -> tuple[int, int]:
        return self._chunks[chunk][2][self._place] if self._lane is not None else (0, 0)


def reduce_terms(terms: Sequence[Tensor], op: ReduceOp, total: Tensor) -> None:
    """Reduce terms, the first perhaps a sum in a wider dtype already; an average is not divided yet; local."""
    op = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    wide = [term if term.dtype == total.dtype else term.to(total.dtype) for term in terms]
    reduce_in_rank_order(wide, op, total)


class Relay:
    """One broadcast along the chain of nodes, away from the root's, as one lane sees it.

    Args:
        nodes: Where the group's ranks are.
        lane: Messages to the other nodes.
        root_node: The node that has the data.
        sizes: Bytes of the lane's slice of each chunk.
    """

    def __init__(self, nodes: Nodes, lane: Lane | None, root_node: int, sizes: Sequence[int]) -> None:
        self._lane = lane
        own, last = nodes.own, len(nodes.of) - 1
        self._onward = [
            *([own - 1] if own <= root_node and own > 0 else []),
            *([own + 1] if own >= root_node and own < last else []),
        ]
        self._inbox = None
        if self._lane is not None and own != root_node:
            before = own + 1 if own < root_node else own - 1
            self._inbox = Inbox(self._lane, before, COPIES, [size for size in sizes if size])

    def run(self, source: Bytes | None, target: Bytes) -> None:
        """Get a slice from the own node's memory, or from the node before, and send it on."""
        assert self._lane is not None
        if self._inbox is not None:
            message = self._inbox.take()
            target[...] = message.view(torch.uint8).numpy()
            self._lane.give_back(message)
        elif source is not None:
            target[...] = source
        for node in self._onward:
            copy = self._lane.message(target.nbytes)
            copy.view(torch.uint8).numpy()[...] = target
            self._lane.send(copy, node, COPIES)

    def end(self) -> None:
        """Wait until everything is sent."""
        if self._lane is not None:
            self._lane.flush()


class Exchange:
    """One all-gather between nodes, as one lane sees it: its node's blocks to all other nodes, theirs here.

    Args:
        nodes: Where the group's ranks are.
        lane: Messages to the other nodes.
        carried: The ranks whose blocks the lane carries, in the order in which they lie in its buffer.
        bounds: Where each rank's block begins and ends, in bytes.
        size: Bytes of each block that go with a chunk.
    """

    def __init__(
        self, nodes: Nodes, lane: Lane | None, carried: list[int], bounds: list[tuple[int, int]], size: int
    ) -> None:
        self._lane, self._nodes = lane, nodes
        self._carried, self._bounds, self._size = carried, bounds, size
        self._home = {rank: nodes.find(rank) for rank in carried}

    def run(self, chunk: int, inputs: list[Bytes], output: Bytes) -> None:
        """Exchange one chunk of each block."""
        assert self._lane is not None
        arriving = []
        for position, rank in enumerate(self._carried):
            node, place = self._home[rank]
            count = self._count(rank, chunk)
            low = position * self._size
            if not count:
                continue
            if node == self._nodes.own:
                output[low : low + count] = inputs[place][:count]
                for other in range(len(self._nodes.of)):
                    if other != node:
                        copy = self._lane.message(count)
                        copy.view(torch.uint8).numpy()[...] = inputs[place][:count]
                        self._lane.send(copy, other, COPIES + 1 + place)
            else:
                arriving.append((output[low : low + count], self._lane.receive(count, node, COPIES + 1 + place)))
        for target, message in arriving:
            wait_gently(message.request)
            target[...] = message.view(torch.uint8).numpy()
            self._lane.give_back(message)
        self._lane.flush()

    def _count(self, rank: int, chunk: int) -> int:
        first, last = self._bounds[rank]
        return int(np.clip(last - first - chunk * self._size, 0, self._size))
