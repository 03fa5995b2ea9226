"""Small reductions, which are complete with the agreement on their call.

    on one node      put into staging, agree (one barrier), each rank reduces the data of all
    between nodes    put into staging, barrier, local rank 0 reduces its node and the rounds add the nodes, barrier

A compiled path for small messages would have to provide these calls, and the ways of `all_reduce` and
`reduce_scatter` for small data use no others:

    ReductionOnNode.run          agree and reduce on one node
    ReductionBetweenNodes.run    agree and reduce between nodes
    NodeBarrier.wait             wait for the other ranks of the node
    RequestWaiter.wait           wait for messages from other nodes

Views of tensors are made once, and found again by the tensor's address: ranks that outnumber the cores wait for
each other's Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ..buffers import bytes_of
from ..call import Call
from ..reduction import choose_reduction, finish, fold, fold_rows, is_plain_sum
from .chunks import views_of
from .connection import Connection
from .rounds import Gathered, Payload, Summed
from .topology import Bytes


class _Small:
    """Buffers in staging for small reductions of one dtype, shape and operation.

    Args:
        ranks: The group.
        call: The call.
    """

    def __init__(self, ranks: Connection, call: Call) -> None:
        self._call, self._dtype, self._op, self._size = call, call.dtype, call.op, ranks.topology.size
        self._barrier, self._agree = ranks.barrier, ranks.agreement.agree
        self._local, buffers = ranks.topology.local_rank, ranks.staging.buffers
        self._own = [of_all[self._local][: call.nbytes] for of_all in buffers]
        rows = [views_of(of_all, 0, call.nbytes, call.dtype) for of_all in buffers]
        self._parts = [[part.view(call.shape) for part in parts] for parts in rows]
        self._sources: BoundedCache[int, Bytes] = BoundedCache(256)

    def _put(self, tensor: Tensor) -> int:
        """Copy contiguous data into the own buffer, and return its index; local."""
        index = self._barrier.count % len(self._own)
        pointer = tensor.data_ptr()
        source = self._sources.get(pointer)
        if source is None:
            source = self._sources.add(pointer, bytes_of(tensor))
        self._own[index][...] = source
        return index


class ReductionOnNode(_Small):
    """Small reductions of one dtype, shape, operation and root on one node."""

    def __init__(self, ranks: Connection, call: Call) -> None:
        super().__init__(ranks, call)
        self._reduce = choose_reduction(self._dtype, self._op, self._size).run
        self._adds = self._size == 2 and is_plain_sum(self._dtype, self._op)
        self._gets_result = call.root in (None, ranks.topology.rank)

    def run(self, tensor: Tensor) -> bool:
        """Agree, and reduce contiguous data onto the root or all ranks, in place there; collective.

        Returns:
            False if the tensors of other ranks are symmetric: nothing was reduced then.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        index = self._put(tensor)
        if not self._agree(self._call)[2]:
            return False
        parts = self._parts[index]
        if not self._gets_result:
            pass
        elif not self._adds:
            self._reduce(parts, tensor)
        elif self._local == 0:  # the own part of a sum of two is in the tensor already
            tensor.add_(parts[1])
        else:  # the order of rank 0: a sum of two NaN has the bits of the first
            torch.add(parts[0], tensor, out=tensor)
        return True


class ReductionBetweenNodes(_Small):
    """Small reductions of one dtype, shape and operation between nodes; the `Cargo` of their agreement.

    Args:
        ranks: The group.
        call: The call.
        returned: The dim, start and length of the slice of the result that `run` returns; None for the full result.
    """

    def __init__(self, ranks: Connection, call: Call, returned: tuple[int, int, int] | None = None) -> None:
        assert ranks.rounds is not None
        super().__init__(ranks, call)
        self._rounds, self._is_apart, self._ordered = ranks.rounds, ranks.is_apart, ranks.ordered
        self._summed = Summed(ranks.rounds, call)
        self._gathered: Gathered | None = None
        self._total = self._summed.total.view(call.shape)
        self._results = [self._total]  # of a rank alone on its node
        if not ranks.is_apart:
            nbytes, wide = self._total.nbytes, self._total.dtype
            firsts = [views_of(of_all[:1], 0, nbytes, wide)[0] for of_all in ranks.staging.buffers]
            self._results = [first.view(call.shape) for first in firsts]
        self._returned = self._results if returned is None else [full.narrow(*returned) for full in self._results]

    def run(self, tensor: Tensor) -> Tensor:
        """Agree, and return the reduction of contiguous data, or its slice, in `wide_dtype`; collective.

        Returns:
            The result on every rank, whatever the call's root; valid until the next collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """
        if self._is_apart:
            self._total.copy_(tensor)
        else:
            self._put(tensor)
        self._agree(self._call, 0, 0, self)
        return self._returned[(self._barrier.count - 1) % len(self._returned)]

    def load(self) -> Payload:
        """Reduce the data of this node."""
        if not self._is_apart:
            fold(self._parts[(self._barrier.count - 1) % len(self._parts)], self._op, self._total)
        if not self._ordered:
            return self._summed
        self._gathered = Gathered(self._rounds, self._total.nbytes)
        self._gathered.rows[self._rounds.index] = bytes_of(self._total)
        return self._gathered

    def unload(self) -> None:
        """Show the result to this node."""
        if self._gathered is not None:
            total = self._summed.total
            rows = torch.from_numpy(self._gathered.rows.reshape(-1)).view(total.dtype)
            fold_rows(rows.view(self._rounds.count, -1), self._op, total)
        finish(self._total, self._op, self._size, self._results[self._barrier.count % len(self._results)])
