"""An ordered set of ranks, with every collective as a method.

A group numbers its ranks from 0 and calls its backend, whose methods document shapes and errors. Short forms
(`all_reduce_mean`, `broadcast_from`, ...) are at the end; the functions of `comm` call methods of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..backends import (
    Backend,
    MockBackend,
    all_gather_object,
    all_reduce_coalesced,
    broadcast_object,
    check_different,
    check_rank,
    check_ranks,
    integer_array,
)
from ..types import ReduceOp, Work
from ..utils.arguments import integer
from ..utils.text import listed


class ProcessGroup:
    """An ordered set of ranks that communicate; the ranks inside are numbered from 0.

    Args:
        backend: The communicator, closed with the group; None on ranks outside the group.
        ranks: The members' numbers in the world, in order; None means 0 up to the backend's size.
        own_rank: This rank's number in the world; required on ranks outside.

    Attributes:
        rank: This rank's number in the group; -1 outside it.
        size: Number of ranks of the group, also named `world_size`.
        ranks: The members' numbers in the world, in the group's order.
        members: [size] `ranks` as an array, not to be changed.

    Raises:
        TypeError: `backend` is no `Backend`, or `ranks` has something else than integers.
        ValueError: `ranks` has a number twice, or its length is not the backend's size.
    """

    def __init__(
        self, backend: Backend | None, ranks: Iterable[int] | None = None, *, own_rank: int | None = None
    ) -> None:
        if backend is not None and not isinstance(backend, Backend):
            raise TypeError(
                f"backend: expected an axonmpi.Backend, got {type(backend).__name__}; world.new_group(ranks) makes "
                "a group of some ranks"
            )
        if backend is None and (ranks is None or own_rank is None):
            raise ValueError("a group without a backend needs its ranks and the own rank")
        self.members = _checked_members(ranks, backend)
        if backend is not None:
            self.backend = backend
        self.rank = -1 if backend is None else backend.rank
        self.size = self.world_size = len(self.members)
        self._own_rank = own_rank
        self._private: dict[bytes, Backend | None] = {}
        self._before_close: list[Callable[[], object]] = []

    @classmethod
    def mock(cls) -> ProcessGroup:
        """Make a group of one rank that needs no MPI; local."""
        return cls(MockBackend.create_world(1)[0])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The members' numbers in the world, in the group's order."""
        return tuple(self.members.tolist())

    @cached_property
    def backend(self) -> Backend:
        """The communicator; ValueError on ranks outside the group."""
        raise ValueError(
            f"rank {self._own_rank} is not in this group of ranks {listed(self.members.tolist())}; "
            "check group.contains(rank) before calling its operations"
        )

    def contains(self, global_rank: int) -> bool:
        """Return True if the world's rank `global_rank` is a member; local."""
        return bool((self.members == global_rank).any())

    def __repr__(self) -> str:
        return f"ProcessGroup(ranks={listed(self.members.tolist())}, rank={self.rank})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        """Return the group itself, so that a copied module communicates with the same ranks; local."""
        return self

    # Documented at the method of `Backend` with the same name.

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce over all ranks, in place; collective. See `Backend.all_reduce`."""
        return self.backend.all_reduce(tensor, op, async_op=async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce onto rank `dst`, in place there; collective. See `Backend.reduce`."""
        return self.backend.reduce(tensor, dst, op, async_op=async_op)

    def scan(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, async_op: bool = False, *, exclusive: bool = False
    ) -> Work | None:
        """Reduce over ranks 0 to this one, in place; collective. See `Backend.scan`."""
        return self.backend.scan(tensor, op, exclusive=exclusive, async_op=async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work | None:
        """Copy rank `src`'s tensor to all ranks, in place; collective. See `Backend.broadcast`."""
        return self.backend.broadcast(tensor, src, async_op=async_op)

    def all_gather(self, tensor: Tensor, dim: int = 0, async_op: bool = False) -> Any:
        """Return all ranks' tensors concatenated along `dim`; collective. See `Backend.all_gather`."""
        return self.backend.all_gather(tensor, dim, async_op=async_op)

    def reduce_scatter(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, dim: int = 0, async_op: bool = False
    ) -> Any:
        """Return this rank's slice of the reduced tensor; collective. See `Backend.reduce_scatter`."""
        return self.backend.reduce_scatter(tensor, op, dim, async_op=async_op)

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        """Return the list of all ranks' tensors on rank `dst`, None elsewhere; collective. See `Backend.gather`."""
        return self.backend.gather(tensor, dst, async_op=async_op)

    gather_tensor = gather

    def scatter(self, tensor: Tensor | None, src: int = 0, async_op: bool = False) -> Any:
        """Return this rank's slice of rank `src`'s tensor, cut along dim 0; collective. See `Backend.scatter`."""
        return self.backend.scatter(tensor, src, async_op=async_op)

    scatter_tensor = scatter

    def all_to_all(self, tensors: Sequence[Tensor], async_op: bool = False) -> Any:
        """Send one tensor to each rank, return the received tensors; collective. See `Backend.all_to_all`."""
        return self.backend.all_to_all(tensors, async_op=async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait for all ranks; collective. See `Backend.barrier`."""
        return self.backend.barrier(async_op=async_op)

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that all ranks of the node can read and write; collective. See `Backend`."""
        return self.backend.symmetric_empty(shape, dtype)

    def node_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate one tensor a node, which its ranks share; collective. See `Backend.node_empty`."""
        return self.backend.node_empty(shape, dtype)

    def all_gather_into(
        self, output: Tensor, tensor: Tensor | None, sizes: Sequence[int], async_op: bool = False
    ) -> Work | None:
        """Gather all ranks' slices into memory that the ranks of a node share; collective. See `Backend`."""
        return self.backend.all_gather_into(output, tensor, sizes, async_op=async_op)

    def reduce_scatter_into(
        self,
        output: Tensor,
        tensors: Sequence[Tensor | int],
        sizes: Sequence[int],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        dtype: torch.dtype | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce tensors, end to end, and write this rank's slice into `output`; collective. See `Backend`."""
        return self.backend.reduce_scatter_into(output, tensors, sizes, op, dtype=dtype, async_op=async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to rank `dst`. See `Backend.send`."""
        self.backend.send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive from rank `src`, in place. See `Backend.recv`."""
        self.backend.recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Begin to send to rank `dst`. See `Backend.isend`."""
        return self.backend.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Begin to receive from rank `src`. See `Backend.irecv`."""
        check_rank(src, "src", self.size)  # the backend would take None, a forgotten rank, as any rank
        return self.backend.irecv(tensor, src, tag)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable object on all ranks; collective."""
        return broadcast_object(self.backend, obj, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order; collective."""
        return all_gather_object(self.backend, obj)

    def private(self, ranks: Sequence[int] | None = None) -> Backend | None:
        """Return a communicator whose messages never match the user's; collective the first time.

        Args:
            ranks: Some ranks of this group, the same on all; None means all.

        Returns:
            The communicator, closed with the group, the same object in later calls; None on ranks outside.
        """
        chosen = check_ranks(range(self.size) if ranks is None else ranks, self.size)
        key = chosen.tobytes()
        if key not in self._private:
            self._private[key] = self.backend.split(chosen)
        return self._private[key]

    def before_close(self, callback: Callable[[], object]) -> None:
        """Call a function before the group is closed, once; local."""
        self._before_close.append(callback)

    @property
    def is_open(self) -> bool:
        """Whether this rank is in the group and has not closed it."""
        return self.rank >= 0 and self.backend.is_open

    def close(self) -> None:
        """Release the communicators; collective in effect, may be called twice, does nothing on ranks outside."""
        while self._before_close:
            self._before_close.pop()()
        while self._private:
            _, private = self._private.popitem()
            if private is not None:
                private.close()
        if self.rank >= 0:
            self.backend.close()

    # ---- short forms ----------------------------------------------------------------------------------------

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, in rank order; collective. See `Backend.all_reduce`."""
        self.backend.all_reduce(tensor, ReduceOp.SUM)

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Average over all ranks, in place; floating point or complex; collective. See `Backend.all_reduce`."""
        self.backend.all_reduce(tensor, ReduceOp.AVERAGE)

    sync_gradient = all_reduce_mean

    def all_reduce_min(self, tensor: Tensor) -> None:
        """Take the element-wise minimum over all ranks, in place; collective. See `Backend.all_reduce`."""
        self.backend.all_reduce(tensor, ReduceOp.MIN)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the element-wise maximum over all ranks, in place; collective. See `Backend.all_reduce`."""
        self.backend.all_reduce(tensor, ReduceOp.MAX)

    def all_reduce_product(self, tensor: Tensor) -> None:
        """Multiply over all ranks, in place, in rank order; collective. See `Backend.all_reduce`."""
        self.backend.all_reduce(tensor, ReduceOp.PRODUCT)

    def reduce_scatter_sum(self, tensor: Tensor, dim: int = 0, async_op: bool = False) -> Any:
        """Return this rank's slice of the sum over all ranks; collective. See `Backend.reduce_scatter`."""
        return self.backend.reduce_scatter(tensor, ReduceOp.SUM, dim, async_op=async_op)

    def reduce_scatter_mean(self, tensor: Tensor, dim: int = 0, async_op: bool = False) -> Any:
        """Return this rank's slice of the average over all ranks; collective. See `Backend.reduce_scatter`."""
        return self.backend.reduce_scatter(tensor, ReduceOp.AVERAGE, dim, async_op=async_op)

    def broadcast_from(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copy rank `src`'s tensor to all ranks, in place; collective. See `Backend.broadcast`."""
        return self.broadcast(tensor, src, async_op)

    def sync_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Average gradients over all ranks, in place, as few large reductions; collective.

        Args:
            tensors: Floating-point tensors, the same shapes and dtypes in the same order on all ranks.

        Raises:
            TypeError: `tensors` is one tensor, or has an item that is no tensor.
            CollectiveMismatchError: The ranks' lists differ.
        """
        all_reduce_coalesced(self.backend, tensors, ReduceOp.AVERAGE)


def _checked_members(ranks: Iterable[int] | None, backend: Backend | None) -> NDArray[np.integer]:
    if ranks is None:
        assert backend is not None
        return np.arange(backend.size, dtype=np.int32)
    members = integer_array(ranks, lambda rank: integer("ranks", rank))
    integer("ranks", members.min(initial=0), minimum=0)
    check_different(members)
    if backend is not None and len(members) != backend.size:
        raise ValueError(f"ranks: expected {backend.size}, as the backend has, got {len(members)}")
    return members
