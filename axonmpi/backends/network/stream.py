"""Reducing memory that the ranks of each node share, over several nodes.

A lane needs no other rank of its node for this: it reads the parts of all of them where they lie, and writes the
result to all of them. So it goes through its slice at its own pace, a piece at a time, and the ranks of a node meet
once, at the end:

    first node      add ──▶ send ──▶ send ──▶ ...           as far ahead as memory for messages goes
    node after it   receive, add ──▶ send on ...
    last node       receive, add = result ──▶ send back, write to all ranks here
    the others      receive a result ──▶ send back, write to all ranks here

It is done in steps, so that the pieces of the next reduction are on their way before the last of this one are back:
the network is never idle between them, and whoever communicates can sleep longer between two looks at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.waiting import Steps
from ..reduction import wide_dtype
from .chain import reduce_terms
from .channels import FIRST_STREAM, STREAM_TAGS, Inbox, Lane, Message, Nodes

__all__ = ["Portion", "Stream", "cut_rows"]

_AHEAD = 16
_NUMBERS = 1024


class Portion:
    """A piece of what a lane reduces, over the memory of all ranks of its node.

    Args:
        rows: [ranks of the node, elements] the piece.

    Attributes:
        rows: The same.
        parts: [ranks of the node] tensors of [elements].
    """

    __slots__ = ("parts", "rows")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.parts = rows.unbind(0)


def cut_rows(rows: Tensor, bounds: Sequence[tuple[int, int]]) -> list[Portion]:
    """Make the portions of memory in [ranks of the node, elements], which begin and end at `bounds`; local."""
    with torch.inference_mode(False):
        return [Portion(rows[:, low:high]) for low, high in bounds if low < high]


class Stream:
    """One lane's part of a reduction.

    Args:
        nodes: Where the group's ranks are.
        lane: Messages to the other nodes.
        portions: What to reduce; of the same sizes on all nodes.
        dtype: Its dtype.
        op: The reduction.
        number: Which of the group's reductions this is: messages of two of them never mix.
    """

    def __init__(
        self,
        nodes: Nodes,
        lane: Lane,
        portions: Sequence[Portion],
        dtype: torch.dtype,
        op: ReduceOp,
        number: int,
    ) -> None:
        self._lane, self._portions, self._op = lane, portions, op
        self._own, self._ranks = nodes.own, sum(map(len, nodes.of))
        self._dtype, self._wide = dtype, wide_dtype(dtype)
        self._tag = FIRST_STREAM + STREAM_TAGS * (number % _NUMBERS)
        counts = [portion.rows.shape[1] for portion in portions]
        self._sums = self._results = None
        if self._own:
            self._sums = Inbox(lane, self._own - 1, self._tag, [count * self._wide.itemsize for count in counts])
        if self._own < len(nodes.of) - 1:
            sizes = [count * dtype.itemsize for count in counts]
            self._results = Inbox(lane, self._own + 1, self._tag + 1, sizes)
        self._sent: deque[Any] = deque()

    def run(self) -> Steps[None]:
        """Reduce all portions, in steps."""
        portions, sums, results = self._portions, self._sums, self._results
        count, added, finished = len(portions), 0, 0
        while finished < count:
            moved = False
            if added < count and added - finished < _AHEAD and (sums is None or sums.is_ready()):
                self._add(portions[added])
                added, moved = added + 1, True
            if results is None:
                finished = added
            elif finished < added and results.is_ready():
                self._hand_out(results.take(), portions[finished])
                finished, moved = finished + 1, True
            yield moved
        while self._sent:
            if self._sent[0].Test():
                self._sent.popleft()
            else:
                yield False

    def _add(self, portion: Portion) -> None:
        """Add this node's parts to the sum so far, and send it on; the last node has the result."""
        lane, op, count = self._lane, self._op, portion.rows.shape[1]
        message = lane.message(count * self._wide.itemsize)
        total = message.view(self._wide)
        if self._sums is None:
            reduce_terms(portion.parts, op, total)
        else:
            before = self._sums.take()
            reduce_terms([before.view(self._wide), *portion.parts], op, total)
            lane.give_back(before)
        if self._results is not None:
            self._sent.append(lane.send(message, self._own + 1, self._tag).request)
            return
        if op is ReduceOp.AVERAGE:
            total.div_(self._ranks)
        if self._wide != self._dtype:
            narrow = lane.message(count * self._dtype.itemsize)
            narrow.view(self._dtype).copy_(total)
            lane.give_back(message)
            message = narrow
        self._hand_out(message, portion)

    def _hand_out(self, message: Message, portion: Portion) -> None:
        """Send a result back, and write it to all ranks of this node."""
        if self._own:
            self._sent.append(self._lane.send(message, self._own - 1, self._tag + 1).request)  # it is only read
        portion.rows.copy_(message.view(self._dtype))
        if not self._own:
            self._lane.give_back(message)
