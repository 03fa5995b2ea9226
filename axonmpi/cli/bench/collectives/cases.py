"""One collective of one dtype and size, its variants, and its right result.

Element i of the tensor of rank r is `i % 3 + r % 2`, so that every result is known without communication. The small
whole numbers are exact in every dtype, and three divides no power of two, so that misplaced data are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....comm import all_gather, all_reduce, broadcast, reduce, reduce_scatter_sum
from ....launch import start as runtime
from ....utils.memory import flat_zeros
from ..harness.table import format_size
from ..harness.timing import MICROSECONDS, OVER_AXONMPI, WALL, Clock, RankOperations, calls_for, interleave
from ..harness.torch_groups import all_gather_flat, reduce_scatter_flat

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
BLOCK_SECONDS = 7e-3
"""About how long a block takes, unless one call takes longer."""
_CPU = torch.device("cpu")
_ROOT = 0
_COMPARED = 64


@dataclass(frozen=True)
class CollectiveCase:
    """A collective, its dtype and its size on this rank.

    Attributes:
        operation: One of `OPERATIONS`, or copy.
        dtype: Of the elements.
        nbytes: Size of the full tensor. Before an all_gather and after a reduce_scatter a rank has one shard of it,
            all shards of the same size.
        rank: This rank.
        ranks: The number of ranks.
        device: The tensors' device.
    """

    operation: str
    dtype: torch.dtype
    nbytes: int
    rank: int
    ranks: int
    device: torch.device = _CPU

    @property
    def is_in_place(self) -> bool:
        """Whether the result replaces the source."""
        return self.operation not in ("all_gather", "reduce_scatter")

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, at least one."""
        return -(-self.nbytes // (self.dtype.itemsize * self.ranks))

    @property
    def source_numel(self) -> int:
        """Elements of this rank's source."""
        sizes = {"all_gather": self.shard_numel, "reduce_scatter": self.shard_numel * self.ranks}
        return sizes.get(self.operation, -(-self.nbytes // self.dtype.itemsize))

    @property
    def result_numel(self) -> int:
        """Elements of this rank's result."""
        sizes = {"all_gather": self.shard_numel * self.ranks, "reduce_scatter": self.shard_numel}
        return sizes.get(self.operation, self.source_numel)

    def expected(self, indices: Tensor) -> Tensor:
        """Return the right elements at some indices of this rank's result, int64."""
        if self.operation == "copy":
            return _content(self.rank, indices)
        if self.operation == "broadcast":
            return _content(_ROOT, indices)
        if self.operation == "all_gather":
            return _content(indices // self.shard_numel, indices % self.shard_numel)
        if self.operation == "reduce_scatter":
            indices = indices + self.rank * self.shard_numel
        return torch.stack([_content(rank, indices) for rank in range(self.ranks)]).sum(0)

    def zeros(self) -> Tensor:
        """Return an ordinary tensor for the source."""
        return flat_zeros(self.source_numel, self.dtype, self.device)


@dataclass(frozen=True)
class Variant:
    """One implementation of a case.

    Attributes:
        case: The case.
        source: This rank's source.
        call: Runs it once; collective, but for a copy.
        result: The tensor that then holds the result; None: `call` returns it.
    """

    case: CollectiveCase
    source: Tensor
    call: Callable[[], object]
    result: Tensor | None = None

    def is_right(self) -> bool:
        """Run it once and check some elements of the result; collective. Leaves zeros, which stay zeros."""
        self.source.copy_(_content(self.case.rank, torch.arange(self.source.numel(), dtype=torch.int32)))
        returned = self.call()
        result = returned if self.result is None else self.result
        right = isinstance(result, Tensor) and self._is_expected(result)
        self.source.zero_()
        return right

    def _is_expected(self, result: Tensor) -> bool:
        """Compare elements spread over the result, the first and the last included, with the right ones."""
        if self.case.operation == "reduce" and self.case.rank != _ROOT:
            return True
        indices = torch.arange(_COMPARED) * (result.numel() - 1) // (_COMPARED - 1)
        actual, right = result[indices].double().cpu(), self.case.expected(indices).double()
        # Sums of very many ranks are rounded in bfloat16.
        return torch.allclose(actual, right, rtol=2**-6, atol=0.0)


def _content(rank: int | Tensor, indices: Tensor) -> Tensor:
    return indices % 3 + rank % 2


# ---- variants ---------------------------------------------------------------------------------------------------


def our_variant(case: CollectiveCase, source: Tensor) -> Variant:
    """Return axonmpi's variant of a case, on this tensor."""
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(all_reduce, source),
        "reduce": partial(reduce, source, _ROOT),
        "broadcast": partial(broadcast, source),
        "all_gather": partial(all_gather, source),
        "reduce_scatter": partial(reduce_scatter_sum, source),
    }
    return Variant(case, source, calls[case.operation], source if case.is_in_place else None)


def mpi_variant(case: CollectiveCase, mpi: Any) -> Variant:
    """Return MPI's own variant of a case of float32; `mpi` is the module `mpi4py.MPI`, started."""
    comm = mpi.COMM_WORLD
    source, result = _source_and_result(case)
    own, target = source.numpy(), result.numpy()
    reduces_in_place = (mpi.IN_PLACE, own) if case.rank == _ROOT else (own, None)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(comm.Allreduce, mpi.IN_PLACE, own),
        "reduce": partial(comm.Reduce, *reduces_in_place, root=_ROOT),
        "broadcast": partial(comm.Bcast, own, _ROOT),
        "all_gather": partial(comm.Allgather, own, target),
        "reduce_scatter": partial(comm.Reduce_scatter_block, own, target),
    }
    return Variant(case, source, calls[case.operation], result)


def torch_variant(case: CollectiveCase) -> Variant:
    """Return the variant of torch.distributed's default group."""
    source, result = _source_and_result(case)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, source),
        "reduce": partial(dist.reduce, source, _ROOT),
        "broadcast": partial(dist.broadcast, source, _ROOT),
        "all_gather": partial(all_gather_flat, result, source),
        "reduce_scatter": partial(reduce_scatter_flat, result, source),
    }
    return Variant(case, source, calls[case.operation], result)


def memcpy_variant(case: CollectiveCase) -> Variant:
    """Return a copy of as many bytes within this rank's memory."""
    copy = replace(case, operation="copy")
    source, target = copy.zeros(), copy.zeros()
    return Variant(copy, source, partial(target.copy_, source), target)


def _source_and_result(case: CollectiveCase) -> tuple[Tensor, Tensor]:
    """Return ordinary tensors for the source and for the result, the same one if the operation is in place."""
    source = case.zeros()
    return source, source if case.is_in_place else flat_zeros(case.result_numel, case.dtype, case.device)


# ---- measuring --------------------------------------------------------------------------------------------------


def measure_variants(
    variants: Mapping[str, Variant],
    blocks: int,
    *,
    ranks: RankOperations = OVER_AXONMPI,
    before: Callable[[], object] | None = None,
    clock: Clock = WALL,
    block_seconds: float = BLOCK_SECONDS,
) -> dict[str, float]:
    """Check the variants of a case, then time them in turns; collective. Returns microseconds a call.

    Args:
        variants: The same on all ranks.
        blocks: Number of turns of each variant.
        ranks: The ranks' operations.
        before: Called before each round of turns, untimed.
        clock: Measures a block.
        block_seconds: About how long a block takes, unless one call takes longer.

    Raises:
        RuntimeError: A variant's result is wrong; raised on all ranks.
    """
    check_results(variants, ranks)
    calls = {name: variant.call for name, variant in variants.items()}
    numbers = {name: calls_for(call, block_seconds, ranks, clock) for name, call in calls.items()}
    return interleave(
        calls, blocks=blocks, calls=numbers, unit=MICROSECONDS, before=before, ranks=ranks, clock=clock
    )


def check_results(variants: Mapping[str, Variant], ranks: RankOperations = OVER_AXONMPI) -> None:
    """Raise RuntimeError on all ranks if a variant's result is wrong on any rank; collective."""
    wrong = [name for name, variant in variants.items() if ranks.maximum(not variant.is_right())]
    if wrong:
        case = variants[wrong[0]].case
        call = f"{case.operation} of {format_size(case.nbytes)} of {case.dtype} on {case.ranks} ranks"
        raise RuntimeError(f"{call}: wrong result of {', '.join(wrong)}")


def library_name(mpi: Any) -> str:
    """Return the name of the MPI library in use."""
    # An MPI library may stand in for another one of the same binary interface, which mpi4py was built for.
    return "Intel MPI" if "Intel" in mpi.Get_library_version() else runtime.library_info().vendor
