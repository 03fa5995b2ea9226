"""Runs the collectives of one group on tensors that lie in shared memory and compares the results with numpy.

The same checks as those of `collective_checks`, of the operations that use shared memory: what differs is where the
tensors lie (`placements`), and that memory is watched which the other ranks can write to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy_reference import Expected, Shape, reduced, same_bits, values
from placements import Placed, Places
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp

_UNDER_WAY = 2
_SHOWN = 10


class SymmetricChecks:
    """Runs collectives and compares; problems are collected, so that all ranks go through the same operations.

    Args:
        group: The calls are collective over it.
        places: Where the tensors lie.
        asynchronous: Start operations and wait for them later.
        seed: Of the values.
    """

    def __init__(
        self, group: ProcessGroup, places: Places, *, asynchronous: bool = False, seed: int = 0, label: object = ""
    ) -> None:
        self.group = group
        self.places = places
        self.problems: list[str] = []
        self.count = 0
        self._asynchronous = asynchronous
        self._seed = seed
        self._label = f"{places.kind} {label}".strip()
        self._under_way: list[tuple[Any, Callable[[Any], None]]] = []

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM) -> None:
        case = self._case("all_reduce", dtype, shape, op)
        placed = self.places.put(self._own(dtype, shape))
        expected = self._reduced(dtype, shape, op)
        returned = self.group.all_reduce(placed.tensor, op, async_op=self._asynchronous)
        self._later(returned, lambda value: self._written(case, placed, value, expected))

    def reduce(self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM, dst: int = 0) -> None:
        case = self._case("reduce", dtype, shape, op, dst)
        placed = self.places.put(self._own(dtype, shape))
        expected = self._reduced(dtype, shape, op)
        returned = self.group.reduce(placed.tensor, dst, op, async_op=self._asynchronous)

        def compare(value: Any) -> None:
            if self.group.rank == dst:
                self._written(case, placed, value, expected)
            else:
                self._unchanged(case, placed, dtype, shape)

        self._later(returned, compare)

    def reduce_scatter(self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM, dim: int = 0) -> None:
        case = self._case("reduce_scatter", dtype, shape, op, dim)
        placed = self.places.put(self._own(dtype, shape))
        expected = self._reduced(dtype, shape, op).slice(self.group.size, dim, self.group.rank)
        returned = self.group.reduce_scatter(placed.tensor, op, dim, async_op=self._asynchronous)

        def compare(value: Tensor) -> None:
            self._close(case, value, dtype, expected)
            self._unchanged(case, placed, dtype, shape)
            self._expect(case, value.is_contiguous(), "not contiguous")

        self._later(returned, compare)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, dtype: torch.dtype, shape: Shape, src: int = 0) -> None:
        case = self._case("broadcast", dtype, shape, src)
        placed = self.places.put(self._own(dtype, shape))
        wanted = self._of(src, dtype, shape)
        returned = self.group.broadcast(placed.tensor, src, async_op=self._asynchronous)

        def compare(value: Any) -> None:
            self._expect(case, value is None, f"returned {value!r}")
            self._expect(case, same_bits(placed.tensor, wanted), "wrong")
            self._expect(case, placed.is_intact(), "changed memory around the tensor")
            self._expect(case, self.group.rank == src or placed.autograd_knows(), "unseen by autograd")

        self._later(returned, compare)

    def all_gather(
        self, dtype: torch.dtype, shape: Shape, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> None:
        """`sizes`: for each rank its size along `dim`, in place of the one in `shape`."""
        ranks = range(self.group.size)
        shapes = [shape] * self.group.size
        if sizes is not None:
            shapes = [(*shape[:dim], sizes[rank % len(sizes)], *shape[dim + 1 :]) for rank in ranks]
        case = self._case("all_gather", dtype, shapes, dim)
        parts = [self._of(rank, dtype, shapes[rank]) for rank in ranks]
        wanted = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim)
        own = shapes[self.group.rank]
        placed = self.places.put(parts[self.group.rank])
        returned = self.group.all_gather(placed.tensor, dim, async_op=self._asynchronous)

        def compare(value: Tensor) -> None:
            self._expect(case, same_bits(value, wanted), "wrong")
            self._unchanged(case, placed, dtype, own)
            self._expect(case, value.is_contiguous(), "not contiguous")

        self._later(returned, compare)

    # ---- all of them --------------------------------------------------------------------------------------

    def every_operation(self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM) -> None:
        """Run each operation once; roots and dimensions take turns."""
        self.count += 1
        root, dim = self.count % self.group.size, self.count % max(1, len(shape))
        self.all_reduce(dtype, shape, op)
        self.reduce(dtype, shape, op, root)
        self.broadcast(dtype, shape, root)
        self.all_gather(dtype, shape, dim)
        if shape:
            self.reduce_scatter(dtype, shape, op, dim)

    def finish(self) -> None:
        """Wait for what is under way; raise if anything was wrong."""
        while self._under_way:
            self._settle_oldest()
        shown = [*self.problems[:_SHOWN], *(["..."] if len(self.problems) > _SHOWN else [])]
        assert not self.problems, f"{len(self.problems)} problems:\n" + "\n".join(shown)

    # ---- steps --------------------------------------------------------------------------------------------

    def _case(self, operation: str, *options: object) -> str:
        return f"{operation}{options} {self._label}"

    def _of(self, rank: int, dtype: torch.dtype, shape: Shape) -> Tensor:
        return values(dtype, shape, self.group.ranks[rank], self._seed)

    def _own(self, dtype: torch.dtype, shape: Shape) -> Tensor:
        return self._of(self.group.rank, dtype, shape)

    def _reduced(self, dtype: torch.dtype, shape: Shape, op: ReduceOp) -> Expected:
        return reduced(dtype, shape, self.group.ranks, self._seed, op)

    def _later(self, returned: Any, compare: Callable[[Any], None]) -> None:
        if not self._asynchronous:
            compare(returned)
            return
        self._under_way.append((returned, compare))
        if len(self._under_way) > _UNDER_WAY:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        work, compare = self._under_way.pop(0)
        compare(work.result())

    def _expect(self, case: str, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(f"{case}: {problem}")

    def _written(self, case: str, placed: Placed, value: Any, expected: Expected) -> None:
        self._expect(case, value is None, f"returned {value!r}")
        self._close(case, placed.tensor, placed.tensor.dtype, expected)
        self._expect(case, placed.is_intact(), "changed memory around the tensor")
        self._expect(case, placed.autograd_knows(), "unseen by autograd")

    def _unchanged(self, case: str, placed: Placed, dtype: torch.dtype, shape: Shape) -> None:
        self._expect(case, same_bits(placed.tensor, self._own(dtype, shape)), "changed its input")
        self._expect(case, placed.is_intact(), "changed memory around the tensor")

    def _close(self, case: str, got: Tensor, dtype: torch.dtype, expected: Expected) -> None:
        difference = expected.difference(got) if got.dtype == dtype else f"dtype {got.dtype}"
        self._expect(case, difference is None, str(difference))
