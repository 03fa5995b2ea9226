"""A double of nccl4py's `nccl.core`, as far as the library uses it, for ranks that are threads with pretended GPUs.

Operations are told to a rank's stream; when it comes to one, its part lies ready, and what has all its parts is
done. It refuses what nccl4py and NCCL refuse. Beside each rule is where it comes from: files of nccl4py below
`nccl/core`, of NCCL (github NVIDIA/nccl) below `src`, of its user guide below `docs/userguide/source`.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers.device_double import Gpu, Stream, current_gpu, spoil, unseen

__all__ = ["Communicator", "NCCLError", "NcclInvalid", "NcclRedOp", "UniqueId", "connected", "group"]


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


class UniqueId:
    """utils.py, UniqueId: 128 bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __bytes__(self) -> bytes:
        return self._content

    @staticmethod
    def from_bytes(content: bytes) -> UniqueId:
        return UniqueId(bytes(content))


def get_unique_id() -> UniqueId:
    return UniqueId(os.urandom(128))


def get_error_string(result: int) -> str:
    return _TEXTS[Result(result)]


def get_version() -> Any:
    version = SimpleNamespace(major=2, minor=30, micro=0)
    return SimpleNamespace(libnccl=SimpleNamespace(version=version, cuda_variant=None, path=None))


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

    clique: Clique
    key: tuple[Any, ...]
    role: Any
    others: dict[Any, int]
    what: tuple[Any, ...]
    sent: Tensor | None
    received: Tensor | None
    work: Callable[[Any, list[Tensor | None]], Tensor | None]
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


class Launch:
    """Operations that a stream was told in one group: none of them waits for another (usage/groups.rst)."""

    def __init__(self, stream: Stream, operations: list[Operation]) -> None:
        self.stream = stream
        self.operations = operations
        self.position = 0
        self._running = self._begun = False

    def __repr__(self) -> str:
        return " and ".join(f"{' '.join(map(str, each.what))} {each.key}" for each in self.operations)

    def run(self) -> bool:
        if self._running:
            return False
        self._running = True
        try:
            if not self._begun:
                self._begun = True
                for operation in self.operations:
                    operation.clique.lay_ready(operation)
            for operation in self.stream.gpu.random.sample(self.operations, len(self.operations)):
                if not operation.is_done:
                    operation.clique.bring_others(operation, self)
            return all(operation.is_done for operation in self.operations)
        finally:
            self._running = False

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
        self._told: dict[tuple[Any, ...], dict[Any, Launch]] = defaultdict(dict)
        self._ready: dict[tuple[Any, ...], dict[Any, Operation]] = defaultdict(dict)
        self.split_parts: dict[tuple[int, str], dict[int, Any]] = defaultdict(dict)

    def fail(self, state: Result, why: str) -> None:
        """End all that is under way, with spoilt results. The lock is held."""
        if self.state is Result.SUCCESS:
            self.state, self.last_error = state, why
        for parts in self._ready.values():
            for operation in parts.values():
                operation.finish(None)
        self._ready.clear()

    def tell(self, operation: Operation, launch: Launch) -> None:
        self._told[operation.key][operation.role] = launch

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
        del self._ready[operation.key], self._told[operation.key]

    def bring_others(self, operation: Operation, launch: Launch) -> None:
        """Let the streams of the other ranks come to their parts, as far as can be. The lock is held."""
        others = [each for each in self._told.get(operation.key, {}).values() if each is not launch]
        operation.gpu.random.shuffle(others)
        for other in others:
            other.stream.reach(other.position)

    def missing(self, operation: Operation) -> set[int]:
        """Return ranks of the world that have not told their part."""
        told = self._told.get(operation.key, {})
        return {self.gpus[rank].rank for role, rank in operation.others.items() if role not in told}


def reduced(parts: Sequence[Tensor], op: NcclRedOp) -> Tensor:
    """Reduce in rank order, rounding at each step, as NCCL does in the order of its rings and trees.

    Averages are sums of what is multiplied by 1 / ranks before (src/enqueue.cc, hostToDevRedOp); the smaller of two
    floats is the one that is a number (src/device/reduce_kernel.h, FuncMinMax).
    """
    dtype = parts[0].dtype
    if dtype is torch.bool:
        parts = [part.view(torch.uint8) for part in parts]
    if not parts[0].dtype.is_floating_point:
        in_numpy = {NcclRedOp.SUM: np.add, NcclRedOp.PROD: np.multiply, NcclRedOp.MIN: np.minimum}
        combine = {**in_numpy, NcclRedOp.MAX: np.maximum, NcclRedOp.AVG: np.add}[op]
        total = functools.reduce(combine, [part.numpy() for part in parts])
        result = torch.from_numpy(np.asarray(total // len(parts) if op is NcclRedOp.AVG else total))
        return result.view(dtype)
    in_torch = {NcclRedOp.SUM: torch.add, NcclRedOp.PROD: torch.mul, NcclRedOp.MIN: torch.fmin}
    step = {**in_torch, NcclRedOp.MAX: torch.fmax, NcclRedOp.AVG: torch.add}[op]
    wide = torch.float32 if dtype.itemsize == 1 else dtype  # torch does not compute in float8
    if op is NcclRedOp.AVG:
        share = torch.full((), 1 / len(parts), dtype=dtype if dtype.itemsize > 1 else torch.float32, device="cpu")
        share = share.to(dtype).double()
        parts = [(part.double() * share).to(dtype) for part in parts]
    return functools.reduce(lambda one, other: step(one.to(wide), other.to(wide)).to(dtype), parts)


# ---- groups -----------------------------------------------------------------------------------------------------


class _Group(threading.local):
    """Depth of nested groups, and what they have so far: src/group.cc, the thread-local ncclGroupDepth."""

    def __init__(self) -> None:
        self.depth = 0
        self.told: list[tuple[Stream, Operation]] = []
        self.error: NCCLError | None = None


_group = _Group()


def group_start() -> None:
    _group.depth += 1


def group_end() -> None:
    if not _group.depth:  # src/group.cc, ncclGroupEndInternal
        raise NCCLError(Result.INVALID_USAGE, "ncclGroupEnd: not in a group call")
    _group.depth -= 1
    if _group.depth:
        return
    told, _group.told = _group.told, []
    error, _group.error = _group.error, None
    if error is not None:  # src/group.cc, ncclGroupErrCheck: nothing of a group in which a call has failed
        for _, operation in told:
            operation.drop()
        raise error
    _launch(told)


@contextmanager
def group() -> Iterator[None]:
    """group.py, group: ends whatever happens."""
    group_start()
    try:
        yield
    finally:
        group_end()


def _launch(told: list[tuple[Stream, Operation]]) -> None:
    launches: dict[tuple[int, int], Launch] = {}
    for stream, operation in told:
        launch = launches.setdefault((id(operation.clique), stream.number), Launch(stream, []))
        launch.operations.append(operation)
    for launch in launches.values():
        stream = launch.stream
        with stream.gpu.changed:
            launch.position = stream.tell(launch)
            for operation in launch.operations:
                operation.clique.tell(operation, launch)
            stream.gpu.changed.notify_all()
        if stream is stream.gpu.default:
            stream.gpu.force(stream, launch.position, f"{stream} of rank {stream.gpu.rank}")


# ---- communicators ----------------------------------------------------------------------------------------------


@dataclass
class _Meeting:
    ranks: dict[int, Gpu] = field(default_factory=dict)
    clique: Clique | None = None


_meetings: dict[bytes, _Meeting] = defaultdict(_Meeting)


class Communicator:
    """communicator.py, Communicator; without a clique a null one, as split gives to ranks without colour."""

    def __init__(self, clique: Clique | None = None, rank: int = 0) -> None:
        self._clique = clique
        self._rank = rank
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self._under_way: list[Operation] = []

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Communicator:
        """Meet the ranks that have one id; collective."""
        gpu = current_gpu()
        if not isinstance(unique_id, UniqueId):  # communicator.py, initialize
            raise NcclInvalid("unique_id must be a UniqueId or a sequence of UniqueIds")
        if gpu is None or not 0 <= rank < nranks:  # src/init.cc, ncclCommInitRankDev
            raise NCCLError(Result.INVALID_ARGUMENT, f"rank {rank} of {nranks}, on {gpu}")
        meeting = _meetings[bytes(unique_id)]
        with gpu.changed:
            if rank in meeting.ranks or gpu in meeting.ranks.values():  # src/init.cc, "Duplicate GPU detected"
                raise NCCLError(Result.INVALID_USAGE, f"rank {rank} and {gpu} cannot both be there twice")
            meeting.ranks[rank] = gpu
            gpu.changed.notify_all()
            rendezvous = gpu.host.rendezvous

            def missing() -> list[int]:
                here = {each.rank for each in meeting.ranks.values()}
                return [each for each in range(len(rendezvous.ranks)) if each not in here]

            everybody = lambda: len(meeting.ranks) >= nranks  # noqa: E731
            rendezvous.world.wait_until(everybody, "ncclCommInitRank", missing, rendezvous, None)
            if meeting.clique is None:
                meeting.clique = Clique([meeting.ranks[each] for each in range(nranks)])
        return cls(meeting.clique, rank)

    @classmethod
    def init_all(cls, devices: Sequence[int]) -> list[Communicator]:
        raise NotImplementedError("one process with several GPUs: use `connected`")

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def is_valid(self) -> bool:
        return self._clique is not None

    @property
    def nranks(self) -> int:
        return len(self._valid("nranks").gpus)

    @property
    def rank(self) -> int:
        self._valid("rank")
        return self._rank

    def _valid(self, operation: str) -> Clique:
        if self._clique is None:  # communicator.py, _check_valid: also after destroy and abort
            raise NcclInvalid(f"Cannot {operation}: Communicator not initialized")
        return self._clique

    def get_async_error(self) -> Result:
        return self._valid("get async error").state

    def get_last_error(self) -> str:
        return self._valid("get last error").last_error

    def destroy(self) -> None:
        """End it, after what is under way: api/comms.rst, ncclCommDestroy, which finalizes it first."""
        if self._clique is None:
            return
        for operation in self._unfinished():
            if not operation.gpu.host.rendezvous.world.failed:  # else the job ends
                launch = self._clique._told[operation.key][operation.role]
                operation.gpu.force(launch.stream, launch.position, "ncclCommDestroy")
        self._clique = None

    def abort(self) -> None:
        """End it, and what is under way: api/comms.rst, ncclCommAbort. The others hear of a remote error."""
        clique, self._clique = self._clique, None
        if clique is not None:
            with clique.gpus[0].changed:
                clique.fail(Result.REMOTE_ERROR, f"rank {self._rank} has aborted")
                clique.gpus[0].changed.notify_all()

    def split(self, color: int | None = None, key: int = 0) -> Communicator:
        """Divide the ranks by colour, ordered by key and then by rank; collective."""
        clique = self._valid("split")
        if unfinished := self._unfinished():
            # api/comms.rst, ncclCommSplit: "there should not be any outstanding NCCL operations", lest it deadlocks
            raise NCCLError(Result.INVALID_USAGE, f"split while {unfinished[0].what} is under way")
        gpu = clique.gpus[self._rank]
        self._counts["split",] += 1
        parts = clique.split_parts[self._counts["split",], "split"]
        with gpu.changed:
            parts[self._rank] = (color, key)
            gpu.changed.notify_all()
            rendezvous = gpu.host.rendezvous

            def missing() -> list[int]:
                return [each.rank for rank, each in enumerate(clique.gpus) if rank not in parts]

            everybody = lambda: len(parts) == len(clique.gpus)  # noqa: E731
            rendezvous.world.wait_until(everybody, "ncclCommSplit", missing, rendezvous, None)
            if color is None:
                return Communicator()
            members = sorted((each[1], rank) for rank, each in parts.items() if each[0] == color)
            made = clique.split_parts[self._counts["split",], "made"]
            if color not in made:
                made[color] = Clique([clique.gpus[rank] for _, rank in members])
            return Communicator(made[color], [rank for _, rank in members].index(self._rank))

    def _unfinished(self) -> list[Operation]:
        self._under_way = [operation for operation in self._under_way if not operation.is_done]
        return self._under_way

    # ---- collectives --------------------------------------------------------------------------------------

    def allreduce(self, sendbuf: Tensor, recvbuf: Tensor, op: NcclRedOp, *, stream: int | None = None) -> None:
        self._valid("allreduce")
        self.reduce(sendbuf, recvbuf, op, stream=stream)

    def reduce(
        self, sendbuf: Tensor, recvbuf: Any, op: NcclRedOp, root: int | None = None, *, stream: int | None = None
    ) -> None:
        size = len(self._valid("reduce").gpus)
        sent = self._buffer(sendbuf, "sendbuf")
        received = self._buffer(recvbuf, "recvbuf") if root in (None, self._rank) else None
        if received is not None:  # communicator.py, reduce
            self._same_dtype(sent, received)
            self._enough(received, sent.numel())
        self._check_rank("root", 0 if root is None else root)

        def work(rank: int, parts: list[Tensor | None]) -> Tensor | None:
            return reduced([each.view(-1) for each in parts], op) if root in (None, rank) else None

        name = "AllReduce" if root is None else "Reduce"
        what = (name, KNOWN_TO_NCCL[sent.dtype], sent.numel(), NcclRedOp(op).name, root, size)
        self._collective(what, sent, received, work, stream)

    def broadcast(self, sendbuf: Any, recvbuf: Tensor, root: int, *, stream: int | None = None) -> None:
        size = len(self._valid("broadcast").gpus)
        sent = self._buffer(sendbuf, "sendbuf") if root == self._rank else None
        received = self._buffer(recvbuf, "recvbuf")
        if sent is not None:  # communicator.py, broadcast
            self._same_dtype(sent, received)
            if sent.numel() != received.numel():
                need, got = sent.numel(), received.numel()
                raise NcclInvalid(f"Buffer count mismatch: recvbuf must have exactly {need} elements, got {got}")
        self._check_rank("root", root)
        what = ("Broadcast", KNOWN_TO_NCCL[received.dtype], received.numel(), root, size)
        self._collective(what, sent, received, lambda rank, parts: _flat(parts[root]).clone(), stream)

    def allgather(self, sendbuf: Tensor, recvbuf: Tensor, *, stream: int | None = None) -> None:
        size = len(self._valid("allgather").gpus)
        sent, received = self._buffer(sendbuf, "sendbuf"), self._buffer(recvbuf, "recvbuf")
        self._same_dtype(sent, received)  # communicator.py, gather
        self._enough(received, size * sent.numel())
        what = ("AllGather", KNOWN_TO_NCCL[sent.dtype], sent.numel(), size)
        self._collective(
            what, sent, received, lambda rank, parts: torch.cat([_flat(each) for each in parts]), stream
        )

    def reduce_scatter(self, sendbuf: Tensor, recvbuf: Tensor, op: NcclRedOp, *, stream: int | None = None) -> None:
        size = len(self._valid("reduce_scatter").gpus)
        sent, received = self._buffer(sendbuf, "sendbuf"), self._buffer(recvbuf, "recvbuf")
        count = self._share(sent, received, size)  # communicator.py, reduce_scatter
        self._enough(received, count)

        def work(rank: int, parts: list[Tensor | None]) -> Tensor:
            return reduced([_flat(each)[rank * count : (rank + 1) * count] for each in parts], op)

        what = ("ReduceScatter", KNOWN_TO_NCCL[sent.dtype], count, NcclRedOp(op).name, size)
        self._collective(what, sent, received, work, stream)

    def alltoall(self, sendbuf: Tensor, recvbuf: Tensor, *, stream: int | None = None) -> None:
        size = len(self._valid("alltoall").gpus)
        sent, received = self._buffer(sendbuf, "sendbuf"), self._buffer(recvbuf, "recvbuf")
        count = self._share(sent, received, size)  # communicator.py, alltoall
        self._enough(received, sent.numel())

        def work(rank: int, parts: list[Tensor | None]) -> Tensor:
            return torch.cat([_flat(each)[rank * count : (rank + 1) * count] for each in parts])

        self._collective(("AlltoAll", KNOWN_TO_NCCL[sent.dtype], count, size), sent, received, work, stream)

    def send(self, sendbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        self._valid("send")
        self._message(self._buffer(sendbuf, "sendbuf"), None, self._rank, peer, peer, stream)

    def recv(self, recvbuf: Tensor, peer: int, *, stream: int | None = None) -> None:
        self._valid("recv")
        self._message(None, self._buffer(recvbuf, "recvbuf"), peer, self._rank, peer, stream)

    # ---- rules --------------------------------------------------------------------------------------------

    def _buffer(self, tensor: Any, name: str) -> Tensor:
        if not isinstance(tensor, Tensor):  # interop/torch.py, resolve_tensor
            raise NcclInvalid(f"tensor must be a PyTorch tensor, got {type(tensor).__name__}")
        if tensor.dtype not in KNOWN_TO_NCCL:
            raise NcclInvalid(f"Unsupported torch dtype {tensor.dtype} has no NCCL equivalent.")
        place = self._valid("use").gpus[self._rank].place
        if tensor.device != place:  # communicator.py, _validate_buffer_device
            raise NcclInvalid(f"{name} is on device {tensor.device}, but communicator is on device {place}.")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            # interop/torch.py, resolve_tensor, gives NCCL data_ptr() and numel(): it would take other memory
            raise NcclInvalid(f"{name} is not in contiguous memory")
        return tensor.detach()

    def _same_dtype(self, sent: Tensor, received: Tensor) -> None:
        if KNOWN_TO_NCCL[sent.dtype] != KNOWN_TO_NCCL[received.dtype]:
            raise NcclInvalid(f"Dtype mismatch: sendbuf has dtype {sent.dtype}, recvbuf has dtype {received.dtype}")

    def _enough(self, received: Tensor, count: int) -> None:
        if received.numel() < count:
            raise NcclInvalid(
                f"Buffer count mismatch: recvbuf must have at least {count} elements, got {received.numel()}"
            )

    def _share(self, sent: Tensor, received: Tensor, size: int) -> int:
        self._same_dtype(sent, received)
        if sent.numel() < size:
            raise NcclInvalid(
                f"Buffer count mismatch: sendbuf must have at least {size} elements (nranks), got {sent.numel()}"
            )
        return sent.numel() // size

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.nranks:  # src/misc/argcheck.cc, ArgsCheck
            self._refuse(f"invalid {name} {rank} ({name} should be in the 0..{self.nranks} range)")

    def _refuse(self, why: str) -> None:
        error = NCCLError(Result.INVALID_ARGUMENT, why)
        if _group.depth:
            _group.error = error
        raise error

    # ---- telling ------------------------------------------------------------------------------------------

    def _collective(
        self, what: tuple[Any, ...], sent: Tensor | None, received: Tensor | None, work: Any, stream: int | None
    ) -> None:
        if not (received if sent is None else sent).numel():  # src/enqueue.cc, taskAppend: nothing is launched
            return
        self._counts["collective",] += 1
        key = ("collective", self._counts["collective",])
        self._tell(key, self._rank, {rank: rank for rank in range(self.nranks)}, what, sent, received, work, stream)

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

        def work(role: str, parts: list[Tensor | None]) -> Tensor | None:
            return _flat(parts[0]).clone() if role == "recv" else None

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
        clique = self._valid("use")
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


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.view(-1)


def connected(gpus: Sequence[Gpu]) -> list[Communicator]:
    """Make the communicator of all these GPUs, one part each, as `init` on each of them does; local."""
    clique = Clique(gpus)
    return [Communicator(clique, rank) for rank in range(len(gpus))]
