"""What the library asks of the device that tensors are on: streams, events, pinned memory.

A GPU computes later than it is told to. What is told through one stream happens in order; between two streams
nothing is ordered unless one waits for an event of the other:

    caller's stream     compute gradient ── event 1 ── compute ─────── wait for event 2 ── use the sum
                                               │                            ▲
    group's stream                     wait for event 1 ── all_reduce ── event 2

Memory that a stream uses has to be kept for it, or torch gives it to somebody else as soon as its last tensor is
gone, though the stream has not come to it yet. On the CPU each operation is over when its call returns, so there is
nothing to order. No other file of the library uses `torch.cuda`.
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

    `Generator.get_state()` holds a mutex while it allocates. A collection there may run finalizers in Python, which
    let another thread run, and if that waits for the mutex, neither goes on.
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
"""How many streams of a priority torch has on a GPU."""


class Device:
    """A device that computes when it is told to, as the CPU does; its streams and events are None.

    Args:
        place: Which one, with its index.

    Attributes:
        place: The same.
        is_asynchronous: Whether it computes later than it is told to.
    """

    is_asynchronous = False

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place})"

    @property
    def name(self) -> str:
        """What it is called, for people."""
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
        """Make a stream that is none of some others; local."""
        return None

    def handle(self, stream: Any) -> int:
        """Return a stream's address, for libraries that take it as a number; local."""
        return 0

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Send this thread's computations to `stream` for the duration of a `with` block; local."""
        return nullcontext()

    def record(self, stream: Any) -> Any:
        """Return an event that is complete when all that `stream` was told so far is done; local."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Let what `stream` is told from now on begin after `event`; local, does not block."""

    def is_complete(self, event: Any) -> bool:
        """Say whether an event is complete, without blocking."""
        return True

    def block(self, event: Any) -> None:
        """Block this thread until an event is complete; local."""

    def mark(self) -> Any:
        """Note the time at which this device has done what the current stream was told so far; local."""
        return time.perf_counter()

    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks; local, blocks this thread until the device has come to both."""
        return float(last - first)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a tensor that another stream allocated until `stream` has done what it was told."""

    def synchronize(self) -> None:
        """Block this thread until the device has done all that it was told; local."""

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the CPU that copies to and from the device run beside computation; local."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU on the device: itself, or a copy that this thread does not wait for; local."""
        return tensor

    def random_state(self) -> Tensor:
        """Return the state of its default generator, [bytes] of uint8 on the CPU; local."""
        with _without_collection():
            return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of its default generator; local."""
        torch.set_rng_state(state)

    def numbers(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of tensors of one element, with one wait for the device at most; local."""
        return [float(tensor) for tensor in tensors]

    def check_range(self, values: Tensor, stop: int, message: Callable[[int, int], str]) -> None:
        """Raise if integers are not from 0 to `stop` - 1; local.

        A device that computes later looks at them when it comes to them, without this thread waiting: as with
        torch's own checks of indices there, what follows fails then, and the process with it.

        Args:
            values: At least one, on the device.
            stop: The first number that is too large.
            message: Makes the error's text from the least and the largest.

        Raises:
            ValueError: One of them is out of range.
        """
        least, most = (int(bound) for bound in values.aminmax())
        if least < 0 or most >= stop:
            raise ValueError(message(least, most))


class CudaDevice(Device):
    """A GPU."""

    is_asynchronous = True

    @property
    def name(self) -> str:
        """What NVIDIA calls it."""
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
        """Make a stream that is none of some others, ahead of computation where both have work; local.

        Torch has 32 of them on a GPU, and hands them out in turn: two may be one.

        Raises:
            RuntimeError: All of them are among the others.
        """
        taken = {stream.cuda_stream for stream in apart_from}
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(self.place, priority=-1)
            if stream.cuda_stream not in taken:
                return stream
        raise RuntimeError(f"all {_STREAMS} streams of {self.place} are in use: connect fewer pairs of ranks")

    def handle(self, stream: torch.cuda.Stream) -> int:
        """Return a stream's address, for libraries that take it as a number; local."""
        return stream.cuda_stream

    def within(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Send this thread's computations to `stream` for the duration of a `with` block; local."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that is complete when all that `stream` was told so far is done; local."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let what `stream` is told from now on begin after `event`; local, does not block."""
        stream.wait_event(event)

    def is_complete(self, event: torch.cuda.Event) -> bool:
        """Say whether an event is complete, without blocking."""
        return bool(event.query())

    def block(self, event: torch.cuda.Event) -> None:
        """Block this thread until an event is complete; local."""
        event.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Note the time at which this device has done what the current stream was told so far; local."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def seconds_between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Return the seconds between two marks; local, blocks this thread until the device has come to both."""
        first.synchronize()
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a tensor that another stream allocated until `stream` has done what it was told."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Block this thread until the device has done all that it was told; local."""
        torch.cuda.synchronize(self.place)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the CPU that copies to and from the device run beside computation; local."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy on the GPU of a tensor of the CPU, for which this thread does not wait; local."""
        pinned = self.pinned_empty(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(self.place, non_blocking=True)

    def random_state(self) -> Tensor:
        """Return the state of its default generator, [bytes] of uint8 on the CPU; local."""
        return torch.cuda.get_rng_state(self.place)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of its default generator; local."""
        torch.cuda.set_rng_state(state, self.place)

    def numbers(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of tensors of one element, with one wait for the device at most; local."""
        values: list[float] = torch.stack([tensor.to(self.place) for tensor in tensors]).tolist()
        return values

    def check_range(self, values: Tensor, stop: int, message: Callable[[int, int], str]) -> None:
        """Let the GPU fail if integers are not from 0 to `stop` - 1, when it comes to them; local."""
        assert_later(((values >= 0) & (values < stop)).all(), f"expected numbers from 0 to {stop - 1}")


_DRIVER = Path("/proc/driver/nvidia/version")
KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": cache(Device), "cuda": cache(CudaDevice)}
"""What each type of device is asked through."""


def device_at(place: torch.device) -> Device:
    """Return the device at `place`; of a type that is not known here, one that computes at once; local."""
    return KINDS.get(place.type, Device)(place)


def gpu_count() -> int:
    """Return how many GPUs this process sees, 0 without CUDA; local."""
    return torch.cuda.device_count()


def current_gpu() -> int:
    """Return the number of this thread's current GPU; local."""
    return torch.cuda.current_device()


def gpu_identity(index: int) -> str:
    """Return a name of a GPU that is the same in every process that sees it, and no other GPU's; local."""
    return str(torch.cuda.get_device_properties(index).uuid)


def peer_access(index: int, other: int) -> bool:
    """Say whether a GPU can use the memory of another one that this process sees, without the CPU's; local."""
    return torch.cuda.can_device_access_peer(index, other)


def driver_version() -> str:
    """Return the version of NVIDIA's driver, empty where that is not known; local, needs no GPU."""
    if not _DRIVER.exists():
        return ""
    words = _DRIVER.read_text().split()
    return next((word for word in words if word[:1].isdecimal() and "." in word), "")
