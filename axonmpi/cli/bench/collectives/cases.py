"""One collective of one dtype and size, done in several ways, and its right result.

Element i of the tensor of rank r is `i % 3 + r % 2`, so that every result is known without communication. The small
whole numbers are exact in every dtype, and three divides no power of two: data in a wrong place show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....comm import all_gather, all_reduce, broadcast, reduce, reduce_scatter_sum, symmetric_empty
from ....utils.memory import flat_zeros
from ..harness.timing import all_gather_flat, reduce_scatter_flat

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
CPU = torch.device("cpu")
_ROOT = 0
_COMPARED = 64
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WRITTEN = re.compile(r"(\d+) ?(" + "|".join(_UNITS) + ")", re.ASCII)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        operation: One of `OPERATIONS`, or copy.
        dtype: Of the elements.
        nbytes: Size of the whole tensor. Before an all_gather and after a reduce_scatter a rank has one part of it,
            all parts of the same size.
        rank: This rank.
        ranks: The number of ranks.
        place: The device that tensors are on.
    """

    operation: str
    dtype: torch.dtype
    nbytes: int
    rank: int
    ranks: int
    place: torch.device = CPU

    @property
    def part_numel(self) -> int:
        """Elements of one rank's part, at least one."""
        return -(-self.nbytes // (self.dtype.itemsize * self.ranks))

    @property
    def source_numel(self) -> int:
        """Elements that a rank puts in."""
        sizes = {"all_gather": self.part_numel, "reduce_scatter": self.part_numel * self.ranks}
        return sizes.get(self.operation, -(-self.nbytes // self.dtype.itemsize))

    @property
    def result_numel(self) -> int:
        """Elements that a rank gets."""
        sizes = {"all_gather": self.part_numel * self.ranks, "reduce_scatter": self.part_numel}
        return sizes.get(self.operation, self.source_numel)

    def expected(self, positions: Tensor) -> Tensor:
        """Return the right elements at some positions of this rank's result, int64; local."""
        if self.operation == "copy":
            return _content(self.rank, positions)
        if self.operation == "broadcast":
            return _content(_ROOT, positions)
        if self.operation == "all_gather":
            return _content(positions // self.part_numel, positions % self.part_numel)
        if self.operation == "reduce_scatter":
            positions = positions + self.rank * self.part_numel
        return torch.stack([_content(rank, positions) for rank in range(self.ranks)]).sum(0)


@dataclass(frozen=True)
class Variant:
    """One way to do a case.

    Attributes:
        case: The case.
        source: What this rank puts in.
        call: Does it once; collective, but for a copy.
        result: The tensor that then holds the result; None: `call` returns it.
    """

    case: Case
    source: Tensor
    call: Callable[[], object]
    result: Tensor | None = None

    def is_right(self) -> bool:
        """Do it once and check some elements of the result; collective. Leaves zeros, which stay zeros."""
        self.source.copy_(_content(self.case.rank, torch.arange(self.source.numel(), dtype=torch.int32)))
        returned = self.call()
        result = returned if self.result is None else self.result
        right = isinstance(result, Tensor) and self._holds(result)
        self.source.zero_()
        return right

    def _holds(self, result: Tensor) -> bool:
        """Compare elements spread over the result, the first and the last included, with the right ones."""
        if self.case.operation == "reduce" and self.case.rank != _ROOT:
            return True
        positions = torch.arange(_COMPARED) * (result.numel() - 1) // (_COMPARED - 1)
        got, wanted = result[positions].double().cpu(), self.case.expected(positions).double()
        # sums of very many ranks are rounded in bfloat16
        return torch.allclose(got, wanted, rtol=2**-6, atol=0.0)


def _content(rank: int | Tensor, positions: Tensor) -> Tensor:
    return positions % 3 + rank % 2


def variants_of(case: Case, mpi: Any) -> dict[str, Variant]:
    """Prepare all ways to do a case; collective. MPI, which has no bfloat16, comes with float32 only.

    Args:
        case: The case, the same on all ranks.
        mpi: The module `mpi4py.MPI`; None for tensors on GPUs.
    """
    ordinary = our_variant(case, flat_zeros(case.source_numel, case.dtype, case.place))
    if mpi is None:
        torchs = {"torch": torch_variant(case)} if dist.is_initialized() else {}
        return {"ordinary": ordinary, **torchs, "memcpy": _memcpy(case)}
    return {
        "symmetric": our_variant(case, symmetric_empty([case.source_numel], case.dtype)),
        "ordinary": ordinary,
        **({"mpi": mpi_variant(case, mpi)} if case.dtype == torch.float32 else {}),
        "gloo": torch_variant(case),
        "memcpy": _memcpy(case),
    }


def our_variant(case: Case, source: Tensor) -> Variant:
    """Prepare ours for a case, on the memory given; local."""
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


def torch_variant(case: Case) -> Variant:
    """Prepare the way of torch.distributed's default group; local."""
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
    source, target = (flat_zeros(numel, case.dtype, case.place) for _ in range(2))
    return Variant(replace(case, operation="copy"), source, partial(target.copy_, source), target)


def _memory(case: Case) -> tuple[Tensor, Tensor]:
    """Make ordinary memory for the source and for the result, the same where the operation is in place."""
    source = flat_zeros(case.source_numel, case.dtype, case.place)
    changes_size = case.operation in ("all_gather", "reduce_scatter")
    return source, flat_zeros(case.result_numel, case.dtype, case.place) if changes_size else source


def parse_size(text: str) -> int:
    """Return the number of bytes that `64KiB` or the like stands for; local.

    Raises:
        ValueError: The text is no size, or the size is zero.
    """
    written = _WRITTEN.fullmatch(text)
    nbytes = int(written[1]) * _UNITS[written[2]] if written else 0
    if not nbytes:
        raise ValueError(f"expected a size such as 4B, 64KiB or 16MiB, got {text!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that divides it, such as `64 KiB`; local."""
    unit = next(unit for unit in reversed(_UNITS) if nbytes % _UNITS[unit] == 0)
    return f"{nbytes // _UNITS[unit]} {unit}"


def format_time(microseconds: float | None) -> str:
    """Write a time in microseconds, or in milliseconds from one on; local."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.2f} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"
