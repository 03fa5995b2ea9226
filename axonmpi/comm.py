"""The collectives as free functions, and the life cycle of the default group.

Every function takes the group last, None means the group of all ranks, and calls the group's method of the same
name; `all_reduce` calls the group's backend, to be quick for small tensors. Shapes and errors are documented once,
at the method of `Backend` that a docstring names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import CommunicatorError
from .groups.process_group import ProcessGroup
from .groups.world import World, chosen_group, current_world, get_world
from .tracing import Trace
from .types import ReduceOp, Seconds, Work

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_from",
    "broadcast_object",
    "destroy_process_group",
    "gather_tensor",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_num_nodes",
    "get_rank",
    "get_world",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_initialized",
    "is_main_process",
    "isend",
    "new_group",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scan",
    "scatter_tensor",
    "send",
    "symmetric_empty",
    "sync_gradient",
    "sync_gradients",
    "trace",
    "world_size",
]


# Advice in the error for a group argument that is something else, as with torch's order of arguments.
_DIM = "the result is returned, and the dimension is named, as dim="
_TAG = "the tag is named, as tag="
_ROOT = "the rank stands before the group"

# ---- life cycle -------------------------------------------------------------------------------------------


def init_process_group(
    backend: str = "mpi",
    init_method: str | None = None,
    *,
    timeout: Seconds | None = None,
    num_threads: int | None = None,
    comm: MPI.Intracomm | None = None,
) -> World:
    """Start the world of all ranks of the job and make it the default; collective.

    Args:
        backend: `"mpi"`; `"nccl"`, also named `"mpi+nccl"`, sends tensors on GPUs by NCCL and tensors on the CPU by
            MPI, and makes this rank's GPU the current one; `"mock"` is one rank without MPI.
        init_method: None, `"mpi://"` or `"env://"`.
        timeout: Seconds after which a blocking collective raises `CollectiveTimeoutError`; None has no limit.
        num_threads: Threads of torch on this rank; None shares the node's cores among its ranks, unless
            OMP_NUM_THREADS or MKL_NUM_THREADS is set.
        comm: An mpi4py intracommunicator, whose ranks alone are the world and call this; see `World.init`.

    Raises:
        LaunchError: The processes were not started as one MPI job; the message has the command to type.
        CommunicatorError: There is a default world already, or this process has had a world of other ranks.
        TypeError: `comm` is no intracommunicator.
        NcclError: With NCCL: a rank has no GPU or no NCCL, or GPUs cannot be connected; on all ranks.
        ValueError: An argument is unknown.
    """
    if current_world() is not None:
        raise CommunicatorError(
            "the process group is initialised already; call axonmpi.destroy_process_group() before a second "
            "init_process_group(), or make further groups with world.new_group(ranks)"
        )
    return World.init(backend, init_method, timeout=timeout, num_threads=num_threads, comm=comm)


def trace(folder: str | Path, *, steps: int | range | None = None, profiler: bool = False) -> Trace:
    """Return a context that records where the time of all ranks goes; see `World.trace`."""
    return get_world().trace(folder, steps=steps, profiler=profiler)


def is_initialized() -> bool:
    """Return True if there is a default world; local."""
    return current_world() is not None


def destroy_process_group() -> None:
    """Release the default world and all of its groups; collective in effect, may be called twice."""
    world = current_world()
    if world is not None:
        world.close()


def get_rank() -> int:
    """Return this rank's number in the world; local."""
    return get_world().rank


def get_world_size() -> int:
    """Return the number of ranks in the world; local."""
    return get_world().size


def get_local_rank() -> int:
    """Return this rank's number on its node, from MPI's shared-memory split; local."""
    return get_world().local_rank


def get_local_world_size() -> int:
    """Return the number of ranks on this node; local."""
    return get_world().local_size


def get_node_rank() -> int:
    """Return this node's number; nodes are ordered by their lowest rank; local."""
    return get_world().node_rank


def get_num_nodes() -> int:
    """Return the number of nodes; local."""
    return get_world().num_nodes


def new_group(ranks: Sequence[int]) -> ProcessGroup:
    """Make a group of some of the world's ranks; collective over the world. See `World.new_group`."""
    return get_world().new_group(ranks)


def rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number in the group, -1 outside it; local."""
    return chosen_group(group).rank


def world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group; local."""
    return chosen_group(group).size


def is_main_process(group: ProcessGroup | None = None) -> bool:
    """Return True on rank 0 of the group; local."""
    return chosen_group(group).rank == 0


# ---- reductions -------------------------------------------------------------------------------------------


def all_reduce(
    t: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce over all ranks, in place; collective; a `Work` when asynchronous. See `Backend.all_reduce`."""
    backend = (get_world().default_group if group is None else chosen_group(group)).backend
    return backend.all_reduce(t, op, async_op=async_op)


def all_reduce_sum(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Sum over all ranks, in place; collective. See `Backend.all_reduce`."""
    chosen_group(group).all_reduce_sum(t)


def all_reduce_mean(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Average over all ranks, in place; floating point or complex; collective. See `Backend.all_reduce`."""
    chosen_group(group).all_reduce_mean(t)


def all_reduce_min(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Take the element-wise minimum over all ranks, in place; collective. See `Backend.all_reduce`."""
    chosen_group(group).all_reduce_min(t)


def all_reduce_max(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Take the element-wise maximum over all ranks, in place; collective. See `Backend.all_reduce`."""
    chosen_group(group).all_reduce_max(t)


def all_reduce_product(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Multiply over all ranks, in place; collective. See `Backend.all_reduce`."""
    chosen_group(group).all_reduce_product(t)


def reduce(
    t: Tensor,
    dst: int,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce onto rank `dst`, in place there, untouched elsewhere; collective. See `Backend.reduce`."""
    return chosen_group(group, habit=_ROOT).reduce(t, dst, op, async_op)


def reduce_scatter_sum(t: Tensor, group: ProcessGroup | None = None, dim: int = 0, async_op: bool = False) -> Any:
    """Return this rank's slice along `dim` of the sum over all ranks; collective. See `Backend.reduce_scatter`."""
    return chosen_group(group, habit=_DIM).reduce_scatter_sum(t, dim, async_op)


def reduce_scatter_mean(t: Tensor, group: ProcessGroup | None = None, dim: int = 0, async_op: bool = False) -> Any:
    """Return this rank's slice of the average over all ranks; collective. See `Backend.reduce_scatter`."""
    return chosen_group(group, habit=_DIM).reduce_scatter_mean(t, dim, async_op)


def scan(
    t: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    exclusive: bool = False,
) -> Work | None:
    """Reduce over ranks 0 to this one, or `exclusive` of it, in place; collective. See `Backend.scan`."""
    return chosen_group(group).scan(t, op, async_op, exclusive=exclusive)


def symmetric_empty(shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
    """Allocate a tensor that all ranks of a node can read and write; collective. See `Backend`."""
    return chosen_group(group).symmetric_empty(shape, dtype)


def sync_gradient(t: Tensor, group: ProcessGroup | None = None) -> None:
    """Average one gradient over all ranks, in place; collective. See `Backend.all_reduce`."""
    chosen_group(group).sync_gradient(t)


def sync_gradients(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Average gradients over all ranks, in place, as few large reductions; collective.

    Args:
        tensors: Floating-point tensors, the same shapes and dtypes in the same order on all ranks.
        group: The ranks to average over; None means all.

    Raises:
        TypeError: `tensors` is one tensor, or has an item that is no tensor.
        CollectiveMismatchError: The ranks' lists differ.
    """
    chosen_group(group).sync_gradients(tensors)


# ---- copies -----------------------------------------------------------------------------------------------


def broadcast(t: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Copy rank 0's tensor to all ranks, in place; collective. See `Backend.broadcast`."""
    return chosen_group(group, habit="broadcast_from(t, src) copies from a rank that is named").broadcast(
        t, 0, async_op
    )


def broadcast_from(t: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Copy rank `src`'s tensor to all ranks, in place; collective. See `Backend.broadcast`."""
    return chosen_group(group, habit=_ROOT).broadcast_from(t, src, async_op)


def all_gather(t: Tensor, group: ProcessGroup | None = None, dim: int = 0, async_op: bool = False) -> Any:
    """Return all ranks' tensors concatenated along `dim`; collective. See `Backend.all_gather`."""
    return chosen_group(group, habit=_DIM).all_gather(t, dim, async_op)


def gather_tensor(t: Tensor, dst: int = 0, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Return the list of all ranks' tensors on rank `dst`, None elsewhere; collective. See `Backend.gather`."""
    return chosen_group(group, habit=_ROOT).gather_tensor(t, dst, async_op)


def scatter_tensor(
    t: Tensor | None, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Return this rank's slice of rank `src`'s tensor, split along dim 0; collective. See `Backend.scatter`."""
    return chosen_group(group, habit=_ROOT).scatter_tensor(t, src, async_op)


def all_to_all(tensors: Sequence[Tensor], group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Send `tensors[i]` to rank i and return the received tensors; collective. See `Backend.all_to_all`."""
    return chosen_group(group).all_to_all(tensors, async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Wait until all ranks have called it; collective."""
    return chosen_group(group).barrier(async_op)


def broadcast_object(obj: Any, src: int = 0, group: ProcessGroup | None = None) -> Any:
    """Return rank `src`'s picklable object on all ranks; collective."""
    return chosen_group(group).broadcast_object(obj, src)


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order; collective."""
    return chosen_group(group).all_gather_object(obj)


# ---- point to point ---------------------------------------------------------------------------------------


def send(t: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send to rank `dst`; returns when the tensor may be changed. See `Backend.send`."""
    chosen_group(group, habit=_TAG).send(t, dst, tag)


def recv(t: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Receive from rank `src`, in place. See `Backend.recv`."""
    chosen_group(group, habit=_TAG).recv(t, src, tag)


def isend(t: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Begin to send to rank `dst`. See `Backend.isend`."""
    return chosen_group(group, habit=_TAG).isend(t, dst, tag)


def irecv(t: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Begin to receive from rank `src`, in place. See `Backend.irecv`."""
    return chosen_group(group, habit=_TAG).irecv(t, src, tag)
