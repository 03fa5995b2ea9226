"""torch's collectives in terms of a `Backend`'s; results are written into the caller's tensors.

A function checks its arguments on the caller's thread and returns the collective, which blocks and may run on
another thread. Tensors have no autograd history. A list of tensors becomes one flat collective, and the results
keep the shapes of the caller's tensors. `all_reduce` is the collective itself, for the latency of small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backends import Backend
from ..backends import all_reduce_coalesced as coalesced
from ..types import ReduceOp
from .reductions import Factor, divide, scale, scaled, summed

Collective = Callable[[], None]
"""A collective whose arguments are checked."""


def all_reduce(backend: Backend, tensor: Tensor, op: ReduceOp, factor: Factor = None) -> None:
    """Reduce a tensor, dense or sparse, over all ranks, in place."""
    if factor is not None:
        scale([tensor], factor)
    if tensor.is_sparse:
        _all_reduce_sparse(backend, tensor, op)
    else:
        backend.all_reduce(tensor, summed(op, tensor))
        divide([tensor], op, backend.size)


def all_reduce_coalesced(
    backend: Backend, tensors: Sequence[Tensor], op: ReduceOp, factor: Factor = None
) -> Collective:
    """Reduce several tensors over all ranks, in place, in few large collectives."""

    def run() -> None:
        scale(tensors, factor)
        coalesced(backend, tensors, summed(op, *tensors))
        divide(tensors, op, backend.size)

    return run


def _all_reduce_sparse(backend: Backend, tensor: Tensor, op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse tensors can be summed only, got {op.name}; use .to_dense()")
    own = tensor.coalesce()
    indices = backend.all_gather(own.indices(), 1)  # [sparse dims, non-zero elements of all ranks]
    values = backend.all_gather(own.values())  # [non-zero elements of all ranks, dense dims ...]
    tensor.copy_(torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=False).coalesce())


def reduce(backend: Backend, tensor: Tensor, root: int, op: ReduceOp, factor: Factor) -> Collective:
    """Reduce a tensor over all ranks, in place on the root, untouched on the others."""

    def run() -> None:
        if backend.rank == root:
            scale([tensor], factor)
            backend.reduce(tensor, root, summed(op, tensor))
            divide([tensor], op, backend.size)
        else:
            backend.reduce(scaled(tensor, factor), root, summed(op, tensor))

    return run


def all_gather(backend: Backend, outputs: Sequence[Tensor], tensor: Tensor) -> Collective:
    """Copy each rank's tensor into one of the outputs; shapes may differ between ranks, dtypes not."""
    _check_count("all_gather", outputs, backend.size)

    def run() -> None:
        flat = backend.all_gather(tensor.reshape(-1))
        _check_numel("all_gather", sum(output.numel() for output in outputs), flat.numel())
        parts = flat.split([output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))

    return run


def all_gather_coalesced(
    backend: Backend, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]
) -> list[Collective]:
    """Copy the ranks' lists of tensors into one list for each rank."""
    _check_count("all_gather_coalesced", outputs, backend.size)
    return [
        all_gather(backend, [of_rank[number] for of_rank in outputs], tensor)
        for number, tensor in enumerate(tensors)
    ]


def all_gather_single(backend: Backend, output: Tensor, tensor: Tensor) -> Collective:
    """Copy the ranks' tensors, of one shape, one after the other into the output."""
    _check_numel("all_gather_single", output.numel(), backend.size * tensor.numel())

    def run() -> None:
        if output.is_contiguous():
            backend.all_gather_flat(output.view(-1), tensor)
        else:
            output.copy_(backend.all_gather(tensor.reshape(-1)).view(output.shape))

    return run


def reduce_scatter(
    backend: Backend, output: Tensor, tensors: Sequence[Tensor], op: ReduceOp, factor: Factor = None
) -> Collective:
    """Reduce a list of one tensor for each rank over all ranks, and write this rank's result into the output."""
    _check_count("reduce_scatter", tensors, backend.size)
    _check_numel("reduce_scatter", output.numel(), tensors[backend.rank].numel())
    sizes = [tensor.numel() for tensor in tensors]

    def run() -> None:
        target = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
        parts = [scaled(tensor, factor) for tensor in tensors]
        backend.reduce_scatter_into(target, parts, sizes, summed(op, output))
        divide([target], op, backend.size)
        if target.data_ptr() != output.data_ptr():
            output.copy_(target.view(output.shape))

    return run


def reduce_scatter_single(
    backend: Backend, output: Tensor, tensor: Tensor, op: ReduceOp, factor: Factor = None
) -> Collective:
    """Reduce a tensor over all ranks, and write this rank's slice of equal slices into the output."""
    _check_numel("reduce_scatter_single", tensor.numel(), backend.size * output.numel())
    return reduce_scatter(backend, output, tensor.reshape(-1).tensor_split(backend.size), op, factor)


def gather(backend: Backend, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Collective:
    """Copy each rank's tensor into one of the root's outputs; shapes may differ between ranks, dtypes not."""
    if backend.rank == root:
        _check_count("gather", outputs, backend.size)

    def run() -> None:
        parts = backend.gather(tensor.reshape(-1), root)
        for output, part in zip(outputs, parts or (), strict=True):
            _check_numel("gather", output.numel(), part.numel())
            output.copy_(part.view(output.shape))

    return run


def scatter(backend: Backend, output: Tensor, tensors: Sequence[Tensor], root: int) -> Collective:
    """Copy one of the root's tensors, all of one shape, into each rank's output."""
    if backend.rank == root:
        _check_count("scatter", tensors, backend.size)
        for tensor in tensors:
            _check_numel("scatter", output.numel(), tensor.numel())

    def run() -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if backend.rank == root else None
        part = backend.scatter(flat, root)
        _check_numel("scatter", output.numel(), part.numel())
        output.copy_(part.view(output.shape))

    return run


def all_to_all(backend: Backend, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Collective:
    """Send one tensor to each rank, and write the tensors of all ranks into the outputs."""
    _check_count("all_to_all", outputs, backend.size)
    _check_count("all_to_all", tensors, backend.size)

    def run() -> None:
        parts = backend.all_to_all([tensor.reshape(-1) for tensor in tensors])
        for output, part in zip(outputs, parts, strict=True):
            _check_numel("all_to_all", output.numel(), part.numel())
            output.copy_(part.view(output.shape))

    return run


def all_to_all_single(
    backend: Backend, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int]
) -> Collective:
    """Send each rank a slice of a tensor along dim 0, and write the received slices into the output in rank order.

    Args:
        backend: The ranks.
        output: Receives the slices.
        tensor: Is sent in slices.
        output_sizes: Size along dim 0 of the slice from each rank; empty for equal slices.
        sizes: Size along dim 0 of the slice for each rank; empty for equal slices.
    """
    return all_to_all(backend, _slices(output, output_sizes, backend.size), _slices(tensor, sizes, backend.size))


def _slices(tensor: Tensor, sizes: list[int], ranks: int) -> Sequence[Tensor]:
    total = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if total % ranks:
            raise ValueError(f"all_to_all_single: expected {ranks} equal parts along dim 0, got a size of {total}")
        sizes = [total // ranks] * ranks
    _check_count("all_to_all_single", sizes, ranks)
    if sum(sizes) != total:
        raise ValueError(f"all_to_all_single: expected split sizes that add up to {total}, got {sizes}")
    return list(tensor.split(sizes))


def _check_count(operation: str, given: Sequence[object], ranks: int) -> None:
    if len(given) != ranks:
        raise ValueError(f"{operation}: expected a list of {ranks}, one for each rank, got {len(given)}")


def _check_numel(operation: str, expected: int, numel: int) -> None:
    if expected != numel:
        raise ValueError(f"{operation}: the tensors' sizes do not fit: expected {expected} elements, got {numel}")
