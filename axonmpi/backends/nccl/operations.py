"""Collectives and messages of a backend of GPUs, each carried by NCCL or by the CPUs' backend of the same ranks.

Ranks exchange sizes that the receiver cannot know over the CPUs first, if the group has a CPU backend: for
all_gather without `sizes`, gather, scatter, all_to_all of free shapes.

NCCL's collectives on tensors are in `collectives.py`, its messages in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import AxonmpiError, CommunicatorError
from ...launch.user_variables import debugs
from ...types import ReduceOp, Work
from ...utils.arguments import check_flags
from ...utils.device import Device, device_at
from ...utils.partition import split_range
from ...utils.rows import Exchange
from ..buffers import DESCRIPTION_BYTES, describe, described
from ..call import Call, mismatch_error
from ..call_site import text_with_site
from ..checks import check_named
from ..contract import Backend
from ..counters import NodeCounters
from ..flat_parts import FlatParts
from ..objects import all_gather_object
from ..worker import AtOnce
from . import library
from .collectives import StreamCollectives
from .dtypes import is_native_reduction
from .messages import Messages
from .streams import Streams


class NcclOperations(Backend):
    """The operations of a communicator of GPUs.

    Args:
        communicator: nccl4py's, connected.
        rank: This process's number.
        size: How many ranks there are.
        place: This rank's GPU.
        timeout: Seconds that a blocking operation may take on the GPU.
        host: The same ranks over their CPUs, if they are connected.

    Attributes:
        device: This rank's GPU.
        host: The same.
    """

    name = "nccl"
    device_types: tuple[str, ...] = ("cuda",)

    def __init__(
        self,
        communicator: Any,
        rank: int,
        size: int,
        place: torch.device,
        timeout: float | None,
        host: Backend | None,
    ) -> None:
        self.host = host
        super().__init__(rank, size, AtOnce(), timeout=timeout)
        if host is not None:
            self.notes = host.notes  # one group in the rank's record, for operations of the GPU and of the CPUs
        nccl = library.load()
        self.device = self.place = place
        self.device_types = (place.type,) if host is None else (place.type, *host.device_types)
        self.failures = nccl.failures
        self._device: Device = device_at(place)
        self._streams = Streams(nccl, communicator, self._device, rank, host, self._check_open)
        self._collectives = StreamCollectives(nccl.core, self._streams.main, self._device, rank, size)
        self._messages = Messages(nccl.core, self._device, self._streams)
        self._compares = host is not None and debugs()

    def on(self, place: torch.device) -> Backend:
        """Return the backend for tensors on a device: itself for its GPU, else the CPUs' backend; local."""
        return self if self.host is None or place.type == self.device.type else self.host

    @property
    def control(self) -> Backend:
        """The backend of the library's own small messages: the CPUs' backend, or itself without one."""
        return self if self.host is None else self.host

    # ---- telling the GPU ----------------------------------------------------------------------------------

    def _run(self, async_op: bool, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        check_flags(async_op=async_op)
        tensors = [each for each in args if isinstance(each, Tensor)]
        tensors += [each for arg in args if isinstance(arg, list) for each in arg if isinstance(each, Tensor)]
        self._prepare(call, tensors)
        carrier = self._carrier(call, tensors)
        if carrier is not self:
            return carrier._run(async_op, call, getattr(carrier, move.__name__), *args)
        return self._tell(async_op, call, move, *args)

    def _prepare(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Compare the ranks' calls and the devices of their tensors, if that is asked for; collective then."""
        self._check_open(call.operation)
        self._messages.flush()  # before the CPUs wait for each other
        if not self._compares:
            return
        assert self.host is not None
        seen = [] if call.operation == "scatter" else tensors  # only the source has a tensor
        place = " and ".join(sorted({tensor.device.type for tensor in seen}))
        keys = self.host.all_gather(torch.tensor([[call.key, crc32(place.encode())]], device="cpu"))
        if bool((keys != keys[0]).any()):
            told = all_gather_object(self.host, (call.key, text_with_site(call), place))
            is_same = len({key for key, *_ in told}) == 1
            raise mismatch_error([f"{text} on {where}" if is_same else text for _, text, where in told])

    def _tell(self, async_op: bool, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        """Tell the GPU an operation whose arguments are checked; collective."""
        if async_op or self.timeout is not None:
            work = self._streams.launch(self._streams.main, call, self._execute, call, move, call, *args)
            if async_op:
                return work
            work.wait(self.timeout)
            return work.value
        self._collectives.use(self._streams.caller(call))
        try:
            return self._execute(call, move, call, *args)
        finally:
            self._collectives.use_own_stream()

    def _failure(self, operation: str, error: Exception) -> AxonmpiError:
        return self._streams.failure(operation, error)

    # ---- the backend of a tensor --------------------------------------------------------------------------

    def _carrier(self, call: Call, tensors: Sequence[Tensor]) -> Backend:
        """Return the backend that runs an operation: that of its tensors' device, itself if it has none; local."""
        if call.operation == "scatter" and self.host is not None:
            return self._carrier_of_scatter(call, tensors)
        if not tensors:
            return self.control if call.operation == "barrier" else self
        first, *others = [self._carrier_of(tensor, call.operation) for tensor in tensors]
        if any(other is not first for other in others):
            places = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(
                f"{call.operation}: expected tensors on one device, got them on {' and '.join(places)}"
            )
        return first

    def _carrier_of(self, tensor: Tensor, operation: str) -> Backend:
        carrier = self.on(tensor.device)
        if carrier is self and tensor.device.index != self.device.index:
            raise ValueError(
                f"{operation}: expected a tensor on {self.device}, the GPU of this rank of the group, got one on "
                f"{tensor.device}; move it with .to({str(self.device)!r})"
            )
        return carrier

    def _carrier_of_scatter(self, call: Call, tensors: Sequence[Tensor]) -> Backend:
        """Return the backend for the tensor of the source, which alone has one; collective over the CPUs."""
        by_gpus = torch.zeros(1, dtype=torch.bool, device="cpu")
        if self.rank == call.root:
            by_gpus.fill_(self._carrier_of(tensors[0], call.operation) is self)
        self.control.broadcast(by_gpus, call.root)
        return self if by_gpus else self.control

    # ---- work for the GPU ---------------------------------------------------------------------------------

    def _reduce(self, call: Call, tensor: Tensor) -> None:
        self._collectives.reduce(tensor, call.op, call.root)

    def reduce_together(self, tensors: Sequence[Tensor], op: ReduceOp) -> bool:
        """Reduce each tensor over all ranks, in place, in one launch; collective.

        Args:
            tensors: Tensors of this rank's GPU, at least one; the same shapes and dtypes on all ranks.
            op: The reduction.

        Returns:
            False if NCCL has no such reduction of one of them; nothing was done then.
        """
        if not all(is_native_reduction(tensor.dtype, op) for tensor in tensors):
            return False  # takes several steps, and a group is launched at its end
        layout = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        shape = (sum(tensor.numel() for tensor in tensors),)
        call = self._call("all_reduce", tensors[0].dtype, shape, op, layout=layout)
        self._prepare(call, tensors)
        self._tell(False, call, lambda _: self._collectives.reduce_together(tensors, op))
        return True

    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        return self._collectives.reduce_scatter(tensor, call.op, dim)

    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        self._collectives.reduce_scatter_into(parts, call.op, output, sizes)

    def _scan(self, call: Call, tensor: Tensor, chosen: range, reverse: bool) -> None:
        self._collectives.scan(tensor, call.op, chosen)

    def _broadcast(self, call: Call, tensor: Tensor) -> None:
        self._collectives.broadcast(tensor, call.root)

    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        rows = list(call.layout[0][1]) if call.layout is not None else self._rows_of_all(tensor.shape[dim])
        return self._collectives.all_gather(tensor, dim, rows)

    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        self._collectives.all_gather_into(output, tensor, sizes)

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor] | None:
        rows = self._rows_of_all(tensor.shape[0] if tensor.dim() else 0)
        shapes = [(size, *tensor.shape[1:]) if tensor.dim() else () for size in rows]
        sends = [tensor if rank == call.root else None for rank in range(self.size)]
        if self.rank != call.root:
            self._collectives.exchange(sends, [None] * self.size)
            return None
        parts = [self._collectives.empty(shape, tensor.dtype) for shape in shapes]
        self._collectives.exchange(sends, parts)
        return parts

    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor:
        words = np.zeros(DESCRIPTION_BYTES // 8, np.int64) if tensor is None else describe(tensor)
        dtype, shape = described(self._numbers_of_all(words)[call.root])
        start, stop = split_range(shape[0], self.size, self.rank)
        part = self._collectives.empty((stop - start, *shape[1:]), dtype)
        sends: Sequence[Tensor | None] = [None] * self.size if tensor is None else tensor.tensor_split(self.size)
        receives = [part if rank == call.root else None for rank in range(self.size)]
        self._collectives.exchange(sends, receives)
        return part

    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        if call.dtype is not None and call.dim is not None and -1 not in call.shape:
            start, stop = split_range(call.shape[call.dim], self.size, self.rank)
            shape = (*call.shape[: call.dim], stop - start, *call.shape[call.dim + 1 :])
            forms = [(call.dtype, shape)] * self.size
        else:
            own = np.stack([describe(tensor) for tensor in tensors])
            answers = self._numbers_of_all(own.reshape(-1)).reshape(self.size, *own.shape)
            forms = [described(row) for row in answers[:, self.rank]]
        received = [self._collectives.empty(shape, dtype) for dtype, shape in forms]
        self._collectives.exchange(tensors, received)
        return received

    def _exchange_rows(self, call: Call, shown: list[Tensor], outputs: list[Tensor], plan: Exchange) -> None:
        self._collectives.keep(*shown, *outputs)
        with self._collectives.on_stream():  # copies into and out of messages, too
            super()._exchange_rows(call, shown, outputs, plan)

    def _swap(self, call: Call, sends: list[Tensor], rows: list[int]) -> list[Tensor]:
        received = [sends[0].new_empty((count, *sends[0].shape[1:])) for count in rows]
        self._collectives.exchange(sends, received)
        return received

    def _rows_of_all(self, rows: int) -> list[int]:
        """Return how many rows each rank has, in rank order; collective."""
        return [int(number) for number in self._numbers_of_all(np.array([rows]))[:, 0]]

    def _numbers_of_all(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [ranks, numbers] of each rank's [numbers], in rank order; collective.

        Without CPUs that are connected the GPUs carry them, and this thread waits for them.
        """
        own = torch.from_numpy(numbers).view(1, -1)
        gather = self._collectives.all_gather_on_cpu if self.host is None else self.host.all_gather
        return gather(own).numpy()

    def _barrier(self, call: Call) -> None:
        self._collectives.barrier()
        self._streams.block("barrier", self._collectives.stream, self.timeout)

    # ---- point to point -----------------------------------------------------------------------------------

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        if host := self._host_of_message(tensor, "isend"):
            return host._isend(tensor, dst, tag)
        return self._messages.post(tensor, self.rank, dst, tag, sends=True)

    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        if host := self._host_of_message(tensor, "irecv"):
            return host._irecv(tensor, src, tag)
        src = check_named(src, self.name)
        torch.autograd.graph.increment_version(tensor)
        return self._messages.post(tensor, src, self.rank, tag, sends=False)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        if host := self._host_of_message(tensor, "send"):
            host._send(tensor, dst, tag)
        else:
            self._isend(tensor, dst, tag).wait()

    def _recv(self, tensor: Tensor, src: int, tag: int) -> None:
        if host := self._host_of_message(tensor, "recv"):
            host._recv(tensor, src, tag)
        else:
            self._irecv(tensor, src, tag).wait()

    def _host_of_message(self, tensor: Tensor, operation: str) -> Backend | None:
        """Return the CPUs' backend for a tensor on the CPU, None for a GPU's; starts posted GPU messages; local."""
        carrier = self._carrier_of(tensor, operation)
        if carrier is self:
            return None
        self._messages.flush()
        return carrier

    # ---- memory -------------------------------------------------------------------------------------------

    def _symmetric_empty(self, call: Call) -> Tensor:
        return torch.empty(call.shape, dtype=call.dtype, device=self.device)

    def _node_empty(self, call: Call) -> Tensor:
        return self._symmetric_empty(call)

    def node_counters(self, count: int) -> NodeCounters:
        """Make counters that the CPUs of each node share, all zero; collective. See `Backend`."""
        if self.host is None:
            raise CommunicatorError("node_counters: GPUs have none in common; use init_process_group('mpi+nccl')")
        return self.host.node_counters(count)

    def _counters(self, memory: Tensor) -> NodeCounters:
        raise AssertionError("made by the CPUs' backend")
