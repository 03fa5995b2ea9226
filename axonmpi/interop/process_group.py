"""torch's interface of a group of ranks, over a `Backend`: every method that torch calls on a group.

    dist.all_reduce(t) ── allreduce([t], options) ── _run ─┬─ now ────────── backend.all_reduce(t, op)
    DDP, functional ops ─ the same, asynchronous ──────────┴─ its thread ──── the same, then the future

torch's Python functions and its C++ call these methods with lists of tensors and an object of options. Blocking
operations run on the caller's thread if none is under way, asynchronous operations on the group's thread, in the
order of the calls; Python's lock is released during all waits for other ranks. The thread is not the worker of the
backend's `async_op`: torch's futures have to be completed by the thread that runs an operation, once its results
are in the caller's tensors. Checks, comparisons and sums are the backend's. The names are torch's, with the older
names of torches before 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
    Store,
)
from torch.futures import Future

from ..backends import AtOnce, Backend, Worker
from ..errors import CommunicatorError
from ..launch import exit as exits
from ..observe import unfinished_operation
from ..types import CompletedWork, Work
from ..utils.torch_internals import skip_in_compile
from . import torch_collectives as collectives
from .reductions import reduction_of
from .work import TorchWork, complete_with

_ProcessGroup: Any = dist.ProcessGroup
"""Its stubs describe forms of each method that no program of torch's calls."""
_CPU = torch.device("cpu")
_DONE = TorchWork(CompletedWork())
_REDUCE, _SCATTER, _BARRIER = AllreduceOptions(), ReduceScatterOptions(), BarrierOptions()
_GATHER = _ALL = AllToAllOptions()
_live: weakref.WeakSet[TorchProcessGroup] = weakref.WeakSet()


def _end_threads() -> None:
    for group in list(_live):
        if not group.end_thread(4.0):
            text = unfinished_operation() or "an asynchronous operation was still under way when the program ended"
            raise CommunicatorError(text)


@cache
def _register_with_exits() -> None:
    exits.before_finalize(_end_threads)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor without autograd, which may mark it as a result while the operation runs; local."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():  # nothing could be written to it
        memory = tensor.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            memory, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return tensor if tensor.is_sparse else tensor.detach()  # a detached sparse tensor has elements of its own


def _is_asynchronous(options: Any) -> bool:
    """Return True if the caller gets a handle, as always before torch 2.8, whose options do not say; local."""
    return bool(getattr(options, "asyncOp", True))


def _in_turn(operations: Sequence[Callable[[], object]]) -> None:
    for operation in operations:
        operation()


def _plain_list(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(map(_plain, tensors))


class TorchProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of `torch.distributed` whose tensors on the CPU go by MPI and shared memory.

    Args:
        backend: Runs the operations.
        store: torch's store of the group.
        timeout: Limit of each operation.
    """

    def __init__(self, backend: Backend, store: Store, timeout: timedelta) -> None:
        super().__init__(backend.rank, backend.size)
        self._backend = backend
        self._store = store
        self._timeout = timeout
        self._worker = Worker(f"axonmpi-torch-rank{backend.rank}") if backend.allows_threads else AtOnce()
        self._sequence = 0
        self._name = self._description = ""
        _live.add(self)
        _register_with_exits()

    # ---- running ------------------------------------------------------------------------------------------

    def _run(
        self, name: str, options: Any, tensors: Sequence[Tensor], operation: Callable[..., object], *args: Any
    ) -> TorchWork:
        """Run `operation(*args)` now, or on the group's thread."""
        self._sequence += 1
        worker, is_asynchronous = self._worker, _is_asynchronous(options)
        if worker.started == worker.ended and not is_asynchronous:
            operation(*args)
            return _DONE
        work = self._start(name, tensors, partial(operation, *args))
        if not is_asynchronous:
            work.wait()
        return work

    def _start(self, name: str, tensors: Sequence[Tensor], operation: Callable[[], object]) -> TorchWork:
        future: Future[Any] = Future()
        inference = torch.is_inference_mode_enabled()

        def task() -> None:
            with torch.inference_mode(inference):  # a mode is a thread's own
                error = complete_with(future, operation, list(tensors))
            if error is not None:
                raise error

        return TorchWork(self._worker.submit(name, task), tensors, future=future)

    # ---- reductions ---------------------------------------------------------------------------------------

    @skip_in_compile
    def allreduce(self, tensors: list[Tensor], opts: Any = _REDUCE) -> TorchWork:
        """Reduce one tensor over all ranks, in place; collective."""
        tensor = tensors[0]
        # Latency counts for a small blocking all-reduce.
        if _is_asynchronous(opts) or tensor.requires_grad or tensor.is_inference():
            tensor = _plain(tensor)
        # Without a partial, which would take a noticeable part of the time.
        return self._run(
            "all_reduce", opts, tensors, collectives.all_reduce, self._backend, tensor, *reduction_of(opts.reduceOp)
        )

    @skip_in_compile
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _REDUCE) -> TorchWork:
        """Reduce several tensors over all ranks, in place, in few large collectives; collective."""
        op, factor = reduction_of(opts.reduceOp)
        operation = collectives.all_reduce_coalesced(self._backend, _plain_list(tensors), op, factor)
        return self._run("all_reduce_coalesced", opts, tensors, operation)

    @skip_in_compile
    def reduce(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        """Reduce one tensor over all ranks, in place on the root; collective."""
        op, factor = reduction_of(opts.reduceOp)
        operation = collectives.reduce(self._backend, _plain(tensors[0]), opts.rootRank, op, factor)
        return self._run("reduce", opts, tensors, operation)

    @skip_in_compile
    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = _SCATTER
    ) -> TorchWork:
        """Reduce one tensor for each rank, and keep this rank's; collective."""
        op, factor = reduction_of(opts.reduceOp)
        inputs = _plain_list(input_tensors[0])
        operation = collectives.reduce_scatter(self._backend, _plain(output_tensors[0]), inputs, op, factor)
        return self._run("reduce_scatter", opts, output_tensors, operation)

    @skip_in_compile
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _SCATTER) -> TorchWork:
        """Reduce a tensor, and keep this rank's slice of equal slices; collective."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @skip_in_compile
    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = _SCATTER
    ) -> TorchWork:
        """Reduce several tensors, and keep this rank's slice of each; collective."""
        op, factor = reduction_of(opts.reduceOp)
        pairs = zip(_plain_list(output_tensors), _plain_list(input_tensors), strict=True)
        operations = [collectives.reduce_scatter_single(self._backend, *pair, op, factor) for pair in pairs]
        return self._run("reduce_scatter_single", opts, output_tensors, _in_turn, operations)

    # ---- copies -------------------------------------------------------------------------------------------

    @skip_in_compile
    def broadcast(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        """Copy the root's tensor to all ranks, in place; collective."""
        operation = partial(self._backend.broadcast, _plain(tensors[0]), opts.rootRank)
        return self._run("broadcast", opts, tensors, operation)

    @skip_in_compile
    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = _GATHER
    ) -> TorchWork:
        """Copy each rank's tensor into a tensor of a list; collective."""
        outputs = _plain_list(output_tensors[0])
        operation = collectives.all_gather(self._backend, outputs, _plain(input_tensors[0]))
        return self._run("all_gather", opts, output_tensors[0], operation)

    @skip_in_compile
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = _GATHER
    ) -> TorchWork:
        """Copy several tensors of each rank into a list of that rank; collective."""
        outputs = list(map(_plain_list, output_lists))
        operations = collectives.all_gather_coalesced(self._backend, outputs, _plain_list(input_list))
        return self._run("all_gather_coalesced", opts, list(chain.from_iterable(outputs)), _in_turn, operations)

    @skip_in_compile
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = _GATHER) -> TorchWork:
        """Copy the ranks' tensors into one tensor, in rank order; collective."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @skip_in_compile
    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = _GATHER
    ) -> TorchWork:
        """Copy several tensors of each rank, as `all_gather_single` copies one; collective."""
        pairs = zip(_plain_list(output_lists), _plain_list(input_list), strict=True)
        operations = [collectives.all_gather_single(self._backend, *pair) for pair in pairs]
        return self._run("all_gather_single", opts, output_lists, _in_turn, operations)

    @skip_in_compile
    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> TorchWork:
        """Copy each rank's tensor into a tensor of the root's list; collective."""
        outputs = _plain_list(output_tensors[0]) if output_tensors else []
        operation = collectives.gather(self._backend, outputs, _plain(input_tensors[0]), opts.rootRank)
        return self._run("gather", opts, outputs, operation)

    @skip_in_compile
    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> TorchWork:
        """Copy one tensor of the root's list to each rank; collective."""
        inputs = _plain_list(input_tensors[0]) if input_tensors else []
        operation = collectives.scatter(self._backend, _plain(output_tensors[0]), inputs, opts.rootRank)
        return self._run("scatter", opts, output_tensors, operation)

    @skip_in_compile
    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = _ALL) -> TorchWork:
        """Send a tensor to each rank, and receive a tensor from each; collective."""
        operation = collectives.all_to_all(self._backend, _plain_list(output_tensors), _plain_list(input_tensors))
        return self._run("all_to_all", opts, output_tensors, operation)

    @skip_in_compile
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int],
        opts: Any = _ALL,
    ) -> TorchWork:  # fmt: skip
        """Send each rank a slice of a tensor, and receive a slice from each; collective."""
        sizes = list(output_split_sizes), list(input_split_sizes)
        operation = collectives.all_to_all_single(self._backend, _plain(output), _plain(input), *sizes)
        return self._run("all_to_all_single", opts, [output], operation)

    @skip_in_compile
    def barrier(self, opts: Any = _BARRIER) -> TorchWork:
        """Wait for all ranks; collective.

        Raises:
            CollectiveTimeoutError: With a time-out in the options, from the blocking form.
        """
        limit = opts.timeout.total_seconds()
        if limit <= 0 or _is_asynchronous(opts):
            return self._run("barrier", opts, (), self._backend.barrier)
        work = self._start("barrier", (), self._backend.barrier)
        work.wait(opts.timeout)
        return work

    @skip_in_compile
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as gloo's method of this name; collective.

        Args:
            timeout: Limit; None for the group's.
            wait_all_ranks: Ignored: the error names all late ranks.

        Raises:
            CollectiveTimeoutError: A rank did not come in time.
        """
        limit = self._timeout if timeout is None else timeout
        self._start("monitored_barrier", (), partial(self._barrier_within, limit)).wait()

    def _barrier_within(self, limit: timedelta) -> None:
        # A limit of the backend, since its error names the late ranks; a wait for the group's thread cannot.
        self._backend.set_timeout(limit)
        try:
            self._backend.barrier()
        finally:
            self._backend.set_timeout(self._timeout)

    # ---- messages -----------------------------------------------------------------------------------------

    @skip_in_compile
    def send(self, tensors: list[Tensor], dst_rank: int, tag: int = 0) -> TorchWork:
        """Begin to send a tensor; leave it alone until the handle is complete."""
        return self._message(self._backend.isend(_plain(tensors[0]), dst_rank, tag), tensors)

    @skip_in_compile
    def recv(self, tensors: list[Tensor], src_rank: int, tag: int = 0) -> TorchWork:
        """Begin to receive into a tensor, which is complete when the handle is."""
        return self._message(self._backend.irecv(_plain(tensors[0]), src_rank, tag), tensors)

    @skip_in_compile
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> TorchWork:
        """Begin to receive from the rank that sends first."""
        return self._message(self._backend.irecv(_plain(tensors[0]), None, tag), tensors)

    def _message(self, work: Work, tensors: Sequence[Tensor]) -> TorchWork:
        return TorchWork(work, tensors, self._backend.timeout, may_wait_beside=self._backend.allows_threads)

    # ---- the names before torch 2.13 ----------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- life ---------------------------------------------------------------------------------------------

    def end_thread(self, timeout: float) -> bool:
        """End the group's thread; False if it is still busy after `timeout` seconds; local."""
        return self._worker.close(timeout)

    def shutdown(self) -> None:
        """Release the group after its last operation; collective in effect."""
        if not self.end_thread(10.0):
            raise CommunicatorError("this group still runs an operation that the other ranks have not met")
        self._backend.close()

    def abort(self) -> None:
        """Make the group unusable, also for ranks of this node that wait for this rank; local."""
        self._backend.give_up("torch.distributed has aborted it")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later operations; local."""
        self._timeout = timeout
        self._backend.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # ---- attributes that torch reads ----------------------------------------------------------------------

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> TorchProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"the axonmpi backend takes tensors on the CPU, got a device {device}: move them with .cpu(), or "
                'let axonmpi carry them itself, by axonmpi.init_process_group("nccl")'
            )
        return self

    def get_group_store(self) -> Store:
        """Return torch's store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name by which `autoload` registers the backend."""
        return "axonmpi"

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that the program gave."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the description that the program gives."""
        self._description = description
