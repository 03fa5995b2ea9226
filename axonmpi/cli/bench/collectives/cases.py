"""One collective of one dtype and size, done in several ways, and what has to come out of it.

Element i of what rank r puts in is `i % 3 + r % 2`, so that every result is known without communication. The small
whole numbers are exact in every dtype, and three divides no power of two: data that land in a wrong place show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....comm import all_gather, all_reduce, broadcast, reduce, reduce_scatter_sum, symmetric_empty
from ....utils.memory import flat_zeros
from ..gloo import all_gather_flat, reduce_scatter_flat

__all__ = ["OPERATIONS", "Case", "Variant", "mpi_variant", "variants_of"]

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_ROOT = 0
_LOOKED_AT = 64


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        operation: One of `OPERATIONS`.
        dtype: Of the elements.
        nbytes: Size of the whole tensor. Before an all_gather and after a reduce_scatter a rank has one part of it,
            all parts of the same size.
        rank: This rank.
        ranks: How many there are.
    """

    operation: str
    dtype: torch.dtype
    nbytes: int
    rank: int
    ranks: int

    @property
    def part_numel(self) -> int:
        """Elements of one rank's part, at least one."""
        return -(-self.nbytes // (self.dtype.itemsize * self.ranks))

    @property
    def source_numel(self) -> int:
        """Elements that a rank puts in."""
        if self.operation == "all_gather":
            return self.part_numel
        if self.operation == "reduce_scatter":
            return self.part_numel * self.ranks
        return -(-self.nbytes // self.dtype.itemsize)

    @property
    def result_numel(self) -> int:
        """Elements that a rank gets."""
        sizes = {"all_gather": self.part_numel * self.ranks, "reduce_scatter": self.part_numel}
        return sizes.get(self.operation, self.source_numel)

    @property
    def has_result(self) -> bool:
        """Whether this rank gets anything."""
        return self.operation != "reduce" or self.rank == _ROOT

    def expected(self, position: int) -> int:
        """Return what has to stand at a position of this rank's result; local."""
        if self.operation == "broadcast":
            return _content(_ROOT, position)
        if self.operation == "all_gather":
            return _content(*divmod(position, self.part_numel))
        if self.operation == "reduce_scatter":
            position += self.rank * self.part_numel
        return sum(_content(rank, position) for rank in range(self.ranks))


@dataclass(frozen=True)
class Variant:
    """One way to do a case.

    Attributes:
        case: The case.
        source: What this rank puts in.
        call: Does it once; collective, but for a copy.
        result: Where the result is afterwards; None: `call` returns it.
        is_copy: Whether it communicates nothing.
    """

    case: Case
    source: Tensor
    call: Callable[[], object]
    result: Tensor | None = None
    is_copy: bool = False

    def is_right(self) -> bool:
        """Do it once and look at some elements of the result; collective. Leaves zeros, which stay zeros."""
        for start in range(3):
            self.source[start::3] = _content(self.case.rank, start)
        returned = self.call()
        result = returned if self.result is None else self.result
        right = isinstance(result, Tensor) and (self._holds(result) or not (self.is_copy or self.case.has_result))
        self.source.zero_()
        return right

    def _holds(self, result: Tensor) -> bool:
        """Compare elements spread over the result, the first and the last included, with what is expected."""
        last = result.numel() - 1
        positions = sorted({last * step // (_LOOKED_AT - 1) for step in range(_LOOKED_AT)})
        rank = self.case.rank
        wanted = [_content(rank, at) if self.is_copy else self.case.expected(at) for at in positions]
        found = result[positions].tolist()
        # of a great many ranks, sums in bfloat16 are rounded
        return all(math.isclose(a, b, rel_tol=2**-6) for a, b in zip(found, wanted, strict=True))


def _content(rank: int, position: int) -> int:
    return position % 3 + rank % 2


def variants_of(case: Case, mpi: Any) -> dict[str, Variant]:
    """Prepare all ways to do a case; collective. MPI, which has no bfloat16, is among them for float32 only.

    Args:
        case: The case, the same on all ranks.
        mpi: The module `mpi4py.MPI`.
    """
    variants = {
        "symmetric": _ours(case, symmetric_empty([case.source_numel], case.dtype)),
        "ordinary": _ours(case, flat_zeros(case.source_numel, case.dtype)),
        "mpi": mpi_variant(case, mpi) if case.dtype == torch.float32 else None,
        "gloo": _gloo(case),
        "memcpy": _memcpy(case),
    }
    return {name: variant for name, variant in variants.items() if variant is not None}


def _ours(case: Case, source: Tensor) -> Variant:
    if case.operation == "all_gather":
        return Variant(case, source, partial(all_gather, source))
    if case.operation == "reduce_scatter":
        return Variant(case, source, partial(reduce_scatter_sum, source))
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(all_reduce, source),
        "reduce": partial(reduce, source, _ROOT),
        "broadcast": partial(broadcast, source),
    }
    return Variant(case, source, calls[case.operation], source)


def mpi_variant(case: Case, mpi: Any) -> Variant:
    """Prepare MPI's own way to do a case of float32; local. `mpi` is the module `mpi4py.MPI`, started."""
    comm = mpi.COMM_WORLD
    source, result = _memory(case)
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


def _gloo(case: Case) -> Variant:
    source, result = _memory(case)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, source),
        "reduce": partial(dist.reduce, source, _ROOT),
        "broadcast": partial(dist.broadcast, source, _ROOT),
        "all_gather": partial(all_gather_flat, result, source),
        "reduce_scatter": partial(reduce_scatter_flat, result, source),
    }
    return Variant(case, source, calls[case.operation], result)


def _memcpy(case: Case) -> Variant:
    numel = -(-case.nbytes // case.dtype.itemsize)
    source, target = (flat_zeros(numel, case.dtype) for _ in range(2))
    return Variant(case, source, partial(target.copy_, source), target, is_copy=True)


def _memory(case: Case) -> tuple[Tensor, Tensor]:
    """Make ordinary memory for what goes in and for what comes out, the same where the operation is in place."""
    source = flat_zeros(case.source_numel, case.dtype)
    changes_size = case.operation in ("all_gather", "reduce_scatter")
    return source, flat_zeros(case.result_numel, case.dtype) if changes_size else source
