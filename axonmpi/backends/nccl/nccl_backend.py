"""`NcclBackend`: communicators of GPUs, how they are made, divided and ended.

A call returns when it is enqueued, which takes microseconds; work that the caller enqueues after a blocking
operation begins after it. The CPUs of the ranks do not meet, so calls that differ are noticed by NCCL at best,
as a hang at worst: `AXONMPI_DEBUG=1` compares them first, over the CPUs.

Source: NCCL's user guide, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/, and nccl4py 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ...errors import AxonmpiError
from ...launch.topology import Topology
from ...utils.arguments import integer
from ...utils.device import current_gpu, device_at, gpu_count
from ..call import Call
from ..contract import Backend
from ..local import LocalBackend
from ..ranks import Parts
from . import library
from .bootstrap import agree_on, connect_own, connect_ranks, exchange_unique_id, make_unique_id
from .devices import check_choices, choose_device
from .library import NcclUniqueId
from .operations import NcclOperations


class NcclBackend(NcclOperations):
    """A communicator of GPUs, one a rank; collective over its ranks.

    Args:
        unique_id: The same on all ranks, from `generate_unique_id` on one of them.
        rank: This process's number among them.
        world_size: How many there are.
        device: This rank's GPU: its number, or a `torch.device`.
        timeout: Seconds that a blocking operation may take on the GPU; with it each blocks the CPU. None: neither.
        host: The same ranks over their CPUs: carries tensors on the CPU, barriers, sizes that receivers have to
            know, and with `AXONMPI_DEBUG=1` the ranks' calls. Without it the group takes tensors on GPUs only.

    Attributes:
        device: This rank's GPU.
        host: The same.

    Raises:
        NcclError: There is no NCCL or no such GPU, or the ranks cannot reach each other.
        TypeError: `unique_id` is none.
        ValueError: `rank` is not below `world_size`.
    """

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
        super().__init__(connect_ranks(unique_id, rank, size, place, host), rank, size, place, timeout, host)

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
        NcclOperations.__init__(made, communicator, rank, size, place, timeout, host)
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
            topology: The ranks' nodes.

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
        return [
            cls._of(communicator, rank, len(chosen), chosen[rank], None, None)
            for rank, communicator in enumerate(connect_own(chosen))
        ]

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """Return the version of NCCL: major, minor, patch; local, needs no GPU. NcclError without NCCL."""
        return library.nccl_version()

    @staticmethod
    def device_count() -> int:
        """Return how many GPUs this process sees, 0 without CUDA; local."""
        return gpu_count()

    # ---- groups -------------------------------------------------------------------------------------------

    def _divide(self, call: Call, parts: Parts) -> Backend | None:
        host = None if self.host is None else self.host._run(False, call, self.host._divide, parts)
        part, rank = parts.find(self.rank) or (None, 0)
        size = 0 if part is None else len(parts.array(part))
        communicator = None
        if len(parts.ranks) > len(parts):  # a part has several ranks; the same on all of them
            communicator = self._split(part if size > 1 else None, rank)
        if part is None:
            return None
        if size == 1:
            if host is not None:
                host.close()
            return LocalBackend(timeout=self.timeout, memory=self.device)
        return NcclBackend._of(communicator, rank, size, self.device, self.timeout, host)

    def _split(self, color: int | None, key: int) -> Any:
        self._messages.flush()
        # NCCL wants nothing to be under way.
        for stream in (self._device.current_stream(), self._streams.main.stream):
            self._device.block(self._device.record(stream))
        try:
            with self._device.selected():
                return self._streams.main.communicator.split(color, key)
        except self.failures as error:
            raise self._failure("split", error) from error

    def connect_pairs(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give each direction of each pair a communicator and a stream of its own; collective.

        Messages from one rank to another have to be received in the order in which they are sent, whatever their
        tags. Without it all that is sent in a group happens in the order of the calls, and a tag has to be 0.

        Args:
            pairs: Source and destination of each direction that is used; the same on all ranks.
        """
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

    # ---- life ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Enqueue the posted messages, wait for them, and release the communicators; collective in effect.

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
        self._streams.check("synchronize", self._streams.main)

    def abort(self, code: int = 1) -> None:
        """End this rank's work on the GPU for the group, also operations that wait for others, then the job; local.

        Without CPUs that are connected the job goes on: all ranks have to abort, or to end.

        Args:
            code: Exit code of the job.
        """
        if self.host is not None and self.is_open:
            self.host.abort(code)  # under MPI it ends the process, and with it the work on its GPU
        self.abort_communicator()

    def abort_communicator(self) -> None:
        """End this rank's work on the GPU for the group, also operations that wait for others; local.

        The group cannot be used any more. NCCL asks all ranks to do so.

        Raises:
            NcclError: NCCL could not do so.
        """
        if self.is_open:
            self.invalidate("it was aborted")
            try:
                self._streams.abort()
            except self.failures as error:
                raise library.nccl_error("abort", error) from error

    def check_peers(self, what: str, peer: int | None = None) -> None:
        """Raise the error that NCCL has come to, if any; local."""
        self._streams.check(what, self._streams.main)
        if self.host is not None:
            self.host.check_peers(what, peer)

    def _release(self) -> None:
        try:
            self._streams.close()
        finally:
            if self.host is not None:
                self.host.close()


def _place_of(device: object) -> torch.device:
    """Return the device that a number or a `torch.device` means."""
    if not isinstance(device, torch.device):
        return torch.device("cuda", integer("device", device, minimum=0))
    return torch.device("cuda", current_gpu()) if device == torch.device("cuda") else device
