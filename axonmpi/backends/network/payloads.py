"""Data that travels with an agreement: a sum, blocks that all get, or a copy of one peer's.

Summed      each round adds what the two have: the same tree of sums on all peers
Gathered    each round swaps the blocks that the two have
Copied      each round passes the data on to a peer that does not have it
"""

from __future__ import annotations

import numpy as np
import torch

from ...types import ReduceOp
from ..call import Call
from ..reduction import choose_reduction, wide_dtype
from ..shared.staging import Bytes
from .agreement import FIRST, LAST, Agreement

__all__ = ["Copied", "Gathered", "Summed"]


class Summed:
    """A reduction of one dtype, shape and operation.

    Attributes:
        total: This node's part, and then the reduction of all; in the dtype that sums are taken in.
        op: The reduction, a sum for an average.
    """

    def __init__(self, agreement: Agreement, call: Call) -> None:
        assert call.dtype is not None
        assert call.op is not None
        wide = wide_dtype(call.dtype)
        self._nbytes = call.numel * wide.itemsize
        with torch.inference_mode(False):
            self.total, self._other = (
                torch.from_numpy(memory[: self._nbytes]).view(wide).view(call.shape)
                for memory in (agreement.outgoing, agreement.incoming)
            )
        self.op = _without_average(call.op)
        self._reduce = choose_reduction(wide, self.op, 2).run
        self._lower_first = [self._other, self.total]
        self._higher_last = [self.total, self._other]

    def send(self, step: int) -> int:
        """Send the sum so far."""
        return self._nbytes

    def take(self, step: int, *, is_lower: bool) -> None:
        """Add the other's sum, the lower index first."""
        if step == LAST:
            self.total.copy_(self._other)
        else:
            self._reduce(self._lower_first if is_lower else self._higher_last, self.total)


def _without_average(op: ReduceOp) -> ReduceOp:
    """Return what is done before an average is divided."""
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


class Gathered:
    """Blocks of one size, one of each peer.

    Attributes:
        rows: [peers, nbytes] the blocks; this peer's is there before.
    """

    def __init__(self, agreement: Agreement, nbytes: int) -> None:
        self.rows = np.empty((agreement.count, nbytes), np.uint8)
        index, hosts = agreement.index, agreement.hosts
        others = {1 << number: index ^ 1 << number for number in range(hosts.bit_length() - 1)}
        others |= {FIRST: index + hosts, LAST: index - hosts}
        self._out = {step: _beside(self._known_to(index, step), agreement.outgoing) for step in others}
        self._in = {step: _beside(self._known_to(peer, step), agreement.incoming) for step, peer in others.items()}

    def _known_to(self, index: int, step: int) -> Bytes:
        """Return the blocks that a peer has before a step: after the rounds, those at multiples of a distance."""
        if step == FIRST:
            return self.rows[index : index + 1]
        return self.rows if step == LAST else self.rows[index % (2 * step) :: 2 * step]

    def send(self, step: int) -> int:
        """Send all blocks that are here."""
        rows, outgoing = self._out[step]
        outgoing[...] = rows
        return rows.size

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take those that the other has."""
        rows, incoming = self._in[step]
        rows[...] = incoming


def _beside(rows: Bytes, memory: Bytes) -> tuple[Bytes, Bytes]:
    """Return rows, and memory of their shape; local."""
    return rows, memory[: rows.size].reshape(rows.shape)


class Copied:
    """One peer's data, which lies in `Agreement.outgoing` there before, and on all peers after.

    Args:
        agreement: The exchange.
        nbytes: Bytes of the data.
        source: The peer that has it.
    """

    def __init__(self, agreement: Agreement, nbytes: int, source: int) -> None:
        self._agreement, self._nbytes, self._source = agreement, nbytes, source
        self._is_here = agreement.index == source

    def send(self, step: int) -> int:
        """Send the data if it is here: then the other does not have it."""
        return self._nbytes if self._is_here else 0

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take the data if the other has it."""
        if not self._is_here and self._other_has(step):
            self._is_here = True
            self._agreement.outgoing[: self._nbytes] = self._agreement.incoming[: self._nbytes]

    def _other_has(self, step: int) -> bool:
        """Say whether the peer has the data before a step: in rounds, those at multiples of twice the distance."""
        index, hosts = self._agreement.index, self._agreement.hosts
        if step == FIRST:
            return index + hosts == self._source
        return step == LAST or ((index ^ step) - self._source % hosts) % (2 * step) == 0
