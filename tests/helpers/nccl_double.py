"""A double of nccl4py's `nccl.core`, as far as the library uses it, for ranks that are threads with pretended GPUs.

Operations are told to a rank's stream; when it comes to one, its part lies ready, and what has all its parts is
done. It refuses what nccl4py and NCCL refuse. Beside each rule is where it comes from: files of nccl4py below
`nccl/core`, of NCCL (github NVIDIA/nccl) below `src`, of its user guide below `docs/userguide/source`.
"""

import enum
import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axonmpi.backends.nccl.library import Library
from helpers.device_double import Entry, Gpu, Stream, current_gpu, spoil, unseen


class Result(enum.IntEnum):
    """ncclResult_t: docs/userguide/source/api/types.rst."""

    SUCCESS = 0
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6


_TEXTS = {  # src/init.cc, ncclGetErrorString
    Result.SUCCESS: "no error",
    Result.INVALID_ARGUMENT: "invalid argument (run with NCCL_DEBUG=WARN for details)",
    Result.INVALID_USAGE: "invalid usage (run with NCCL_DEBUG=WARN for details)",
    Result.REMOTE_ERROR: "remote process exited or there was a network error",
}


class NcclInvalid(Exception):  # noqa: N818 - nccl4py's name
    """What nccl4py itself refuses: typing.py, NcclInvalid."""


class NCCLError(Exception):
    """What NCCL refuses: bindings/nccl.pyx, NCCLError."""

    def __init__(self, result: Result, why: str) -> None:
        super().__init__(f"{_TEXTS[result]}: {why}")


class NcclRedOp(enum.IntEnum):
    """typing.py, NcclRedOp."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


KNOWN_TO_NCCL = {  # interop/torch.py, _to_nccl_dtype: "does not support complex, int16, or quantized types"
    **{getattr(torch, name): name for name in ("float16", "float32", "float64", "bfloat16")},
    **{getattr(torch, name): name for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")},
    **{getattr(torch, name): name for name in ("float8_e4m3fn", "float8_e5m2")},
    torch.bool: "uint8",
}


class UniqueId(bytes):
    """utils.py, UniqueId: 128 bytes."""

    @classmethod
    def from_bytes(cls, content: bytes) -> "UniqueId":
        return cls(content)


def get_unique_id() -> UniqueId:
    return UniqueId(os.urandom(128))


def get_error_string(result: int) -> str:
    return _TEXTS[Result(result)]


# ---- operations -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Operation:
    """One rank's part of an operation.

    Attributes:
        clique: The ranks of the communicator.
        key: Which operation of the communicator it is, the same for all its parts.
        role: Which part: the rank; of a message "send" or "recv".
        others: By role, the ranks that have the parts.
        what: What all parts have to have the same.
        sent: What this rank gives.
        received: Where its result goes.
        work: Makes the results of what is given: of the part with a role, all parts in order.
        is_faulty: Whether its memory was used without order.
    """

    clique: "Clique"
    key: tuple[Any, ...]
    role: Any
    others: dict[Any, int]
    what: tuple[Any, ...]
    sent: Tensor | None
    received: Tensor | None
    work: Callable[[Any, list[Any]], Tensor | None]
    gpu: Gpu
    is_faulty: bool = False
    is_done: bool = False

    def finish(self, result: Tensor | None) -> None:
        """Write the result, and give the memory back. The lock is held."""
        if self.received is not None:
            if result is not None:
                self.received.view(-1)[: result.numel()].copy_(result)
            if self.is_faulty or result is None:
                spoil(self.received, self.gpu.random)
        self.drop()

    def drop(self) -> None:
        """Give the memory back; local."""
        self.gpu.release([each for each in (self.sent, self.received) if each is not None])
        self.sent = self.received = None
        self.is_done = True

    def given(self) -> Tensor | None:
        if self.sent is not None and self.is_faulty:
            spoilt = self.sent.clone()
            spoil(spoilt, self.gpu.random)
            return spoilt
        return self.sent


class Launch(Entry):
    """Operations that a stream was told in one group: none of them waits for another (usage/groups.rst)."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.operations: list[Operation] = []
        self.position = 0
        self._begun = False

    def __repr__(self) -> str:
        return " and ".join(f"{' '.join(map(str, each.what))} {each.key}" for each in self.operations)

    def advance(self) -> bool:
        if not self._begun:
            self._begun = True
            for operation in self.operations:
                operation.clique.lay_ready(operation)
        for operation in self.stream.gpu.random.sample(self.operations, len(self.operations)):
            if not operation.is_done:
                operation.clique.bring_others(operation, self)
        return all(operation.is_done for operation in self.operations)

    def missing(self) -> set[int]:
        return {rank for each in self.operations if not each.is_done for rank in each.clique.missing(each)}


class Clique:
    """What the ranks of a communicator have in common.

    Args:
        gpus: Theirs, in rank order.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = list(gpus)
        self.state = Result.SUCCESS
        self.last_error = ""
        self.told: dict[tuple[Any, ...], dict[Any, Launch]] = defaultdict(dict)
        self._ready: dict[tuple[Any, ...], dict[Any, Operation]] = defaultdict(dict)
        self.splits: dict[int, dict[int, Any]] = defaultdict(dict)
        self.parts: dict[tuple[int, Any], Clique] = {}

    def fail(self, state: Result, why: str) -> None:
        """End all that is under way, with spoilt results. The lock is held."""
        if self.state is Result.SUCCESS:
            self.state, self.last_error = state, why
        for parts in self._ready.values():
            for operation in parts.values():
                operation.finish(None)
        self._ready.clear()

    def lay_ready(self, operation: Operation) -> None:
        """Take a rank's part; do the operation if it was the last. The lock is held."""
        if self.state is not Result.SUCCESS:
            operation.finish(None)
            return
        parts = self._ready[operation.key]
        parts[operation.role] = operation
        if len(parts) < len(operation.others):
            return
        order = [parts[role] for role in operation.others]
        if len({part.what for part in order}) > 1:
            # Undefined in NCCL, a hang at best: usage/collectives.rst, "must be called for each rank ... the same".
            calls = ", ".join(f"rank {part.others[part.role]}: {part.what}" for part in order)
            for part in order:
                part.gpu.faults.append(f"the ranks of a communicator made different calls: {calls}")
            self.fail(Result.INVALID_USAGE, f"the ranks made different calls: {calls}")
            return
        with unseen():
            given = [part.given() for part in order]
            results = [part.work(part.role, given) for part in order]
            for part, result in zip(order, results, strict=True):
                part.finish(result)
        del self._ready[operation.key], self.told[operation.key]

    def bring_others(self, operation: Operation, launch: Launch) -> None:
        """Let the streams of the other ranks come to their parts, as far as can be. The lock is held."""
        others = [each for each in self.told.get(operation.key, {}).values() if each is not launch]
        operation.gpu.random.shuffle(others)
        for other in others:
            other.stream.reach(other.position)

    def missing(self, operation: Operation) -> set[int]:
        """Return ranks of the world that have not told their part."""
        told = self.told.get(operation.key, {})
        return {self.gpus[rank].rank for role, rank in operation.others.items() if role not in told}


STEPS = {
    NcclRedOp.SUM: (np.add, torch.add),
    NcclRedOp.AVG: (np.add, torch.add),
    NcclRedOp.PROD: (np.multiply, torch.mul),
    NcclRedOp.MIN: (np.minimum, torch.fmin),
    NcclRedOp.MAX: (np.maximum, torch.fmax),
}
"""Of integers by numpy, which has all unsigned ones, and of floats by torch."""


def reduced(parts: Sequence[Tensor], op: NcclRedOp) -> Tensor:
    """Reduce in rank order, rounding at each step, as NCCL does in the order of its rings and trees.

    Averages are sums of what is multiplied by 1 / ranks before (src/enqueue.cc, hostToDevRedOp); the smaller of two
    floats is the one that is a number (src/device/reduce_kernel.h, FuncMinMax).
    """
    dtype = parts[0].dtype
    in_numpy, in_torch = STEPS[op]
    if not dtype.is_floating_point:
        plain = torch.uint8 if dtype is torch.bool else dtype
        total = functools.reduce(in_numpy, [part.view(plain).numpy() for part in parts])
        return torch.from_numpy(np.asarray(total // len(parts) if op is NcclRedOp.AVG else total)).view(dtype)
    wide = torch.float32 if dtype.itemsize == 1 else dtype  # torch does not compute in float8
    if op is NcclRedOp.AVG:
        share = torch.full((), 1 / len(parts), dtype=wide, device="cpu").to(dtype).double()
        parts = [(part.double() * share).to(dtype) for part in parts]
    return functools.reduce(lambda one, other: in_torch(one.to(wide), other.to(wide)).to(dtype), parts)


# ---- groups -----------------------------------------------------------------------------------------------------


class _Group(threading.local):
    """Depth of nested groups, and what they have so far: src/group.cc, the thread-local ncclGroupDepth."""

    def __init__(self) -> None:
        self.depth = 0
        self.told: list[tuple[Stream, Operation]] = []
        self.error: NCCLError | None = None


_group = _Group()


@contextmanager
def group() -> Iterator[None]:
    """group.py, group: ends whatever happens."""
    _group.depth += 1
    try:
        yield
    finally:
        _group.depth -= 1
        if not _group.depth:
            _end_group()


def _end_group() -> None:
    told, _group.told = _group.told, []
    error, _group.error = _group.error, None
    if error is not None:  # src/group.cc, ncclGroupErrCheck: nothing of a group in which a call has failed
        for _, operation in told:
            operation.drop()
        raise error
    _launch(told)


def _launch(told: list[tuple[Stream, Operation]]) -> None:
    launches: dict[tuple[int, int], Launch] = {}
    for stream, operation in told:
        launch = launches.setdefault((id(operation.clique), stream.number), Launch(stream))
        launch.operations.append(operation)
    for launch in launches.values():
        stream = launch.stream
        with stream.gpu.changed:
            launch.position = stream.tell(launch)
            for operation in launch.operations:
                operation.clique.told[operation.key][operation.role] = launch
            stream.gpu.changed.notify_all()
        if stream is stream.gpu.default:
            stream.gpu.force(stream, launch.position, f"{stream} of rank {stream.gpu.rank}")


# ---- communicators ----------------------------------------------------------------------------------------------


_meetings: dict[bytes, dict[int, Gpu]] = defaultdict(dict)
_cliques: dict[bytes, Clique] = {}


def _meet(
    parts: dict[int, Any], rank: int, own: Any, size: int, gpu: Gpu, call: str, missing: Callable[[], list[int]]
) -> None:
    """Give a rank's own part and wait for those of all. The lock is held."""
    parts[rank] = own
    gpu.changed.notify_all()
    rendezvous = gpu.host.rendezvous
    rendezvous.world.wait_until(lambda: len(parts) >= size, call, missing, rendezvous, None)


class Communicator:
    """communicator.py, Communicator; without a clique a null one, as split gives to ranks without colour."""

    def __init__(self, clique: Clique | None = None, rank: int = 0) -> None:
        self._clique = clique
        self._rank = rank
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self._under_way: list[Operation] = []

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> "Communicator":
        """Meet the ranks that have one id; collective."""
        gpu = current_gpu()
        if not isinstance(unique_id, UniqueId):  # communicator.py, initialize
            raise NcclInvalid("unique_id must be a UniqueId or a sequence of UniqueIds")
        if gpu is None or not 0 <= rank < nranks:  # src/init.cc, ncclCommInitRankDev
            raise NCCLError(Result.INVALID_ARGUMENT, f"rank {rank} of {nranks}, on {gpu}")
        parts = _meetings[unique_id]

        def missing() -> list[int]:
            here = {each.rank for each in parts.values()}
            return [each for each in range(len(gpu.host.rendezvous.ranks)) if each not in here]

        with gpu.changed:
            if rank in parts or gpu in parts.values():  # src/init.cc, "Duplicate GPU detected"
                raise NCCLError(Result.INVALID_USAGE, f"rank {rank} and {gpu} cannot both be there twice")
            _meet(parts, rank, gpu, nranks, gpu, "ncclCommInitRank", missing)
            clique = _cliques.setdefault(unique_id, Clique([parts[each] for each in range(nranks)]))
        return cls(clique, rank)

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def is_valid(self) -> bool:
        return self._clique is not None

    def _valid(self) -> Clique:
        if self._clique is None:  # communicator.py, _check_valid: also after destroy and abort
            raise NcclInvalid("Communicator not initialized")
        return self._clique

    @property
    def _size(self) -> int:
        return len(self._valid().gpus)

    def get_async_error(self) -> Result:
        return self._valid().state

    def get_last_error(self) -> str:
        return self._valid().last_error

    def destroy(self) -> None:
        """End it, after what is under way: api/comms.rst, ncclCommDestroy, which finalizes it first."""
        if self._clique is None:
            return
        for operation in self._unfinished():
            if not operation.gpu.host.rendezvous.world.failed:  # else the job ends
                launch = self._clique.told[operation.key][operation.role]
                operation.gpu.force(launch.stream, launch.position, "ncclCommDestroy")
        self._clique = None

    def abort(self) -> None:
        """End it, and what is under way: api/comms.rst, ncclCommAbort. The others hear of a remote error."""
        clique, self._clique = self._clique, None
        if clique is not None:
            with clique.gpus[0].changed:
                clique.fail(Result.REMOTE_ERROR, f"rank {self._rank} has aborted")
                clique.gpus[0].changed.notify_all()

    def split(self, color: int | None = None, key: int = 0) -> "Communicator":
        """Divide the ranks by colour, ordered by key and then by rank; collective."""
        clique = self._valid()
        if unfinished := self._unfinished():
            # api/comms.rst, ncclCommSplit: "there should not be any outstanding NCCL operations", lest it deadlocks
            raise NCCLError(Result.INVALID_USAGE, f"split while {unfinished[0].what} is under way")
        gpu = clique.gpus[self._rank]
        self._counts["split",] += 1
        number = self._counts["split",]
        parts = clique.splits[number]

        def missing() -> list[int]:
            return [each.rank for rank, each in enumerate(clique.gpus) if rank not in parts]

        with gpu.changed:
            _meet(parts, self._rank, (color, key), self._size, gpu, "ncclCommSplit", missing)
            if color is None:
                return Communicator()
            members = sorted((key, rank) for rank, (its_color, key) in parts.items() if its_color == color)
            ranks = [rank for _, rank in members]
            made = clique.parts.setdefault((number, color), Clique([clique.gpus[rank] for rank in ranks]))
            return Communicator(made, ranks.index(self._rank))

    def _unfinished(self) -> list[Operation]:
        self._under_way = [operation for operation in self._under_way if not operation.is_done]
        return self._under_way

    # ---- collectives --------------------------------------------------------------------------------------

    def allreduce(self, sendbuf: Tensor, recvbuf: Tensor, op: NcclRedOp, *, stream: int | None = None) -> None:
        self.reduce(sendbuf, recvbuf, op, stream=stream)

    def reduce(
        self, sendbuf: Tensor, recvbuf: Any, op: NcclRedOp, root: int | None = None, *, stream: int | None = None
    ) -> None:
        sent = self._buffer(sendbuf, "sendbuf")
        received = self._buffer(recvbuf, "recvbuf") if root in (None, self._rank) else None
        if received is not None:  # communicator.py, reduce
            self._fits(sent, received, sent.numel())
        self._check_rank("root", 0 if root is None else root)

        def work(rank: int, parts: list[Tensor]) -> Tensor | None:
            return reduced([each.view(-1) for each in parts], op) if root in (None, rank) else None

        name = "AllReduce" if root is None else "Reduce"
        self._collective((name, NcclRedOp(op).name, root), sent.numel(), sent, received, work, stream)

    def broadcast(self, sendbuf: Any, recvbuf: Tensor, root: int, *, stream: int | None = None) -> None:
        sent = self._buffer(sendbuf, "sendbuf") if root == self._rank else None
        received = self._buffer(recvbuf, "recvbuf")
        if sent is not None:  # communicator.py, broadcast
            self._fits(sent, received, sent.numel())
            if sent.numel() != received.numel():
                need, got = sent.numel(), received.numel()
                raise NcclInvalid(f"Buffer count mismatch: recvbuf must have exactly {need} elements, got {got}")
        self._check_rank("root", root)

        def work(rank: int, parts: list[Any]) -> Tensor:
            return parts[root].view(-1).clone()

        self._collective(("Broadcast", root), received.numel(), sent, received, work, stream)

    def allgather(self, sendbuf: Tensor, recvbuf: Tensor, *, stream: int | None = None) -> None:
        sent, received = self._buffer(sendbuf, "sendbuf"), self._buffer(recvbuf, "recvbuf")
        self._fits(sent, received, self._size * sent.numel())  # communicator.py, gather

        def work(rank: int, parts: list[Tensor]) -> Tensor:
            return torch.cat([each.view(-1) for each in parts])

        self._collective(("AllGather",), sent.numel(), sent, received, work, stream)

    def reduce_scatter(self, sendbuf: Tensor, recvbuf: Tensor, op: NcclRedOp, *, stream: int | None = None) -> None:
        sent, received = self._buffer(sendbuf, "sendbuf"), self._buffer(recvbuf, "recvbuf")
        count = sent.numel() // self._size
        if not count:
            least, got = self._size, sent.numel()
            raise NcclInvalid(
                f"Buffer count mismatch: sendbuf must have at least {least} elements (nranks), got {got}"
            )
        self._fits(sent, received, count)  # communicator.py, reduce_scatter

        def work(rank: int, parts: list[Tensor]) -> Tensor:
            return reduced([each.view(-1)[rank * count : (rank + 1) * count] for each in parts], op)

        self._collective(("ReduceScatter", NcclRedOp(op).name), count, sent, received, work, stream)

    def send(self, sendbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        self._message(self._buffer(sendbuf, "sendbuf"), None, self._rank, peer, peer, stream)

    def recv(self, recvbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        self._message(None, self._buffer(recvbuf, "recvbuf"), peer, self._rank, peer, stream)

    # ---- rules --------------------------------------------------------------------------------------------

    def _buffer(self, tensor: Any, name: str) -> Tensor:
        if not isinstance(tensor, Tensor):  # interop/torch.py, resolve_tensor
            raise NcclInvalid(f"tensor must be a PyTorch tensor, got {type(tensor).__name__}")
        if tensor.dtype not in KNOWN_TO_NCCL:
            raise NcclInvalid(f"Unsupported torch dtype {tensor.dtype} has no NCCL equivalent.")
        place = self._valid().gpus[self._rank].place
        if tensor.device != place:  # communicator.py, _validate_buffer_device
            raise NcclInvalid(f"{name} is on device {tensor.device}, but communicator is on device {place}.")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            # interop/torch.py, resolve_tensor, gives NCCL data_ptr() and numel(): it would take other memory
            raise NcclInvalid(f"{name} is not in contiguous memory")
        return tensor.detach()

    def _fits(self, sent: Tensor, received: Tensor, count: int) -> None:
        if KNOWN_TO_NCCL[sent.dtype] != KNOWN_TO_NCCL[received.dtype]:
            raise NcclInvalid(f"Dtype mismatch: sendbuf has dtype {sent.dtype}, recvbuf has dtype {received.dtype}")
        if received.numel() < count:
            got = received.numel()
            raise NcclInvalid(f"Buffer count mismatch: recvbuf must have at least {count} elements, got {got}")

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._size:  # src/misc/argcheck.cc, ArgsCheck
            self._refuse(f"invalid {name} {rank} ({name} should be in the 0..{self._size} range)")

    def _refuse(self, why: str) -> None:
        error = NCCLError(Result.INVALID_ARGUMENT, why)
        if _group.depth:
            _group.error = error
        raise error

    # ---- telling ------------------------------------------------------------------------------------------

    def _collective(
        self,
        what: tuple[Any, ...],
        count: int,
        sent: Tensor | None,
        received: Tensor | None,
        work: Callable[[Any, list[Any]], Tensor | None],
        stream: int | None,
    ) -> None:
        tensor = received if sent is None else sent
        if not tensor.numel():  # src/enqueue.cc, taskAppend: nothing is launched
            return
        if self._size == 1 and "AVG" in what and tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            self._refuse("invalid argument")  # src/device/onerank.cu: 2.28 has no such kernel for float8
        self._counts["collective",] += 1
        key = ("collective", self._counts["collective",])
        ranks = {rank: rank for rank in range(self._size)}
        self._tell(
            key, self._rank, ranks, (*what, KNOWN_TO_NCCL[tensor.dtype], count), sent, received, work, stream
        )

    def _message(
        self, sent: Tensor | None, received: Tensor | None, src: int, dst: int, peer: int, stream: int | None
    ) -> None:
        self._check_rank("peer", peer)
        role = "recv" if sent is None else "send"
        self._counts[role, src, dst] += 1
        key = ("message", src, dst, self._counts[role, src, dst])
        tensor = received if sent is None else sent
        # api/p2p.rst, ncclSend: the receiver has to have "the same datatype and the same count"
        what = ("message", KNOWN_TO_NCCL[tensor.dtype], tensor.numel())

        def work(role: str, parts: list[Any]) -> Tensor | None:
            return parts[0].view(-1).clone() if role == "recv" else None

        self._tell(key, role, {"send": src, "recv": dst}, what, sent, received, work, stream)

    def _tell(
        self,
        key: tuple[Any, ...],
        role: Any,
        others: dict[Any, int],
        what: tuple[Any, ...],
        sent: Tensor | None,
        received: Tensor | None,
        work: Any,
        stream: int | None,
    ) -> None:
        clique = self._valid()
        gpu = clique.gpus[self._rank]
        queue = gpu.streams.get(stream or 0)
        if queue is None:  # CUDA: cudaErrorInvalidResourceHandle
            self._refuse(f"stream {stream} is none of {gpu}")
        gpu.look_for_freed()
        faults = [gpu.touch(sent, queue, what[0], writes=False)] if sent is not None else []
        faults += [gpu.touch(received, queue, what[0], writes=True)] if received is not None else []
        own = [None if each is None else gpu.hold(each) for each in (sent, received)]
        operation = Operation(clique, key, role, others, what, *own, work, gpu, any(faults))
        self._unfinished().append(operation)
        if _group.depth:
            _group.told.append((queue, operation))
        else:
            _launch([(queue, operation)])


def connected(gpus: Sequence[Gpu]) -> list[Communicator]:
    """Make the communicator of all these GPUs, one part each, as `init` on each of them does; local."""
    clique = Clique(gpus)
    return [Communicator(clique, rank) for rank in range(len(gpus))]


LIBRARY = Library(sys.modules[__name__], (NCCLError, NcclInvalid))
"""What `axonmpi.backends.nccl.library.load` returns over the double."""
