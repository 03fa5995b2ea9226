"""Collectives and messages of GPUs, by NCCL.

    blocking        caller's stream: what it was told ── NCCL ── what it is told next
    asynchronous    caller's stream ── event ──▶ group's stream: NCCL ── event ──▶ Work.wait(): caller's stream

A call returns when the GPU was told, which takes microseconds; what the caller tells the GPU after a blocking
operation begins after it. The CPUs of the ranks do not meet, so calls that differ are noticed by NCCL at best,
as a hang at worst: `AXONMPI_DEBUG=1` compares them first, over the CPUs.

Where the receiver cannot know sizes, ranks tell each other over the CPUs, if the group has them, before the GPU is
told: all_gather without `sizes`, gather, scatter, all_to_all of free shapes.

The file is long because it is a communicator from its making to its end; what NCCL does with tensors is in
`collectives.py`, messages are in `messages.py`.

Source: NCCL's user guide, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/, and nccl4py 0.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ...errors import AxonmpiError, CollectiveTimeoutError, CommunicatorError, NcclError
from ...launch.settings import debugs
from ...launch.topology import Topology
from ...types import Observer, ReduceOp, Work
from ...utils.arguments import check_flags, integer
from ...utils.device import Device, current_gpu, device_at, gpu_count
from ...utils.partition import split_range
from ..buffers import DESCRIPTION_BYTES, describe, described
from ..call import Call, mismatch_error
from ..call_site import text_with_site
from ..checks import check_named
from ..connection.counters import NodeCounters
from ..contract import Backend
from ..flat_parts import FlatParts
from ..local import LocalBackend
from ..objects import all_gather_object
from ..ranks import Parts
from ..worker import AtOnce
from . import library
from .bootstrap import agree_on, connect_all, exchange_unique_id, make_unique_id
from .collectives import StreamCollectives
from .devices import check_choices, choose_device
from .dtypes import is_native_reduction
from .library import NcclUniqueId
from .messages import Channel, Messages
from .work import NcclWork

__all__ = ["NcclBackend"]

CLOSE_SECONDS = 10.0
"""How long closing a group waits for what its GPU still does."""


class NcclBackend(Backend):
    """A communicator of GPUs, one a rank; collective over its ranks.

    Args:
        unique_id: The same on all ranks, from `generate_unique_id` on one of them.
        rank: This process's number among them.
        world_size: How many there are.
        device: This rank's GPU: its number, or a `torch.device`.
        timeout: Seconds that a blocking operation may take on the GPU; with it each blocks the CPU. None: neither.
        host: The same ranks over their CPUs: carries tensors on the CPU, barriers, sizes that receivers have to
            know, and with `AXONMPI_DEBUG=1` what the ranks call. Without it the group takes tensors on GPUs only.

    Attributes:
        device: This rank's GPU.
        host: The same.

    Raises:
        NcclError: There is no NCCL or no such GPU, or the ranks cannot reach each other.
        TypeError: `unique_id` is none.
        ValueError: `rank` is not below `world_size`.
    """

    name = "nccl"
    device_types: tuple[str, ...] = ("cuda",)

    def __init__(
        self,
        unique_id: NcclUniqueId,
        rank: int,
        world_size: int,
        device: torch.device | int,
        *,
        timeout: float | None = None,
        host: Backend | None = None,
    ) -> None:
        if not isinstance(unique_id, NcclUniqueId):
            raise TypeError(f"unique_id: expected an axonmpi.NcclUniqueId, got {type(unique_id).__name__}")
        size = integer("world_size", world_size, minimum=1)
        if integer("rank", rank, minimum=0) >= size:
            raise ValueError(f"rank: expected 0 to {size - 1}, got {rank}")
        place = _place_of(device)

        def connect() -> Any:
            _check_visible(place)
            nccl = library.load()
            try:
                return nccl.core.Communicator.init(size, rank, nccl.core.UniqueId.from_bytes(bytes(unique_id)))
            except nccl.failures as error:
                raise library.nccl_error(f"rank {rank} could not connect", error) from error

        if host is None:
            _check_visible(place)
            communicator = _on_device(place, connect)
        else:
            communicator = connect_all(host, place, connect)
        self._take(communicator, rank, size, place, timeout, host)

    def _take(
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
            self.notes = host.notes  # one group of the rank's page: what the GPU is told, and what goes over CPUs
        nccl = library.load()
        self.device = self.place = place
        self.device_types = (place.type,) if host is None else (place.type, *host.device_types)
        self.failures = nccl.failures
        self._core = nccl.core
        self._device: Device = device_at(place)
        self._main = Channel(communicator, self._device)
        self._collectives = StreamCollectives(nccl.core, self._main, self._device, rank, size)
        self._messages = Messages(nccl.core, self._device, self._main, self._launch)
        self._compares = host is not None and debugs()
        self._latest: Any = None  # the event behind the last operation that was told to the group's stream

    @classmethod
    def _of(
        cls,
        communicator: Any,
        rank: int,
        size: int,
        place: torch.device,
        timeout: float | None,
        host: Backend | None,
    ) -> NcclBackend:
        """Make a backend of a communicator that is connected already; local."""
        made = cls.__new__(cls)
        made._take(communicator, rank, size, place, timeout, host)
        return made

    # ---- making them --------------------------------------------------------------------------------------

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """Make an id, by which ranks find each other, on one of them; local, needs no GPU.

        Raises:
            NcclError: NCCL cannot be loaded, or finds no network.
        """
        return make_unique_id()

    @classmethod
    def init_from_unique_id(
        cls,
        unique_id: NcclUniqueId | bytes,
        rank: int,
        world_size: int,
        device: torch.device | int,
        *,
        timeout: float | None = None,
    ) -> NcclBackend:
        """Connect the ranks that have one id, which may have travelled as bytes; collective. See the class."""
        unique_id = unique_id if isinstance(unique_id, NcclUniqueId) else NcclUniqueId(unique_id)
        return cls(unique_id, rank, world_size, device, timeout=timeout)

    @classmethod
    def over(cls, host: Backend, device: torch.device | int, *, timeout: float | None = None) -> NcclBackend:
        """Connect the GPUs of ranks that have another backend already, over which the id travels; collective.

        Args:
            host: The other backend; kept, and used as `NcclBackend` says.
            device: This rank's GPU.
            timeout: As for the class.

        Raises:
            NcclError: On all ranks, if any of them cannot connect.
        """
        return cls(exchange_unique_id(host), host.rank, host.size, device, timeout=timeout, host=host)

    @classmethod
    def for_world(cls, host: Backend, topology: Topology) -> NcclBackend:
        """Connect the GPUs of all ranks of a world, one each, and make each its rank's current one; collective.

        Args:
            host: All ranks over their CPUs.
            topology: Where this rank is.

        Raises:
            NcclError: A rank has no GPU or no NCCL, two have one GPU, or versions differ; on all ranks.
        """
        chosen = agree_on(host, lambda: choose_device(topology))
        check_choices(chosen)
        made = cls.over(host, chosen[host.rank].index, timeout=host.timeout)
        device_at(made.device).use()
        return made

    @classmethod
    def create_world(cls, devices: Sequence[int]) -> list[NcclBackend]:
        """Make a communicator of several GPUs of this process, each to be used by a thread of its own; local.

        Args:
            devices: Different numbers of GPUs that this process sees.

        Returns:
            The backends, one a GPU, in the order given.

        Raises:
            ValueError: `devices` are none, or not different.
            NcclError: There is no NCCL, no such GPU, or it cannot be used.
        """
        chosen = [_place_of(device) for device in devices]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"devices: expected different numbers of GPUs, got {list(devices)}")
        for place in chosen:
            _check_visible(place)
        nccl = library.load()
        try:
            made = nccl.core.Communicator.init_all([place.index for place in chosen])
        except nccl.failures as error:
            raise library.nccl_error(f"GPUs {list(devices)} could not be connected", error) from error
        return [
            cls._of(each, rank, len(chosen), place, None, None)
            for rank, (each, place) in enumerate(zip(made, chosen, strict=True))
        ]

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """Return the version of NCCL: major, minor, patch; local, needs no GPU. NcclError without NCCL."""
        return library.nccl_version()

    @staticmethod
    def device_count() -> int:
        """Return how many GPUs this process sees, 0 without CUDA; local."""
        return gpu_count()

    def close(self) -> None:
        """Tell the GPU what is posted, wait for it, and release the communicators; collective in effect.

        It may be called twice.

        Raises:
            CommunicatorError: The GPU is not done after 10 s: other ranks have not called the same.
        """
        if self.is_open:
            with suppress(AxonmpiError):  # of a group that has failed: the calls that failed have told
                self._messages.flush()
        super().close()

    def synchronize(self) -> None:
        """Block until the GPU has done all that this process told it; local."""
        self._messages.flush()
        self._device.synchronize()
        self._check_healthy("synchronize", self._main)

    def on(self, place: torch.device) -> Backend:
        """Return what carries tensors on a device: itself for its GPU, else the CPUs' backend; local."""
        return self if self.host is None or place.type == self.device.type else self.host

    @property
    def control(self) -> Backend:
        """What carries small messages of the library: the CPUs' backend where there is one."""
        return self if self.host is None else self.host

    @property
    def observer(self) -> Observer | None:
        """Told about each operation, on GPUs and on CPUs."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        if self.host is not None:
            self.host.observer = observer

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
        """Compare the ranks' calls and where their tensors are, if that is asked for; collective then."""
        self._check_open(call.operation)
        self._messages.flush()  # before the CPUs wait for each other
        if not self._compares:
            return
        assert self.host is not None
        seen = [] if call.operation == "scatter" else tensors  # of which one rank alone has any
        place = " and ".join(sorted({tensor.device.type for tensor in seen}))
        keys = self.host.all_gather(torch.tensor([[call.key, crc32(place.encode())]], device="cpu"))
        if bool((keys != keys[0]).any()):
            told = all_gather_object(self.host, (call.key, text_with_site(call), place))
            is_same = len({key for key, *_ in told}) == 1
            raise mismatch_error([f"{text} on {where}" if is_same else text for _, text, where in told])

    def _tell(self, async_op: bool, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        """Tell the GPU an operation whose arguments are checked; collective."""
        told = (self._execute, call, move, call, *args)
        if not async_op and self.timeout is None:
            return self._follow(call, *told)
        work = self._launch(self._main, call, *told)
        if async_op:
            return work
        work.wait(self.timeout)
        return work.value

    def _follow(self, operation: Call, move: Callable[..., Any], *args: Any) -> Any:
        """Tell the caller's own stream to do something: it would wait for the group's stream anyway; local.

        The communicator's operations on different streams follow each other, see "Using multiple streams" in
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/streams.html.
        """
        self._check_healthy(operation, self._main)
        stream = self._device.current_stream()
        if self._latest is not None:
            self._device.wait(stream, self._latest)
            self._latest = None
        self._collectives.use(stream)
        try:
            return move(*args)
        except self.failures as error:
            raise self._failure(str(operation), error) from error
        finally:
            self._collectives.use_own_stream()

    def _carrier(self, call: Call, tensors: Sequence[Tensor]) -> Backend:
        """Return what carries an operation: by where its tensors are, of those without any by what it is; local."""
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
        """Return what carries the tensor of the source, which alone has one; collective over the CPUs."""
        assert self.host is not None
        assert call.root is not None
        by_gpus = torch.zeros(1, dtype=torch.bool, device="cpu")
        if self.rank == call.root:
            by_gpus.fill_(self._carrier_of(tensors[0], call.operation) is self)
        self.host.broadcast(by_gpus, call.root)
        return self if by_gpus else self.host

    def _launch(self, channel: Channel, operation: Call | str, move: Callable[..., Any], *args: Any) -> NcclWork:
        """Tell a stream of the group to do something after what the caller's stream was told; local."""
        device = self._device
        self._check_healthy(operation, channel)
        device.wait(channel.stream, device.record(device.current_stream()))
        try:
            value = move(*args)
        except self.failures as error:
            raise self._failure(str(operation), error) from error
        check = partial(self._check_waiting, channel=channel)
        done = device.record(channel.stream)
        if channel is self._main:
            self._latest = done
        return NcclWork(operation, device, done, value, check)

    def _check_waiting(self, operation: Call | str, channel: Channel) -> None:
        """Raise what ends waiting for an operation: an error that NCCL has come to, a rank that failed; local."""
        self._check_healthy(operation, channel)
        if self.host is not None:
            self.host.check_peers(str(operation))

    def _check_healthy(self, operation: Call | str, channel: Channel) -> None:
        """Raise what NCCL has come to since it was asked last; local."""
        if self._closed is not None:
            self._check_open(str(operation))
        self._check_state(operation, channel)

    def _check_state(self, operation: Call | str, channel: Channel) -> None:
        """Raise the error that a communicator has come to; local."""
        state = channel.communicator.get_async_error()
        if state:
            error = NcclError(self._core.get_error_string(state))
            raise library.nccl_error(f"{operation} on rank {self.rank}", error, channel.communicator)

    def _failure(self, operation: str, error: Exception) -> AxonmpiError:
        return library.nccl_error(f"{operation} failed on rank {self.rank}", error, self._main.communicator)

    # ---- what the GPU is told -----------------------------------------------------------------------------

    def _reduce(self, call: Call, tensor: Tensor) -> None:
        assert call.op is not None
        self._collectives.reduce(tensor, call.op, call.root)

    def reduce_together(self, tensors: Sequence[Tensor], op: ReduceOp) -> bool:
        """Reduce each tensor over all ranks, in place, in one launch; collective. See `Backend`."""
        if not all(is_native_reduction(tensor.dtype, op) for tensor in tensors):
            return False  # takes several steps, and a group is launched at its end
        layout = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        shape = (sum(tensor.numel() for tensor in tensors),)
        call = self._call("all_reduce", tensors[0].dtype, shape, op, layout=layout)
        self._prepare(call, tensors)
        self._tell(False, call, lambda _: self._collectives.reduce_together(tensors, op))
        return True

    def _reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        assert call.op is not None
        return self._collectives.reduce_scatter(tensor, call.op, dim)

    def _reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        assert call.op is not None
        self._collectives.reduce_scatter_into(parts, call.op, output, sizes)

    def _broadcast(self, call: Call, tensor: Tensor) -> None:
        assert call.root is not None
        self._collectives.broadcast(tensor, call.root)

    def _all_gather(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        rows = list(call.layout[0][1]) if call.layout is not None else self._tell_all(tensor.shape[dim])
        return self._collectives.all_gather(tensor, dim, rows)

    def _all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        self._collectives.all_gather_into(output, tensor, sizes)

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor] | None:
        rows = self._tell_all(tensor.shape[0] if tensor.dim() else 0)
        sends: list[Tensor | None] = [None] * self.size
        receives: list[Tensor | None] = [None] * self.size
        assert call.root is not None
        sends[call.root] = tensor
        if self.rank != call.root:
            self._collectives.exchange(sends, receives)
            return None
        parts = [
            self._collectives.empty((size, *tensor.shape[1:]) if tensor.dim() else (), tensor.dtype)
            for size in rows
        ]
        self._collectives.exchange(sends, parts)
        return parts

    def _scatter(self, call: Call, tensor: Tensor | None) -> Tensor:
        assert call.root is not None
        words = np.zeros(DESCRIPTION_BYTES // 8, np.int64) if tensor is None else describe(tensor)
        told = self._gather_on_cpus(torch.from_numpy(words.view(np.uint8)))
        dtype, shape = described(told[call.root].numpy().view(np.int64))
        start, stop = split_range(shape[0], self.size, self.rank)
        part = self._collectives.empty((stop - start, *shape[1:]), dtype)
        sends: Sequence[Tensor | None] = [None] * self.size if tensor is None else tensor.tensor_split(self.size)
        receives: list[Tensor | None] = [None] * self.size
        receives[call.root] = part
        self._collectives.exchange(sends, receives)
        return part

    def _all_to_all(self, call: Call, tensors: list[Tensor]) -> list[Tensor]:
        if call.dtype is not None and call.dim is not None and -1 not in call.shape:
            start, stop = split_range(call.shape[call.dim], self.size, self.rank)
            shape = (*call.shape[: call.dim], stop - start, *call.shape[call.dim + 1 :])
            forms = [(call.dtype, shape)] * self.size
        else:
            own = np.stack([describe(tensor) for tensor in tensors])
            told = self._gather_on_cpus(torch.from_numpy(own.reshape(-1).view(np.uint8)))
            answers = told.numpy().view(np.int64).reshape(self.size, *own.shape)
            forms = [described(row) for row in answers[:, self.rank]]
        received = [self._collectives.empty(shape, dtype) for dtype, shape in forms]
        self._collectives.exchange(tensors, received)
        return received

    def _tell_all(self, size: int) -> list[int]:
        """Return a number of each rank, in rank order; collective over the CPUs."""
        told = self._gather_on_cpus(torch.tensor([size], device="cpu").view(torch.uint8))
        sizes: list[int] = told.view(torch.int64).view(-1).tolist()
        return sizes

    def _gather_on_cpus(self, content: Tensor) -> Tensor:
        """Return [ranks, bytes] what each rank tells, [bytes] of uint8; collective.

        Without CPUs that are connected the GPUs carry it, and this thread waits for them.
        """
        if self.host is not None:
            told: Tensor = self.host.all_gather(content.view(1, -1))
            return told
        return self._collectives.all_gather_bytes(content)

    def _barrier(self, call: Call) -> None:
        self._collectives.barrier()
        done = self._device.record(self._collectives.stream)
        check = partial(self._check_waiting, channel=self._main)
        NcclWork("barrier", self._device, done, None, check).block(self.timeout)

    # ---- groups -------------------------------------------------------------------------------------------

    def _divide(self, call: Call, parts: Parts) -> Backend | None:
        host = None if self.host is None else self.host._run(False, call, self.host._divide, parts)
        found = parts.find(self.rank)
        size = 0 if found is None else len(parts.array(found[0]))
        communicator = None
        if len(parts.ranks) > len(parts):  # a part has several ranks; the same on all of them
            communicator = self._split(*(found if found is not None and size > 1 else (None, 0)))
        if found is None:
            return None
        if size == 1:
            if host is not None:
                host.close()
            return LocalBackend(timeout=self.timeout, memory=self.device)
        return NcclBackend._of(communicator, found[1], size, self.device, self.timeout, host)

    def _split(self, color: int | None, key: int) -> Any:
        self._messages.flush()
        for stream in (self._device.current_stream(), self._main.stream):  # NCCL wants nothing to be under way
            self._device.block(self._device.record(stream))
        try:
            return _on_device(self.device, lambda: self._main.communicator.split(color, key))
        except self.failures as error:
            raise self._failure("split", error) from error

    # ---- point to point -----------------------------------------------------------------------------------

    def connect_pairs(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give each direction of each pair a communicator and a stream of its own; collective. See `Backend`."""
        for together in self._messages.rounds_to_connect(pairs):
            color = next((number for number, pair in enumerate(together) if self.rank in pair), None)
            communicator = self._split(color, 0 if color is None else together[color].index(self.rank))
            if color is not None:
                self._messages.add_channel(together[color], communicator)
                self._greet(*together[color])

    def _greet(self, src: int, dst: int) -> None:
        """Send a byte on a new channel: NCCL connects at the first message, for which both CPUs wait; collective.

        Source: https://github.com/NVIDIA/nccl, `src/enqueue.cc` (p2pTaskAppend) and `src/transport.cc`.
        """
        greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._messages.post(greeting, src, dst, 0, sends=self.rank == src)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        if host := self._host_of_message(tensor, "isend"):
            return host._isend(tensor, dst, tag)
        return self._messages.post(tensor, self.rank, dst, tag, sends=True)

    def _irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        src = check_named(src, self.name)
        if host := self._host_of_message(tensor, "irecv"):
            return host._irecv(tensor, src, tag)
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
        """Return what carries a message of the CPUs, behind what GPUs have posted; None for a GPU's; local."""
        carrier = self._carrier_of(tensor, operation)
        if carrier is self:
            return None
        self._messages.flush()
        return carrier

    # ---- memory -------------------------------------------------------------------------------------------

    def _symmetric_empty(self, call: Call) -> Tensor:
        assert call.dtype is not None
        return torch.empty(call.shape, dtype=call.dtype, device=self.device)

    def _node_empty(self, call: Call) -> Tensor:
        return self._symmetric_empty(call)

    def node_counters(self, count: int) -> NodeCounters:
        """Make counters that the CPUs of each node have in common, all zero; collective. See `Backend`."""
        if self.host is None:
            raise CommunicatorError("node_counters: GPUs have none in common; use init_process_group('mpi+nccl')")
        return self.host.node_counters(count)

    def _counters(self, memory: Tensor) -> NodeCounters:
        raise AssertionError("made by the CPUs' backend")

    # ---- life ---------------------------------------------------------------------------------------------

    def abort(self, code: int = 1) -> None:
        """End what this rank's GPU does for the group, also what waits for others, then the whole job; local.

        Without CPUs that are connected the job goes on: all ranks have to abort, or to end.

        Args:
            code: Exit code of the job.
        """
        if self.host is not None and self.is_open:
            self.host.abort(code)  # under MPI it ends the process, and with it what its GPU does
        self.abort_communicator()

    def abort_communicator(self) -> None:
        """End what this rank's GPU does for the group, also what waits for others; local.

        The group cannot be used any more. NCCL asks all ranks to do so.

        Raises:
            NcclError: NCCL could not do so.
        """
        if not self.is_open:
            return
        self.invalidate("it was aborted")
        try:
            self._abort_channels()
        except self.failures as error:
            raise library.nccl_error("abort", error) from error

    def _abort_channels(self) -> None:
        with self._core.group():  # one after the other, each would wait for what the next still does
            for channel in (*self._messages.channels, self._main):
                channel.communicator.abort()

    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Raise the error that NCCL has come to, if any; local."""
        self._check_healthy(what, self._main)
        if self.host is not None:
            self.host.check_peers(what, peer)

    def _release(self) -> None:
        channels = (*self._messages.channels, self._main)
        failed: tuple[type[Exception], ...] = (AxonmpiError, *self.failures)
        try:
            for channel in channels:
                self._end(channel, channel.stream)
            self._end(self._main, self._device.current_stream())
            for channel in channels:
                channel.communicator.destroy()
        except CollectiveTimeoutError as error:
            self._abort_channels()
            raise CommunicatorError(
                f"the GPU of rank {self.rank} still waited for operations that other ranks have not called when "
                "the group was closed, and was made to stop; wait for every Work before closing"
            ) from error
        except failed:  # of which the calls that failed have told
            self._abort_channels()
        finally:
            if self.host is not None:
                self.host.close()

    def _end(self, channel: Channel, stream: Any) -> None:
        """Wait until a stream has done what it was told; local."""
        check = partial(self._check_ending, channel=channel)
        NcclWork("close", self._device, self._device.record(stream), None, check).block(CLOSE_SECONDS)

    def _check_ending(self, operation: Call | str, channel: Channel) -> None:
        """Raise what ends the waiting for a group that is closed; local."""
        self._check_state(operation, channel)
        if self.host is not None:
            self.host.check_peers(str(operation))


def _place_of(device: object) -> torch.device:
    """Return the device that a number or a `torch.device` means."""
    if not isinstance(device, torch.device):
        return torch.device("cuda", integer("device", device, minimum=0))
    number: int | None = device.index
    if device.type == "cuda" and number is None:
        return torch.device("cuda", current_gpu())
    return device


def _check_visible(place: torch.device) -> None:
    """Raise unless this process sees a GPU."""
    if place.type == "cuda" and place.index >= gpu_count():
        raise NcclError(
            f"device: expected one of {gpu_count()} GPUs that this process sees, got {place.index}; look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def _on_device(place: torch.device, connect: Callable[[], Any]) -> Any:
    """Call a function while a GPU is this thread's current one; local."""
    with device_at(place).selected():
        return connect()
