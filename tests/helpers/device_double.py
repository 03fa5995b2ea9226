"""A pretended GPU on the CPU: its streams are queues that run as late as events allow.

    default stream     computes at once, as the rank's thread tells it to
    other streams      a queue each, run up to an event when the default stream waits for it or a CPU blocks on it,
                       in random order between streams; what needs other ranks has them run their queues, too

Whether work is ordered is decided when it is told, by vector clocks: each use of memory notes its stream and that
stream's clock; an event carries what its stream knows of the clocks of all; waiting for it passes that on. A use
of memory whose earlier use, on another stream, is not known yet is a fault: values are spoilt, and the fault is
kept. So is memory that is given back while another stream still needs it, unless it is kept for that stream.

Only events and blocking for them count as order: that the CPU read a value, and so waited for the default stream,
does not.

Rules: CUDA C++ programming guide, "Streams" and "Events"; torch's docs of `torch.cuda.Stream` and
`Tensor.record_stream`.
"""

import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from axonmpi.backends import MockBackend
from axonmpi.errors import CollectiveTimeoutError
from axonmpi.utils.device import Device
from axonmpi.utils.torch_internals import plain_tensors

CPU = torch.device("cpu")


def _own_references() -> int:
    """Return what torch's count of a storage's users is above the tensors that use it; torches differ."""
    tensor = torch.zeros(1)
    key = tensor.untyped_storage()._cdata
    return int(torch._C._storage_Use_Count(key)) - 1


OWN_REFERENCES = _own_references()
_thread = threading.local()
_numbers = itertools.count(1)
_gpus: weakref.WeakKeyDictionary[Any, list["Gpu"]] = weakref.WeakKeyDictionary()


@contextmanager
def unseen() -> Iterator[None]:
    """Let torch compute beneath autograd and beneath every mode, as a GPU does; local."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        yield


def current_gpu() -> "Gpu | None":
    """Return the pretended GPU that this thread uses; local."""
    return getattr(_thread, "gpu", None)


def pretended_device(place: torch.device) -> Device:
    """What `KINDS["cpu"]` becomes: this thread's pretended GPU, or the plain CPU without one; local."""
    return current_gpu() or Device(place)


class Entry:
    """What a stream was told."""

    _runs = False

    def run(self) -> bool:
        """Do it as far as can be, with the machine's lock held; say whether it is done."""
        if self._runs:  # the streams wait for each other
            return False
        self._runs = True
        try:
            return self.advance()
        finally:
            self._runs = False

    def advance(self) -> bool:
        raise NotImplementedError

    def missing(self) -> set[int]:
        """Return ranks that have not told their GPUs yet what it waits for."""
        return set()


class Stream:
    """A queue.

    Args:
        gpu: Whose.
        number: Its address; 0 is the default stream's, which computes at once.

    Attributes:
        queue: What is told and not done, oldest first.
        told: How much was told.
        done: How much of it is done.
        clock: Counts the events recorded; from 1.
        known: Of other streams, by number, the clock up to which their work is done before what comes next here.
    """

    def __init__(self, gpu: "Gpu", number: int) -> None:
        self.gpu = gpu
        self.number = number
        self.queue: deque[Entry] = deque()
        self.told = self.done = 0
        self.clock = 1
        self.known: dict[int, int] = dict(gpu.known_to_cpu)

    def __repr__(self) -> str:
        return f"stream {self.number}" if self.number else "the default stream"

    def tell(self, entry: Entry) -> int:
        """Queue an entry; return the position after it. The lock is held."""
        self.queue.append(entry)
        self.told += 1
        return self.told

    def reach(self, position: int) -> bool:
        """Run up to a position, as far as can be; say whether it is reached. The lock is held."""
        while self.done < position:
            entry = self.queue[0]
            if not entry.run():
                return False
            if self.queue and self.queue[0] is entry:
                self.queue.popleft()
                self.done += 1
        return True


def learn(known: dict[int, int], clocks: dict[int, int]) -> None:
    """Take over the clocks that are later; local."""
    for number, clock in clocks.items():
        known[number] = max(clock, known.get(number, 0))


class Event:
    """A place in a stream's queue, and what is done before it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.position = stream.told
        self.clocks = {**stream.known, stream.number: stream.clock}
        stream.clock += 1


@dataclass(eq=False)
class WaitEntry(Entry):
    """Wait for an event of another stream."""

    event: Event

    def __repr__(self) -> str:
        return f"wait for {self.event.stream} up to {self.event.position}"

    def advance(self) -> bool:
        return self.event.stream.reach(self.event.position)

    def missing(self) -> set[int]:
        queue = self.event.stream.queue
        return queue[0].missing() if queue and self.event.stream.done < self.event.position else set()


@dataclass(eq=False)
class ComputeEntry(Entry):
    """An operation of torch, which is done once.

    Attributes:
        gpu: Of the stream.
        what: The operation's name.
        compute: Does it.
        held: Tensors that it uses, to be released afterwards.
    """

    gpu: "Gpu"
    what: str
    compute: Callable[[], None]
    held: list[Tensor]

    def __repr__(self) -> str:
        return self.what

    def advance(self) -> bool:
        with unseen():
            self.compute()
        self.gpu.release(self.held)
        self.held.clear()
        return True


class Use:
    """A use of a range of bytes by a stream at its clock."""

    __slots__ = ("clock", "number", "start", "stop", "writes")

    def __init__(self, number: int, clock: int, start: int, stop: int, writes: bool) -> None:
        self.number, self.clock, self.start, self.stop, self.writes = number, clock, start, stop, writes


@dataclass(slots=True, eq=False)
class Memory:
    """What is known of one storage.

    Attributes:
        weak: The storage, which goes when nobody has it.
        home: Number of the stream that it was allocated for, which may get the memory anew once nobody has it.
        uses: By streams, without those that later ones stand for.
        kept: Numbers of the streams it is kept for.
        held: How many tensors of it the queues have.
    """

    weak: StorageWeakRef
    home: int
    uses: list[Use] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    held: int = 0


class Gpu(Device):
    """The pretended GPU of one mock rank.

    Args:
        host: The rank; its world's lock is the lock of all queues.
        seed: Of the order between streams.

    Attributes:
        host: The same.
        rank: Its number.
        faults: What was used without order, a line each.
        known_to_cpu: By stream, the clock up to which the CPU has blocked.
    """

    is_asynchronous = True

    def __init__(self, host: MockBackend, seed: int = 0) -> None:
        super().__init__(CPU)
        self.host = host
        self.rank = host.rank
        self.changed = host.rendezvous.world.changed
        self.random = random.Random(seed * 1000 + host.rank)
        self.faults: list[str] = []
        self.known_to_cpu: dict[int, int] = {}
        self.default = Stream(self, 0)
        self.streams: dict[int, Stream] = {0: self.default}
        self._memories: dict[int, Memory] = {}
        self._watched: dict[int, Tensor] = {}
        _gpus.setdefault(host.rendezvous.world, []).append(self)

    def __repr__(self) -> str:
        return f"GPU of rank {self.rank}"

    # ---- the device ---------------------------------------------------------------------------------------

    def use(self) -> None:
        _thread.gpu = self

    def current_stream(self) -> Stream:
        stream: Stream | None = getattr(_thread, "stream", None)
        return stream if stream is not None and stream.gpu is self else self.default

    def new_stream(self, apart_from: Sequence[Stream] = ()) -> Stream:
        stream = Stream(self, next(_numbers))
        self.streams[stream.number] = stream
        return stream

    def handle(self, stream: Stream) -> int:
        return stream.number

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, _thread.stream = getattr(_thread, "stream", None), stream
        try:
            with self.watching():
                yield
        finally:
            _thread.stream = before

    def record(self, stream: Stream) -> Event:
        return Event(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.look_for_freed()
        if stream is self.default:
            self.force(event.stream, event.position, f"{stream} of rank {self.rank}")
        elif event.stream is not stream:
            with self.changed:
                if event.stream.done < event.position:
                    stream.tell(WaitEntry(event))
        learn(stream.known, event.clocks)

    def is_complete(self, event: Event) -> bool:
        with self.changed:
            complete = event.stream.reach(event.position)
        if complete:
            self._tell_cpu(event)
        return complete

    def block(self, event: Event) -> None:
        self.force(event.stream, event.position, f"the CPU of rank {self.rank}")
        self._tell_cpu(event)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        memory = self._memory(tensor)
        if memory is not None:
            memory.kept.add(stream.number)

    def synchronize(self) -> None:
        if self.host.rendezvous.world.failed:  # the job ends
            return
        for stream in self.random.sample(list(self.streams.values()), len(self.streams)):
            self.block(Event(stream))

    def _tell_cpu(self, event: Event) -> None:
        """Order all that the CPU tells from now on behind an event."""
        for stream in self.streams.values():
            learn(stream.known, event.clocks)
        learn(self.known_to_cpu, event.clocks)

    # ---- running ------------------------------------------------------------------------------------------

    def force(self, stream: Stream, position: int, waiting: str) -> None:
        """Run a stream up to a position; blocks until other ranks have told what that needs.

        Raises:
            RankFailedError: A rank has failed.
            CollectiveMismatchError: A rank that it needs has returned.
            CollectiveTimeoutError: Never came; names the queues of all ranks.
        """
        with self.changed:
            if stream.reach(position):
                return
            what = f"{waiting} for {stream}, at {stream.queue[0]},"
            rendezvous = self.host.rendezvous
            limit = rendezvous.world.timeout / 4  # before the run that the rank is in ends

            def missing() -> list[int]:
                return sorted(stream.queue[0].missing()) if stream.queue else []

            try:
                rendezvous.world.wait_until(lambda: stream.reach(position), what, missing, rendezvous, limit)
            except CollectiveTimeoutError as error:
                queues = "\n".join(gpu.queues() for gpu in _gpus[rendezvous.world])
                raise CollectiveTimeoutError(f"{error}\n{queues}") from None

    def queues(self) -> str:
        """Return what this rank's streams still have to do."""
        lines = [
            f"{stream}: {', '.join(map(repr, stream.queue))}" for stream in self.streams.values() if stream.queue
        ]
        return f"{self} has to do:\n  " + ("\n  ".join(lines) or "nothing")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's GPU, and fail at the end if memory was used without order; local."""
        before, _thread.gpu = current_gpu(), self
        try:
            with self.watching():
                yield
        finally:
            _thread.gpu = before
        self.look_for_freed()
        assert not self.faults, "\n".join(self.faults)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what this thread has torch compute; local."""
        if getattr(_thread, "watches", False):
            yield
            return
        _thread.watches = True
        try:
            with _Watch(self):
                yield
        finally:
            _thread.watches = False

    # ---- memory -------------------------------------------------------------------------------------------

    def _memory(self, tensor: Tensor, home: int = 0) -> Memory | None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(StorageWeakRef(storage), home)
        return memory

    def touch(self, tensor: Tensor, stream: Stream, what: str, *, writes: bool) -> bool:
        """Note a use of memory; say whether it is a fault."""
        memory = self._memory(tensor)
        if memory is None or not tensor.numel():
            return False
        start, stop = extent(tensor)
        number, known = stream.number, stream.known
        rest, fault = [], None
        for use in memory.uses:
            is_known = use.number == number or known.get(use.number, 0) >= use.clock
            if not is_known and (writes or use.writes) and use.start < stop and start < use.stop:
                fault = use
            if not (is_known and (writes or not use.writes) and start <= use.start and use.stop <= stop):
                rest.append(use)
        rest.append(Use(number, stream.clock, start, stop, writes))
        memory.uses = rest
        if number != memory.home and number not in memory.kept and memory.weak.cdata not in self._watched:
            self._watched[memory.weak.cdata] = self.hold(tensor)
        if fault is not None:
            used = "writes" if writes else "reads"
            self._note(f"{what} on {stream} {used} memory that {self.streams[fault.number]} has used, unordered")
        return fault is not None

    def _note(self, fault: str) -> None:
        self.faults.append(f"rank {self.rank}: {fault}")

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor for a queue, which does not count as a use that keeps memory; local."""
        memory = self._memory(tensor)
        if memory is not None:
            memory.held += 1
        with unseen():
            return tensor.detach()

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Give back what was held; local, the tensors have to be dropped at once."""
        for tensor in tensors:
            memory = self._memory(tensor)
            if memory is not None:
                memory.held -= 1

    def look_for_freed(self) -> None:
        """Spoil memory that nobody has any more, while a stream that it is not kept for still needs it; local."""
        for key, tensor in list(self._watched.items()):
            memory = self._memories[key]
            home = self.streams[memory.home]
            needed = [
                use.number
                for use in memory.uses
                if use.number not in {memory.home, *memory.kept} and home.known.get(use.number, 0) < use.clock
            ]
            is_free = torch._C._storage_Use_Count(key) - OWN_REFERENCES <= memory.held
            if needed and not is_free:
                continue
            del self._watched[key]
            memory.held -= 1
            if needed:
                self._note(f"memory of {home} is given back, though {self.streams[needed[0]]} needs it: keep it")
                spoil(tensor, self.random)

    # ---- torch's operations -------------------------------------------------------------------------------

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation of torch that this thread calls, now or when its stream comes to it."""
        if self._watched:
            self.look_for_freed()
        is_view, written_to = effects(func)
        if is_view:
            return func(*args, **kwargs)
        stream = self.current_stream()
        read, written = tensors_of(args, kwargs, written_to)
        what = func.__name__
        faulty = [tensor for tensor in read if self.touch(tensor, stream, what, writes=False)]
        faulty += [tensor for tensor in written if self.touch(tensor, stream, what, writes=True)]
        if stream.queue and (read or written):
            return self._tell_later(stream, func, args, kwargs, written, faulty)
        for tensor in faulty:
            spoil(tensor, self.random)
        result = func(*args, **kwargs)
        made = self._note_made(stream, func, result, [*read, *written])
        for tensor in (*written, *made) if faulty else ():
            spoil(tensor, self.random)
        return result

    def _note_made(self, stream: Stream, func: Any, result: Any, given: Sequence[Tensor]) -> list[Tensor]:
        """Note memory that an operation has allocated; return the tensors."""
        made = [tensor for tensor in flat_tensors(result) if not any(tensor is each for each in given)]
        if made:
            old = {tensor.untyped_storage()._cdata for tensor in given if tensor.is_cpu and not tensor.is_sparse}
            made = [each for each in made if each.is_cpu and each.layout is torch.strided]
            made = [each for each in made if each.untyped_storage()._cdata not in old]
        for tensor in made:
            memory = self._memory(tensor, stream.number)
            if memory is not None and tensor.numel():
                # What had the memory before was told before the last event, where nothing is written to it now.
                clock = stream.clock - 1 if is_empty(func) else stream.clock
                memory.uses = [Use(stream.number, clock, *extent(tensor), True)]
        return made

    def _tell_later(
        self,
        stream: Stream,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        faulty: Sequence[Tensor],
    ) -> Any:
        held: list[Tensor] = []

        def hold(value: Any) -> Any:
            if isinstance(value, Tensor):
                held.append(self.hold(value))
                return held[-1]
            return [hold(each) for each in value] if isinstance(value, list | tuple) else value

        returns = func._schema.returns
        if any(str(each.type) not in ("Tensor", "List[Tensor]") for each in returns) or (
            written and len(returns) > 1
        ):
            self.block(Event(stream))  # the CPU needs a value, or it is too intricate to be done in two parts
            return func(*args, **kwargs)
        results: list[Tensor] = []
        if written:
            value = written[0] if returns else None
        else:  # of the right form, to be filled later
            value = func(*args, **kwargs)
            made = self._note_made(stream, func, value, tensors_of(args, kwargs)[0])
            if is_empty(func) or not made:
                return value
            results = hold(flat_tensors(value))
        own_args, own_kwargs = hold(args), {name: hold(each) for name, each in kwargs.items()}
        spoilt = hold([*faulty, *written]) if faulty else []

        def compute() -> None:
            again = func(*own_args, **own_kwargs)
            for target, source in zip(results, flat_tensors(again), strict=False):
                target.copy_(source)
            for tensor in [*spoilt, *results] if spoilt else ():
                spoil(tensor, self.random)

        with self.changed:
            stream.tell(ComputeEntry(self, func.__name__, compute, held))
        return value


class _Watch(TorchDispatchMode):
    """Hands a thread's operations to its pretended GPU."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in types:
            if each.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                return NotImplemented  # a subclass first takes its operation apart
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with plain_tensors():  # memory is that of a part, whatever whole its tensor shows
            return self._gpu.compute(func, args, kwargs or {})


@cache
def effects(func: Any) -> tuple[bool, set[int | str]]:
    """Return whether an operation only makes a view, and which of its arguments it writes to; local."""
    arguments = enumerate(func._schema.arguments)
    written = [(place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write]
    return func.is_view, {key for keys in written for key in keys}


@cache
def is_empty(func: Any) -> bool:
    """Say whether an operation only allocates memory; local."""
    return func.__name__.startswith(("empty", "new_empty"))


def tensors_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], written_to: Collection[int | str] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are only read and those that are written to; local."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for key, value in [*enumerate(args), *kwargs.items()]:
        (written if key in written_to else read).extend(flat_tensors(value))
    return read, written


def flat_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, which may be a list or a tuple of them; local."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in flat_tensors(each)]
    return []


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte in its storage that a tensor may use, and the one behind the last; local."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    span = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * size


def spoil(tensor: Tensor, generator: random.Random) -> None:
    """Overwrite a tensor with not-a-number, or with random integers; local."""
    with unseen():
        tensor = tensor.detach()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            torch.logical_not(tensor, out=tensor)
        else:
            tensor.fill_(generator.randrange(100, 127))
