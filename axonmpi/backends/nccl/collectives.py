"""Collectives of NCCL on the tensors of one rank, on one stream: that of its group, or the caller's.

Each method enqueues its work and returns. Torch's kernels, such as copies to contiguous memory, run on the same
stream. Results are allocated for the caller's stream, which uses them after the operation. Operations on the
caller's own stream need no memory kept for another stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...types import ReduceOp
from ...utils.device import Device
from ...utils.partition import split_sizes
from ..flat_parts import FlatParts
from ..reduction import reduce_in_rank_order
from ..tuning import GATHERED_BYTES
from .dtypes import (
    bytes_or_native,
    in_memory,
    is_native_reduction,
    is_plain,
    nccl_op,
    reduced_dtype,
    reducible_view,
)
from .streams import Channel

_CONTIGUOUS = torch.contiguous_format


class StreamCollectives:
    """Collectives of one communicator; each is told by all its ranks in the same order.

    Args:
        core: nccl4py.
        channel: The communicator and its stream.
        device: This rank's GPU.
        rank: This rank's number.
        size: How many ranks there are.

    Attributes:
        stream: The stream that is told.
    """

    def __init__(self, core: Any, channel: Channel, device: Device, rank: int, size: int) -> None:
        self._core = core
        self._communicator = channel.communicator
        self._own = (channel.stream, channel.handle)
        self._device = device
        self._rank = rank
        self._size = size
        self.use_own_stream()

    def use_own_stream(self) -> None:
        """Enqueue the following calls on the group's stream; local."""
        self._on_caller = False
        self.stream, self._handle = self._own

    def use(self, stream: Any) -> None:
        """Enqueue the following calls on the caller's current stream; local."""
        self._on_caller = True
        self.stream, self._handle = stream, self._device.handle(stream)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Let torch compute on the stream for the duration of a `with` block; local."""
        return nullcontext() if self._on_caller else self._device.within(self.stream)

    def keep(self, *tensors: Tensor) -> None:
        """Keep memory until the group's stream has run all calls so far; local."""
        if not self._on_caller:
            for tensor in tensors:
                self._device.keep(tensor, self.stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a result, for the caller's stream; local."""
        made = torch.empty(tuple(shape), dtype=dtype, device=self._device.place)
        self.keep(made)
        return made

    def _temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory for the group's stream alone, within `on_stream`; local."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device.place)

    @contextmanager
    def _written(self, tensor: Tensor, dtype: torch.dtype, *, writes: bool = True) -> Iterator[Tensor]:
        """Give contiguous memory of `dtype` with a tensor's values, and write it back if it is a copy."""
        self.keep(tensor)
        if writes:
            torch.autograd.graph.increment_version(tensor)
        if is_plain(tensor) and tensor.dtype == dtype:
            yield tensor
            return
        with self.on_stream():
            values = self._temporary(tensor.shape, dtype).copy_(tensor)
            yield values
            if writes:
                tensor.copy_(values)

    # ---- reductions ---------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp, root: int | None) -> None:
        """Reduce a tensor, in place, onto one rank or, without `root`, onto all; collective."""
        writes = root in (None, self._rank)
        if not is_native_reduction(tensor.dtype, op):
            self._reduce_gathered(tensor, op, tensor if writes else None)
            return
        with self._written(tensor, reduced_dtype(tensor.dtype), writes=writes) as values:
            sent, name = reducible_view(values), nccl_op(self._core, tensor.dtype, op, self._size)
            self._communicator.reduce(sent, sent, name, root, stream=self._handle)

    def reduce_together(self, tensors: Sequence[Tensor], op: ReduceOp) -> None:
        """Reduce each tensor onto all ranks, in place, in one launch; collective.

        Args:
            tensors: Of dtypes with a reduction that NCCL knows.
            op: The reduction.
        """
        with ExitStack() as written:  # which is written back after the launch, at the end of the group
            memory = [
                written.enter_context(self._written(tensor, reduced_dtype(tensor.dtype))) for tensor in tensors
            ]
            with self._core.group():
                for tensor, values in zip(tensors, memory, strict=True):
                    sent, name = reducible_view(values), nccl_op(self._core, tensor.dtype, op, self._size)
                    self._communicator.allreduce(sent, sent, name, stream=self._handle)

    def scan(self, tensor: Tensor, op: ReduceOp, chosen: range) -> None:
        """Reduce the tensors of some ranks, others on each rank, in place; collective."""
        with self._written(tensor, tensor.dtype) as values:
            for part in values.view(-1).split(max(GATHERED_BYTES // (self._size * tensor.itemsize), 1)):
                self._reduce_gathered(part, op, part, slice(chosen.start, chosen.stop))

    def _reduce_gathered(
        self, tensor: Tensor, op: ReduceOp, target: Tensor | None, chosen: slice = slice(None)
    ) -> None:
        """Reduce in rank order, without a reduction of NCCL's, into `target` if given; collective."""
        self.keep(tensor)
        with self.on_stream():
            own = in_memory(tensor)
            parts = self._temporary((self._size, *own.shape), own.dtype)
            if own.numel():
                self._communicator.allgather(bytes_or_native(own), bytes_or_native(parts), stream=self._handle)
            if target is not None:
                torch.autograd.graph.increment_version(target)
                reduce_in_rank_order(list(parts)[chosen], op, target)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp, dim: int) -> Tensor:
        """Return this rank's slice along `dim` of the reduced tensor; collective."""
        self.keep(tensor)
        rows = list(split_sizes(tensor.shape[dim], self._size))
        result = self.empty((*tensor.shape[:dim], rows[self._rank], *tensor.shape[dim + 1 :]), tensor.dtype)
        wide = reduced_dtype(tensor.dtype)
        with self.on_stream():
            moved = in_memory(tensor.movedim(dim, 0).to(wide))
            ordered = result.movedim(dim, 0)
            own = ordered if dim == 0 and wide == tensor.dtype else self._temporary(ordered.shape, wide)
            self._reduce_parts(moved, op, rows, own, tensor.dtype)
            if own is not ordered:
                ordered.copy_(own)
        return result

    def reduce_scatter_into(self, parts: FlatParts, op: ReduceOp, output: Tensor, sizes: list[int]) -> None:
        """Put this rank's part of the reduced tensors into `output`, reduced in its dtype; collective."""
        self.keep(output, *parts.tensors)
        torch.autograd.graph.increment_version(output)
        wide = reduced_dtype(output.dtype)
        with self.on_stream():
            flat = parts.flat(wide, self._device.place)
            own = output if wide == output.dtype else self._temporary(output.shape, wide)
            self._reduce_parts(flat, op, sizes, own, output.dtype)
            if own is not output:
                output.copy_(own)

    def _reduce_parts(self, moved: Tensor, op: ReduceOp, rows: list[int], own: Tensor, dtype: torch.dtype) -> None:
        """Put this rank's rows of the reduced tensor into `own`, on the stream; collective.

        Args:
            moved: [sum(rows), ...] contiguous, of a dtype of `reduced_dtype`.
            op: The reduction.
            rows: How many each rank gets.
            own: [rows[rank], ...] contiguous, of the same dtype.
            dtype: Dtype of the caller's tensors.
        """
        if not is_native_reduction(dtype, op):
            whole = torch.empty_like(moved)
            self._reduce_gathered(moved, op, whole)
            own.copy_(whole.split(rows)[self._rank])
            return
        if not moved.numel():
            return
        name = nccl_op(self._core, dtype, op, self._size)
        if len(set(rows)) == 1:
            self._communicator.reduce_scatter(reducible_view(moved), reducible_view(own), name, stream=self._handle)
            return
        with self._core.group():
            for rank, part in enumerate(moved.split(rows)):
                if part.numel():
                    sent = reducible_view(part)
                    target = reducible_view(own) if rank == self._rank else sent
                    self._communicator.reduce(sent, target, name, rank, stream=self._handle)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor into those of the others; collective."""
        with self._written(tensor, tensor.dtype, writes=self._rank != root) as values:
            sent = bytes_or_native(values)
            self._communicator.broadcast(sent, sent, root, stream=self._handle)

    def all_gather(self, tensor: Tensor, dim: int, rows: list[int]) -> Tensor:
        """Return the tensors of all ranks along `dim`, of which each has its rows; collective."""
        self.keep(tensor)
        result = self.empty((*tensor.shape[:dim], sum(rows), *tensor.shape[dim + 1 :]), tensor.dtype)
        with self.on_stream():
            moved = in_memory(tensor.movedim(dim, 0))
            ordered = result.movedim(dim, 0)
            whole = ordered if dim == 0 else torch.empty_like(ordered, memory_format=_CONTIGUOUS)
            self._gather_parts(whole, moved, rows)
            if whole is not ordered:
                ordered.copy_(whole)
        return result

    def all_gather_into(self, output: Tensor, tensor: Tensor | None, sizes: list[int]) -> None:
        """Fill `output` with the parts of all ranks; collective. Without `tensor` the own part is there."""
        self.keep(output, *([] if tensor is None else [tensor]))
        torch.autograd.graph.increment_version(output)
        with self.on_stream():
            if tensor is not None:
                output.split(sizes)[self._rank].copy_(tensor)
            self._gather_parts(output, None, sizes)

    def _gather_parts(self, whole: Tensor, own: Tensor | None, rows: list[int]) -> None:
        """Fill contiguous memory with the rows of all ranks, on the stream; collective.

        Args:
            whole: The tensor to fill.
            own: This rank's rows; None: they are there already.
            rows: How many each rank has.
        """
        if not whole.numel():
            return
        parts = [bytes_or_native(part) for part in whole.split(rows)]
        sent = parts[self._rank] if own is None else bytes_or_native(own)
        if len(set(rows)) == 1:
            self._communicator.allgather(sent, bytes_or_native(whole), stream=self._handle)
            return
        with self._core.group():
            for rank, part in enumerate(parts):
                if part.numel():
                    source = sent if rank == self._rank else part
                    self._communicator.broadcast(source, part, rank, stream=self._handle)

    def all_gather_on_cpu(self, own: Tensor) -> Tensor:
        """Return [ranks, numbers] of each rank's [1, numbers], both on the CPU, and block for them; collective."""
        with self.on_stream():
            whole = self._temporary((self._size, own.numel()), own.dtype)
            self._communicator.allgather(own.to(whole.device), whole, stream=self._handle)
            return whole.cpu()

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        """Send entry i to rank i and receive entry i from there, in one launch; collective. None: nothing."""
        self.keep(*(tensor for tensor in sends if tensor is not None))
        with self.on_stream():
            ready = [None if tensor is None else bytes_or_native(in_memory(tensor)) for tensor in sends]
            with self._core.group():
                for rank, (sent, received) in enumerate(zip(ready, receives, strict=True)):
                    if sent is not None and sent.numel():
                        self._communicator.send(sent, rank, stream=self._handle)
                    if received is not None and received.numel():
                        self._communicator.recv(bytes_or_native(received), rank, stream=self._handle)

    def barrier(self) -> None:
        """Let later work of the stream begin when all ranks have enqueued the barrier; collective."""
        with self.on_stream():
            one = torch.zeros(1, dtype=torch.uint8, device=self._device.place)
            self._communicator.allreduce(one, one, self._core.NcclRedOp.MAX, stream=self._handle)
