"""The contract of every backend: its operations, each with its checks in front and the data's way behind.

A `Backend` is a communicator for one fixed set of ranks. Its public methods check the arguments, say which
`Call` this is, and hand over to the subclass, which only moves data:

    all_reduce(t) ─ check ─ Call("all_reduce", float32, [4], SUM) ─┬─ now ─────── _reduce(call, t)
                                                                   └─ async_op ── the same on the worker thread

Every collective begins by comparing the fingerprints of the ranks' calls. Ranks that called
different things all raise `CollectiveMismatchError`, before any data has moved, and can go on afterwards.

The file is long because it is the reference of every operation, once for all backends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor

from ..errors import DtypeError
from ..types import ReduceOp, Seconds, Work
from ..utils.arguments import check_flags, member
from ..utils.cache import BoundedCache
from ..utils.rows import Exchange
from ..utils.torch_internals import skip_in_compile
from .call import Call, Layout
from .checks import (
    check_dtype,
    check_flat,
    check_readable,
    check_shape,
    check_sizes,
    check_tag,
    check_tensor_list,
    check_writable,
    wrap_dim,
)
from .counters import WORDS_PER_COUNTER, NodeCounters
from .flat_parts import FlatParts
from .ranks import Parts, check_parts, check_rank, check_ranks
from .reduction import check_reducible, reduce_in_rank_order, wide_dtype
from .runner import Runner, bytes_of
from .tuning import MAX_CALLS
from .worker import Worker

_SCANNED = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
"""Reductions with an identity in every dtype, which an exclusive scan gives its first rank."""


class Backend(Runner):
    """A communicator for one fixed set of ranks; collectives must be called by all of them in the same order.

    Attributes, besides those of `Runner`:
        device_types: Kinds of device whose tensors are accepted.
        place: The device of its memory, and of tensors that it sends for the library itself.
        overlaps: Whether asynchronous operations progress beside computation without slowing it down.
        spans_nodes: Whether messages between nodes carry its data, which computation may hide.
        allows_threads: Whether operations may run on threads of their own; if not, asynchronous ones block.
    """

    device_types: tuple[str, ...] = ("cpu",)
    overlaps: bool = True
    spans_nodes: bool = False
    allows_threads: bool = True

    def __init__(self, rank: int, size: int, worker: Worker, *, timeout: Seconds | None = None) -> None:
        super().__init__(rank, size, worker, timeout=timeout)
        self.place = torch.device("cpu")
        self._calls: BoundedCache[Any, Call] = BoundedCache(MAX_CALLS)

    @property
    def gathers_ahead(self) -> bool:
        """Whether it saves time to gather early, beside computation."""
        return self.overlaps

    @property
    def world_size(self) -> int:
        """The same as `size`."""
        return self.size

    def on(self, place: torch.device) -> Backend:
        """Return the backend for tensors on a device: itself, or a part of it; local."""
        return self

    @property
    def control(self) -> Backend:
        """Backend for small messages of the library, which the CPU waits for: itself, or a part of it."""
        return self

    # ---- collectives: check, then hand over -------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        layout: Layout | None = None,
        label: str = "",
    ) -> Work | None:
        """Reduce over all ranks, in place on each; collective.

        Args:
            tensor: Any shape and strides, the same shape and dtype on all ranks.
            op: The reduction, or its name; sums are taken in one order on all ranks, 16-bit floats in float32.
            async_op: Return a `Work` at once; leave the tensor alone until it is done.
            layout: Shapes of the tensors in a flat tensor, the same on all ranks.
            label: What is reduced, the same on all ranks; compared, and in messages.

        Raises:
            DtypeError: The dtype does not allow `op`.
            CollectiveMismatchError: The ranks differ in operation, dtype, shape, reduction, layout or label.
        """
        tensor = check_writable(tensor, self.name, self.device_types)
        call = self._call("all_reduce", tensor.dtype, tensor.shape, op, layout=layout, label=label)
        work: Work | None = self._run(async_op, call, self._reduce, tensor)
        return work

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | str = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks, in place on rank `dst`, untouched on the others; collective.

        Args:
            tensor: The same shape and dtype on all ranks.
            dst: Rank within the group that gets the result.
            op: The reduction.
            async_op: Return a `Work` at once.

        Raises:
            ValueError: `dst` is no rank of the group.
            DtypeError: The dtype does not allow `op`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_rank(dst, "dst", self.size)
        tensor = check_writable(tensor, self.name, self.device_types)
        call = self._call("reduce", tensor.dtype, tensor.shape, op, dst)
        work: Work | None = self._run(async_op, call, self._reduce, tensor)
        return work

    def scan(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        exclusive: bool = False,
        reverse: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce over ranks 0 to this one, in place on each; collective.

        Args:
            tensor: Any shape and strides, the same shape and dtype on all ranks.
            op: SUM, PRODUCT, MIN or MAX, or its name; 16-bit floats are added in float32.
            exclusive: Exclude this rank's tensor. Rank 0 gets the identity of `op`, which is 0 for SUM.
            reverse: Reduce over this rank and all higher ranks. If `exclusive`, the last rank gets the identity.
            async_op: Return a `Work` at once; leave the tensor alone until it is done.

        Raises:
            TypeError: `exclusive` or `reverse` is no bool.
            ValueError: `op` is another reduction.
            DtypeError: The dtype does not allow `op`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_flags(exclusive=exclusive, reverse=reverse)
        tensor = check_writable(tensor, self.name, self.device_types)
        operation = ("reverse_" if reverse else "") + ("exscan" if exclusive else "scan")
        call = self._call(operation, tensor.dtype, tensor.shape, op)
        chosen = range(self.rank + exclusive, self.size) if reverse else range(self.rank + 1 - exclusive)
        work: Work | None = self._run(async_op, call, self._scan, tensor, chosen, reverse)
        return work

    def broadcast(
        self,
        tensor: Tensor,
        src: int = 0,
        *,
        async_op: bool = False,
        layout: Layout | None = None,
        label: str = "",
    ) -> Work | None:
        """Copy rank `src`'s tensor into the tensors of all others, in place; collective.

        Args:
            tensor: The same shape and dtype on all ranks.
            src: Rank within the group to copy from.
            async_op: Return a `Work` at once.
            layout: Shapes of the tensors in a flat tensor, the same on all ranks.
            label: Owner of the tensor, the same on all ranks; compared, and in messages.

        Raises:
            ValueError: `src` is no rank of the group.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_rank(src, "src", self.size)
        tensor = check_writable(tensor, self.name, self.device_types)
        call = self._call("broadcast", tensor.dtype, tensor.shape, root=src, layout=layout, label=label)
        work: Work | None = self._run(async_op, call, self._broadcast, tensor)
        return work

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, async_op: bool = False, sizes: Sequence[int] | None = None
    ) -> Any:
        """Concatenate the tensors of all ranks along `dim`; collective, returns a new tensor.

        Args:
            tensor: The ranks may differ in size along `dim` only. A 0-d tensor counts as one of shape [1].
            dim: Dimension to concatenate along.
            async_op: Return a `Work` at once, whose `result()` is the tensor.
            sizes: Size along `dim` on each rank, if the caller knows them: GPUs then need not exchange them.

        Raises:
            DimensionError: `dim` is out of range.
            ValueError: `sizes` are not as many as the ranks, or this rank's size is another.
            CollectiveMismatchError: The ranks differ in dtype, in another dimension, or in `sizes`.
        """
        tensor = check_readable(tensor, self.name, self.device_types)
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        dim = wrap_dim(dim, tensor.dim())
        shape = (*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :])
        layout = None
        if sizes is not None:
            sizes = check_sizes(sizes, self.size)
            if sizes[self.rank] != tensor.shape[dim]:
                raise ValueError(f"sizes: expected {tensor.shape[dim]} for this rank, got {sizes[self.rank]}")
            layout = ((tensor.dtype, sizes),)
        call = self._call("all_gather", tensor.dtype, shape, dim=dim, layout=layout)
        return self._run(async_op, call, self._all_gather, tensor, dim)

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> None:
        """Copy the elements of all ranks' tensors one after the other into a tensor of the caller's; collective.

        Args:
            output: [size * numel] contiguous, of the tensor's dtype.
            tensor: Any shape, with as many elements on all ranks.

        Raises:
            ValueError: `output` has another size, or a rank's tensor.
            CollectiveMismatchError: The ranks differ in dtype.
        """
        tensor = check_readable(tensor, self.name, self.device_types).reshape(-1)
        output = check_flat(output, self.size * tensor.numel(), "output", self.name, self.device_types)
        call = self._call("all_gather", tensor.dtype, (-1,), dim=0)
        self._run(False, call, self._all_gather_flat, tensor, output)

    def reduce_scatter(
        self, tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, dim: int = 0, *, async_op: bool = False
    ) -> Any:
        """Reduce over all ranks and return this rank's slice along `dim`; collective, returns a new tensor.

        Args:
            tensor: The same shape and dtype on all ranks, at least 1-D.
            op: The reduction.
            dim: Dimension to cut as `torch.tensor_split` does, so that sizes need not divide.
            async_op: Return a `Work` at once, whose `result()` is the slice.

        Raises:
            DimensionError: `dim` is out of range.
            DtypeError: The dtype does not allow `op`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        tensor = check_readable(tensor, self.name, self.device_types)
        dim = wrap_dim(dim, tensor.dim())
        call = self._call("reduce_scatter", tensor.dtype, tensor.shape, op, dim=dim)
        return self._run(async_op, call, self._reduce_scatter, tensor, dim)

    def gather(self, tensor: Tensor, dst: int = 0, *, async_op: bool = False) -> Any:
        """Collect the tensors of all ranks on rank `dst`; collective.

        Args:
            tensor: The ranks may differ in size along dim 0 only.
            dst: Rank within the group that gets the list.
            async_op: Return a `Work` at once, whose `result()` is the list.

        Returns:
            One tensor a rank, in rank order, on `dst`; None elsewhere.

        Raises:
            ValueError: `dst` is no rank of the group.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_rank(dst, "dst", self.size)
        tensor = check_readable(tensor, self.name, self.device_types)
        shape = (-1, *tensor.shape[1:]) if tensor.dim() else ()
        call = self._call("gather", tensor.dtype, shape, root=dst)
        return self._run(async_op, call, self._gather, tensor)

    def scatter(self, tensor: Tensor | None, src: int = 0, *, async_op: bool = False) -> Any:
        """Cut rank `src`'s tensor along dim 0 and return each rank its part; collective, returns a new tensor.

        Args:
            tensor: On `src`, at least 1-D, cut as `torch.tensor_split` does; ignored elsewhere and may be None.
            src: Rank within the group whose tensor is cut.
            async_op: Return a `Work` at once, whose `result()` is the part.

        Raises:
            ValueError: `src` is no rank of the group, or its tensor is 0-d or has more than 12 dimensions.
            TypeError: `tensor` is None on `src`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_rank(src, "src", self.size)
        if self.rank == src:
            tensor = check_readable(tensor, self.name, self.device_types)
            if not 1 <= tensor.dim() <= 12:
                raise ValueError(
                    f"scatter: expected a tensor of 1 to 12 dimensions on rank {src}, got {tensor.dim()}"
                )
        call = self._call("scatter", root=src)
        return self._run(async_op, call, self._scatter, tensor if self.rank == src else None)

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        *,
        async_op: bool = False,
        cut_from: tuple[torch.dtype, tuple[int, ...], int] | None = None,
    ) -> Any:
        """Send `tensors[i]` to rank i and return the tensors that the ranks sent here; collective.

        Args:
            tensors: One a rank; shapes and dtypes are free (up to 12 dimensions).
            async_op: Return a `Work` at once, whose `result()` is the list.
            cut_from: Dtype, shape and dimension of the tensor that was cut, if all ranks have to have the same; a
                size of -1 is free.

        Returns:
            A list of new tensors: entry i came from rank i.

        Raises:
            ValueError: The list's length is not the size of the group.
            CollectiveMismatchError: The ranks' calls differ.
        """
        check_tensor_list(tensors, self.size)
        checked = [check_readable(tensor, self.name, self.device_types) for tensor in tensors]
        if any(tensor.dim() > 12 for tensor in checked):
            raise ValueError("all_to_all: expected tensors of at most 12 dimensions")
        dtype, shape, dim = (None, (), None) if cut_from is None else cut_from
        call = self._call("all_to_all", dtype, shape, dim=dim)
        return self._run(async_op, call, self._all_to_all, checked)

    def exchange_rows(
        self,
        shown: Sequence[Tensor],
        outputs: Sequence[Tensor],
        plan: Exchange,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work | None:
        """Copy rows of other ranks, by a plan that all ranks have made of the same numbers; collective.

        Args:
            shown: This rank's rows that others need, each [rows, *row], one after the other as the plan counts
                them; at least one tensor, of no rows if need be.
            outputs: One [rows, *row] for each piece of the plan that this rank takes; written.
            plan: The plan, the same on all ranks.
            async_op: Return a `Work` at once; leave the tensors alone until it is done.
            label: What is exchanged, the same on all ranks; compared, and in messages.

        Raises:
            ValueError: The tensors do not fit the plan.
            CollectiveMismatchError: The ranks' calls differ.
        """
        given = [check_readable(tensor, self.name, self.device_types) for tensor in shown]
        written = [check_writable(tensor, self.name, self.device_types) for tensor in outputs]
        dtype, row = given[0].dtype, given[0].shape[1:]
        sizes = [tensor.shape[0] for tensor in given], [tensor.shape[0] for tensor in written]
        expected = plan.shown[self.rank], [stop - start for _, start, stop in plan.wanted[self.rank]]
        if (sum(sizes[0]), sizes[1]) != expected or {tensor.shape[1:] for tensor in (*given, *written)} != {row}:
            raise ValueError(
                f"exchange_rows: by the plan expected {expected[0]} rows to show, outputs of {expected[1]} rows, "
                f"and rows of one shape, got {sizes[0]} and {sizes[1]} rows, the first of shape {list(row)}"
            )
        call = self._call("exchange_rows", dtype, tuple(row), layout=((dtype, plan.numbers),), label=label)
        work: Work | None = self._run(async_op, call, self._exchange_rows, given, written, plan)
        return work

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called; collective."""
        work: Work | None = self._run(async_op, self._call("barrier"), self._barrier)
        return work

    def split(self, ranks: Iterable[int]) -> Backend | None:
        """Make a communicator of some of this one's ranks, in the order given; collective over all of this one's.

        Args:
            ranks: Different ranks of this communicator, the same on all ranks.

        Returns:
            The new communicator, or None on ranks outside it.

        Raises:
            ValueError: `ranks` is empty, has doubles or numbers out of range.
            CollectiveMismatchError: The ranks' lists differ.
        """
        chosen = Parts.single(check_ranks(ranks, self.size))
        backend: Backend | None = self._run(False, Call("split", parts=chosen), self._divide, chosen)
        return backend

    def partition(self, parts: Iterable[Iterable[int]] | Parts) -> Backend:
        """Make a communicator of each of several disjoint sets of ranks at the cost of one; collective over all.

        Args:
            parts: The ranks of each, in its order; every rank of this communicator once; the same on all ranks.

        Returns:
            The communicator that this rank is in.

        Raises:
            ValueError: A rank is in none of the parts, or more than once, or a part is empty.
            CollectiveMismatchError: The ranks' parts differ.
        """
        chosen = check_parts(parts, self.size)
        backend: Backend = self._run(False, Call("partition", parts=chosen), self._divide, chosen)
        return backend

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that the other ranks of the node can read and write too; collective.

        Collectives on such tensors need no copies. If memory cannot be shared the tensor is an ordinary one,
        which works the same but slower. Each rank has memory of its own; it is freed when the last tensor on it is
        gone.

        Args:
            shape: The same on all ranks.
            dtype: The same on all ranks.

        Returns:
            A contiguous tensor on the CPU, its values undefined.

        Raises:
            TypeError: `shape` is no sequence of integers, or `dtype` no dtype.
            ValueError: A size is negative.
            DtypeError: Tensors of this dtype cannot be sent.
            CollectiveMismatchError: The ranks' calls differ.
        """
        return self._allocate("symmetric_empty", shape, dtype, self._symmetric_empty)

    # ---- memory of a node ----------------------------------------------------------------------------------

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of this group that share the memory of `node_empty`, in order, this one among them; local."""
        return (self.rank,)

    def node_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor that the ranks of each node share; collective.

        All `node_ranks` get the same memory, and have to share it out. It is freed when the last tensor
        on it is gone on all of them.

        Args:
            shape: The same on all ranks.
            dtype: The same on all ranks.

        Returns:
            A contiguous tensor on the CPU, its values undefined.

        Raises:
            TypeError: `shape` is no sequence of integers, or `dtype` no dtype.
            ValueError: A size is negative.
            DtypeError: Tensors of this dtype cannot be sent.
            MemoryError: The node has not enough memory.
            CollectiveMismatchError: The ranks' calls differ.
        """
        return self._allocate("node_empty", shape, dtype, self._node_empty)

    def _allocate(
        self, operation: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[Call], Tensor]
    ) -> Tensor:
        sizes = check_shape(shape)
        check_dtype(dtype)
        tensor: Tensor = self._run(False, Call(operation, dtype, sizes), make)
        return tensor

    def node_counters(self, count: int) -> NodeCounters:
        """Make counters that the ranks of each node share, all zero; collective.

        Args:
            count: How many, the same on all ranks.

        Raises:
            TypeError: `count` is no integer.
            ValueError: `count` is negative.
            MemoryError: The node has not enough memory.
            CollectiveMismatchError: The ranks' calls differ.
        """
        memory = self.node_empty((count, WORDS_PER_COUNTER), torch.int64)
        if self.rank == self.node_ranks[0]:
            memory.zero_()
        self.barrier()
        return self._counters(memory.view(-1))

    def all_gather_into(
        self,
        output: Tensor,
        tensor: Tensor | None,
        sizes: Sequence[int],
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work | None:
        """Put the parts of all ranks one after the other into the memory of each node; collective.

        Nothing is written before all ranks have called, so the memory may be in use until then. On one node, with
        all parts there already, this is a barrier.

        Args:
            output: [sum(sizes)] contiguous, from `node_empty` of this group.
            tensor: [sizes[rank]] this rank's part, converted to the dtype of `output`; None: it is there already.
            sizes: Elements of each rank's part, the same on all ranks.
            async_op: Return a `Work` at once.
            label: Whose tensors they are, the same on all ranks; compared, and in messages.

        Raises:
            ValueError: A shape does not fit the sizes, or `output` is not of `node_empty`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        sizes = check_sizes(sizes, self.size)
        output = check_flat(output, sizes.total, "output", self.name, self.device_types)
        if tensor is not None:
            tensor = check_flat(tensor, sizes[self.rank], "tensor", self.name, self.device_types)
        layout = ((output.dtype, sizes),)
        call = self._call("all_gather_into", output.dtype, (sizes.total,), layout=layout, label=label)
        work: Work | None = self._run(async_op, call, self._all_gather_into, tensor, output, sizes)
        return work

    def reduce_scatter_into(
        self,
        output: Tensor,
        tensors: Sequence[Tensor | int],
        sizes: Sequence[int],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        dtype: torch.dtype | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work | None:
        """Reduce tensors as if they lay end to end; this rank's part of the result goes to `output`; collective.

        Args:
            output: [sizes[rank]] contiguous, of the tensors' dtype or the wider one that sums are taken in.
            tensors: Of one dtype and any shapes, sum(sizes) elements in all; an integer stands for so many zeros,
                which ranks may have in different places.
            sizes: Elements of each rank's part of the result, the same on all ranks.
            op: The reduction.
            dtype: Dtype of the tensors, needed if a rank may have zeros only.
            async_op: Return a `Work` at once; leave the tensors alone until it is done.
            label: Whose tensors they are, the same on all ranks; compared, and in messages.

        Raises:
            ValueError: A shape does not fit the sizes.
            DtypeError: The dtype of `output` is neither of the two, or does not allow `op`.
            CollectiveMismatchError: The ranks' calls differ.
        """
        sizes = check_sizes(sizes, self.size)
        output = check_flat(output, sizes[self.rank], "output", self.name, self.device_types)
        found = [part.dtype for part in tensors if not isinstance(part, int)]
        dtype = dtype or (found or [output.dtype])[0]
        if any(other is not dtype for other in found) or output.dtype not in (dtype, wide_dtype(dtype)):
            raise DtypeError(
                f"reduce_scatter_into: expected tensors of {dtype}, and output of that or of {wide_dtype(dtype)}, "
                f"got {sorted(set(map(str, found)))} and {output.dtype}"
            )
        parts = FlatParts([part if isinstance(part, int) else part.detach() for part in tensors], dtype)
        if parts.numel != sizes.total:
            raise ValueError(
                f"tensors: expected {sizes.total} elements in all, the sum of sizes, got {parts.numel}"
            )
        layout = ((output.dtype, sizes),)
        call = self._call("reduce_scatter_into", dtype, (sizes.total,), op, layout=layout, label=label)
        work: Work | None = self._run(async_op, call, self._reduce_scatter_into, parts, output, sizes)
        return work

    # ---- point to point ----------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to rank `dst` and return when the tensor may be changed; matches one `recv` there.

        Args:
            tensor: Any shape; the receiver's must have the same size in bytes.
            dst: Another rank of the group.
            tag: 0 to 32767; messages of one tag arrive in order.

        Raises:
            ValueError: `dst` is this rank or none of the group's, or the tag is out of range.
        """
        check_rank(dst, "dst", self.size)
        check_tag(tag)
        if dst == self.rank:
            raise ValueError(f"send: rank {dst} would wait for itself; use isend to send to the own rank")
        tensor = check_readable(tensor, self.name, self.device_types)
        if self.timeout is None:
            self._message("send", self._send, tensor, dst, tag)
        else:
            self._message("send", self._isend, tensor, dst, tag).wait(self.timeout)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive from rank `src` into `tensor`, in place; matches one `send` there.

        Args:
            tensor: As many bytes as the sender's.
            src: Rank within the group.
            tag: The sender's tag, 0 to 32767.

        Raises:
            ValueError: `src` is none of the group's ranks, or the tag is out of range.
            CollectiveMismatchError: The message has another size.
        """
        check_rank(src, "src", self.size)
        check_tag(tag)
        tensor = check_writable(tensor, self.name, self.device_types)
        if self.timeout is None:
            self._message("recv", self._recv, tensor, src, tag)
        else:
            self._message("recv", self._irecv, tensor, src, tag).wait(self.timeout)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Begin to send to rank `dst`; leave the tensor alone until the Work is done. See `send`."""
        check_rank(dst, "dst", self.size)
        check_tag(tag)
        tensor = check_readable(tensor, self.name, self.device_types)
        work: Work = self._message("isend", self._isend, tensor, dst, tag)
        return work

    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> Work:
        """Begin to receive from rank `src` into `tensor`, which is complete when the Work is. See `recv`.

        Under MPI `src` may be None: the message comes from whichever rank sends first, and the Work's `result()` is
        that rank. MPICH on several nodes takes such a message while this rank waits for a message, not before.

        A message of another size raises `CollectiveMismatchError` from the Work. Some MPI libraries (Open MPI 5.0)
        crash instead if it is large and larger than `tensor`; `recv` looks at the size first and has no such limit.
        """
        if src is not None:
            check_rank(src, "src", self.size)
        check_tag(tag)
        tensor = check_writable(tensor, self.name, self.device_types)
        work: Work = self._message("irecv", self._irecv, tensor, src, tag)
        return work

    # ---- calls ------------------------------------------------------------------------------------------------

    def _run(self, async_op: bool, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        if async_op is not False or self._worker.started != self._worker.ended or self.timeout != self.kept_timeout:
            return self._queue(async_op, call, move, args)
        if self._closed is not None:
            return self._execute(call, move, call, *args)
        log = self.notes
        note = log.enter(call.description)
        if call.is_free:
            log.set_bytes(note, bytes_of(args[0]))
        try:
            result = move(call, *args)
        except BaseException as error:
            log.fail(note)
            if isinstance(error, self.failures):
                raise self._failure(call.operation, error) from error
            raise
        log.leave(note)
        return result

    def _call(
        self,
        operation: str,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] = (),
        op: ReduceOp | str | None = None,
        root: int | None = None,
        *,
        dim: int | None = None,
        layout: Layout | None = None,
        label: str = "",
    ) -> Call:
        """Find or make the Call; dtype and reduction are checked once."""
        if op is not None and op.__class__ is not ReduceOp:  # 0 and True would be found as SUM and PRODUCT
            op = member("op", ReduceOp, op)
        index = (operation, dtype, shape, op, root, dim, layout, label)
        call = self._calls.get(index)
        if call is None:
            assert not isinstance(op, str)
            is_scan = operation.endswith("scan")
            if is_scan or operation in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_into"):
                assert dtype is not None
                check_reducible(dtype, op)  # no reduction at all, None, is refused here
            if is_scan and op not in _SCANNED:
                raise ValueError(f"op: expected SUM, PRODUCT, MIN or MAX for a scan, got {op.name if op else op}")
            call = Call(operation, dtype, tuple(shape), op, root, dim, layout, label=label)
            self._calls.add(index, call)
        return call

    # ---- what a backend provides: arguments are checked; tensors may have any strides -----------------------

    @abstractmethod
    def _reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none."""

    def _scan(self, call: Call, tensor: Tensor, chosen: range, reverse: bool) -> None:
        """Reduce the chosen ranks, which begin or end with this one; here by a gather of all."""
        rows = self._all_gather(call, tensor.unsqueeze(0), 0)
        reduce_in_rank_order(rows.unbind(0)[chosen.start : chosen.stop], call.op, tensor)

    @abstractmethod
    def _broadcast(self, call: Call, tensor: Tensor) -> None: ...

    @abstractmethod
    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor: ...

    def _all_gather_flat(self, call: Call, tensor: Tensor, output: Tensor) -> None:
        output.copy_(self._all_gather(call, tensor, 0))

    @abstractmethod
    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor: ...

    @abstractmethod
    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor] | None: ...

    @abstractmethod
    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]: ...

    def _exchange_rows(self, call: Call, shown: list[Tensor], outputs: list[Tensor], plan: Exchange) -> None:
        """Copy the pieces of the plan into the outputs; here from one message of each rank."""
        rows = torch.cat(shown)
        mine = [[rows[p.start : p.stop] for p in pieces if p.source == self.rank] for pieces in plan.wanted]
        sends = [torch.cat(parts) if parts else rows[:0] for parts in mine]
        targets: list[list[Tensor]] = [[] for _ in range(self.size)]
        for piece, output in zip(plan.wanted[self.rank], outputs, strict=True):
            targets[piece.source].append(output)
        counts = [[target.shape[0] for target in of_one] for of_one in targets]
        received = self._swap(call, sends, [sum(numbers) for numbers in counts])
        for of_one, data, numbers in zip(targets, received, counts, strict=True):
            for target, part in zip(of_one, data.split(numbers), strict=True):
                target.copy_(part)

    def _swap(self, call: Call, sends: list[Tensor], rows: list[int]) -> list[Tensor]:
        """Send entry i to rank i and return `rows[i]` rows of rank i, by number; collective."""
        return self._all_to_all(call, sends)

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...

    @abstractmethod
    def _symmetric_empty(self, call: Call) -> Tensor: ...

    @abstractmethod
    def _node_empty(self, call: Call) -> Tensor: ...

    @abstractmethod
    def _counters(self, memory: Tensor) -> NodeCounters: ...

    @abstractmethod
    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None: ...

    @abstractmethod
    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None: ...

    @abstractmethod
    def _divide(self, call: Call, parts: Any) -> Backend | None:
        """Make the communicator of the part that this rank is in, if any; `parts` are `Parts`."""

    @abstractmethod
    def _send(self, tensor: Tensor, dst: int, tag: int) -> None: ...

    @abstractmethod
    def _recv(self, tensor: Tensor, src: int, tag: int) -> None: ...

    @abstractmethod
    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work: ...

    @abstractmethod
    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work: ...


# Compiled code calls a collective by a break of its graph: the checks read attributes that traced tensors lack.
for _name, _method in vars(Backend).items():
    if isfunction(_method) and not _name.startswith("_"):
        skip_in_compile(_method)
