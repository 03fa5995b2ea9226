"""Devices of tensors, the CPU or a GPU, behind one interface: streams, events, pinned memory.

A GPU computes asynchronously. Work in one stream runs in order; work in two streams is ordered only by events:

    caller's stream     compute gradient ── event 1 ── compute ─────── wait for event 2 ── use the sum
                                               │                            ▲
    group's stream                     wait for event 1 ── all_reduce ── event 2

Torch reuses memory as soon as its last tensor is freed, even if another stream still has work on it: `Device.keep`
prevents that. On the CPU each operation is complete when its call returns, so streams and events are None. No other
file of the library uses `torch.cuda`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .torch_internals import assert_later

_collection = threading.Lock()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running in the `with` block.

    `Generator.get_state()` holds a mutex while it allocates. A collection there may run finalizers in Python,
    during which another thread runs; if that thread waits for the mutex, both are deadlocked.
    """
    with _collection:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


_STREAMS = 32
"""Number of streams of one priority in torch's pool of a GPU."""


class Device:
    """A synchronous device, such as the CPU; its streams and events are None.

    Args:
        place: The torch device, with its index.

    Attributes:
        place: The torch device.
        is_asynchronous: True if calls return before the device has computed.
    """

    is_asynchronous = False

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place})"

    @property
    def name(self) -> str:
        """Name of the device, for people."""
        return self.place.type.upper()

    def use(self) -> None:
        """Make it this thread's current device; local."""

    def selected(self) -> AbstractContextManager[Any]:
        """Make it this thread's current device for the duration of a `with` block; local."""
        return nullcontext()

    def current_stream(self) -> Any:
        """Return the stream that this thread's computations go to; local."""
        return None

    def new_stream(self, apart_from: Sequence[Any] = ()) -> Any:
        """Return a stream that is not among `apart_from`; local."""
        return None

    def handle(self, stream: Any) -> int:
        """Return the address of a stream, for NCCL; local."""
        return 0

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Send this thread's computations to `stream` for the duration of a `with` block; local."""
        return nullcontext()

    def record(self, stream: Any) -> Any:
        """Record an event behind the work in `stream` and return it; local."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work in `stream` wait for `event`; local, does not block."""

    def is_complete(self, event: Any) -> bool:
        """Return True if an event is complete; local, does not block."""
        return True

    def block(self, event: Any) -> None:
        """Block this thread until an event is complete; local."""

    def mark(self) -> Any:
        """Record a time stamp behind the work in the current stream and return it; local."""
        return time.perf_counter()

    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; local, blocks this thread until the device has reached both."""
        return float(last - first)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of another stream's tensor until the work in `stream` is done; local."""

    def synchronize(self) -> None:
        """Block this thread until all work of the device is done; local."""

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate pinned CPU memory, for copies beside computation; local."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor on the device: the tensor itself, or an asynchronous copy; local."""
        return tensor

    def random_state(self) -> Tensor:
        """Return the state of the default generator, [bytes] of uint8 on the CPU; local."""
        with _without_collection():
            return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the default generator; local."""
        torch.set_rng_state(state)

    def numbers(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of one-element tensors, with at most one wait for the device; local."""
        return [float(tensor) for tensor in tensors]

    def check_range(self, values: Tensor, stop: int, message: Callable[[int, int], str]) -> None:
        """Raise unless integers are from 0 to `stop` - 1; local.

        An asynchronous device checks them later, as torch checks indices there: the process fails with the work
        that follows.

        Args:
            values: [any shape] integers on the device, at least one.
            stop: The smallest number that is too large.
            message: Makes the error's text from the smallest and the largest value.

        Raises:
            ValueError: A value is out of range.
        """
        least, most = (int(bound) for bound in values.aminmax())
        if least < 0 or most >= stop:
            raise ValueError(message(least, most))


class CudaDevice(Device):
    """A GPU."""

    is_asynchronous = True

    @property
    def name(self) -> str:
        """NVIDIA's name of the GPU."""
        return torch.cuda.get_device_name(self.place)

    def use(self) -> None:
        """Make it this thread's current device; local."""
        torch.cuda.set_device(self.place)

    def selected(self) -> AbstractContextManager[Any]:
        """Make it this thread's current device for the duration of a `with` block; local."""
        return torch.cuda.device(self.place)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream that this thread's computations go to; local."""
        return torch.cuda.current_stream(self.place)

    def new_stream(self, apart_from: Sequence[torch.cuda.Stream] = ()) -> torch.cuda.Stream:
        """Return a stream of high priority that is not among `apart_from`; local.

        Torch has a pool of 32 streams on a GPU and hands them out in turn, so two calls may return one stream.

        Raises:
            RuntimeError: All streams of the pool are in `apart_from`.
        """
        taken = {stream.cuda_stream for stream in apart_from}
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(self.place, priority=-1)
            if stream.cuda_stream not in taken:
                return stream
        raise RuntimeError(f"all {_STREAMS} streams of {self.place} are in use: connect fewer pairs of ranks")

    def handle(self, stream: torch.cuda.Stream) -> int:
        """Return the address of a stream, for NCCL; local."""
        return stream.cuda_stream

    def within(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Send this thread's computations to `stream` for the duration of a `with` block; local."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event behind the work in `stream` and return it; local."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make later work in `stream` wait for `event`; local, does not block."""
        stream.wait_event(event)

    def is_complete(self, event: torch.cuda.Event) -> bool:
        """Return True if an event is complete; local, does not block."""
        return bool(event.query())

    def block(self, event: torch.cuda.Event) -> None:
        """Block this thread until an event is complete; local."""
        event.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Record a time stamp behind the work in the current stream and return it; local."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def seconds_between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Return the seconds between two marks; local, blocks this thread until the device has reached both."""
        first.synchronize()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory of another stream's tensor until the work in `stream` is done; local."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Block this thread until all work of the device is done; local."""
        torch.cuda.synchronize(self.place)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate pinned CPU memory, for copies beside computation; local."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return an asynchronous copy of a CPU tensor on the GPU; local."""
        pinned = self.pinned_empty(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(self.place, non_blocking=True)

    def random_state(self) -> Tensor:
        """Return the state of the default generator, [bytes] of uint8 on the CPU; local."""
        return torch.cuda.get_rng_state(self.place)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the default generator; local."""
        torch.cuda.set_rng_state(state, self.place)

    def numbers(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of one-element tensors, with at most one wait for the device; local."""
        return list(map(float, torch.stack([tensor.to(self.place) for tensor in tensors]).tolist()))

    def check_range(self, values: Tensor, stop: int, message: Callable[[int, int], str]) -> None:
        """Check on the GPU that integers are from 0 to `stop` - 1; local, asynchronous."""
        assert_later(((values >= 0) & (values < stop)).all(), f"expected numbers from 0 to {stop - 1}")


_DRIVER = Path("/proc/driver/nvidia/version")
KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": cache(Device), "cuda": cache(CudaDevice)}
"""Class of the interface for each type of device."""


def device_at(place: torch.device) -> Device:
    """Return the interface of a torch device; a synchronous one for unknown types; local."""
    return KINDS.get(place.type, Device)(place)


def gpu_count() -> int:
    """Return the number of GPUs that this process sees, 0 without CUDA; local."""
    return torch.cuda.device_count()


def current_gpu() -> int:
    """Return the number of this thread's current GPU; local."""
    return torch.cuda.current_device()


def gpu_identity(index: int) -> str:
    """Return the unique id of a GPU, the same in every process; local."""
    return str(torch.cuda.get_device_properties(index).uuid)


def peer_access(index: int, other: int) -> bool:
    """Return True if a GPU can access the memory of another GPU directly; local."""
    return torch.cuda.can_device_access_peer(index, other)


def driver_version() -> str:
    """Return the version of NVIDIA's driver, empty if unknown; local, needs no GPU."""
    if not _DRIVER.exists():
        return ""
    words = _DRIVER.read_text().split()
    return next((word for word in words if word[:1].isdecimal() and "." in word), "")
