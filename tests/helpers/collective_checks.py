"""Runs the collectives of one group on known values and compares the results with numpy.

    checks = CollectiveChecks(group, asynchronous=True)
    checks.all_reduce(torch.float32, (3, 5), ReduceOp.SUM, "transposed")
    checks.all_gather(...)                       up to three operations are under way
    checks.finish()                              AssertionError, naming each case that was wrong

Problems are collected rather than raised, so that all ranks go through the same operations to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp
from helpers.numpy_reference import Expected, Shape, reduced, same_bits, values

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "negated", "conjugated")
PAYLOAD_BYTES = 112
"""What fits into the first message of a collective beside the description of the call."""
_SHOWN = 10


def allows(dtype: torch.dtype, shape: Shape, layout: str) -> bool:
    """Whether there is such a tensor."""
    if layout == "negated":
        return dtype in (torch.float32, torch.float64)
    if layout == "conjugated":
        return dtype.is_complex and dtype is not torch.complex32
    return len(shape) > {"transposed": 1, "strided": 0}.get(layout, -1)


class Watched:
    """A tensor that lies in memory among other values, which nobody may change."""

    def __init__(self, tensor: Tensor, around: Sequence[Tensor]) -> None:
        self.tensor = tensor
        self._around = around
        self._before = [part.clone() for part in around]
        self._version = tensor._version

    def is_intact(self) -> bool:
        """Whether what lies around the tensor is unchanged."""
        return all(map(same_bits, self._around, self._before))

    def autograd_knows(self) -> bool:
        """Whether a write into the tensor is visible to autograd."""
        return self.tensor._version > self._version or not self.tensor.numel()


class Laid(Watched):
    """A tensor with given values, laid out in memory in some way."""

    def __init__(self, source: Tensor, layout: str) -> None:
        self._around = []
        super().__init__(getattr(self, f"_{layout}")(source), self._around)

    def _contiguous(self, source: Tensor) -> Tensor:
        return source.clone()

    def _transposed(self, source: Tensor) -> Tensor:
        backwards = tuple(reversed(range(source.dim())))
        return source.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)

    def _strided(self, source: Tensor) -> Tensor:
        *rest, last = source.shape
        memory = torch.ones(*rest, 2 * last + 1, device=source.device).to(source.dtype)
        self._around = [memory[..., ::2]]
        return memory[..., 1::2].copy_(source)

    def _offset(self, source: Tensor) -> Tensor:
        count = source.numel()
        memory = torch.ones(count + 4, device=source.device).to(source.dtype)
        self._around = [memory[:3], memory[-1:]]
        return memory[3 : 3 + count].view(source.shape).copy_(source)

    def _negated(self, source: Tensor) -> Tensor:
        return torch.complex(torch.zeros_like(source), -source).conj().imag

    def _conjugated(self, source: Tensor) -> Tensor:
        return source.conj().resolve_conj().conj()


class CollectiveChecks:
    """Runs collectives of a group and compares.

    Args:
        group: The calls are collective over it.
        asynchronous: Start operations and wait for them later.
        seed: Of the values.
        label: Named with each problem.
    """

    most_under_way = 3

    def __init__(
        self, group: ProcessGroup, *, asynchronous: bool = False, seed: int = 0, label: object = ""
    ) -> None:
        self.group = group
        self.problems: list[str] = []
        self._asynchronous = asynchronous
        self._label = str(label)
        self._seed = 1000 * seed
        self._under_way: list[tuple[Any, Callable[[Any], None]]] = []

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        layout: str = "contiguous",
    ) -> None:
        case = self._case("all_reduce", dtype, shape, op, layout)
        laid = self._lay(self._own(dtype, shape), layout)
        expected = self._reduced(dtype, shape, op)
        returned = self.group.all_reduce(laid.tensor, op, async_op=self._asynchronous)
        self._later(returned, lambda value: self._written(case, laid, value, expected))

    def reduce(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        dst: int = 0,
        layout: str = "contiguous",
    ) -> None:
        case = self._case("reduce", dtype, shape, op, dst, layout)
        laid = self._lay(self._own(dtype, shape), layout)
        own = self._own(dtype, shape)
        expected = self._reduced(dtype, shape, op)
        returned = self.group.reduce(laid.tensor, dst, op, async_op=self._asynchronous)

        def compare(value: Any) -> None:
            if self.group.rank == dst:
                self._written(case, laid, value, expected)
            else:
                self._unchanged(case, laid, own)

        self._later(returned, compare)

    def reduce_scatter(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        dim: int = 0,
        layout: str = "contiguous",
    ) -> None:
        case = self._case("reduce_scatter", dtype, shape, op, dim, layout)
        laid = self._lay(self._own(dtype, shape), layout)
        own = self._own(dtype, shape)
        expected = self._reduced(dtype, shape, op).slice(self.group.size, dim, self.group.rank)
        returned = self.group.reduce_scatter(laid.tensor, op, dim, async_op=self._asynchronous)

        def compare(value: Tensor) -> None:
            self._is_new(case, value, laid.tensor)
            self._close(case, value, dtype, expected)
            self._unchanged(case, laid, own)

        self._later(returned, compare)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, dtype: torch.dtype, shape: Shape, src: int = 0, layout: str = "contiguous") -> None:
        case = self._case("broadcast", dtype, shape, src, layout)
        laid = self._lay(self._own(dtype, shape), layout)
        wanted = self._of(src, dtype, shape)
        returned = self.group.broadcast(laid.tensor, src, async_op=self._asynchronous)

        def compare(value: Any) -> None:
            self._expect(case, value is None, f"returned {value!r}")
            self._equal(case, laid.tensor, wanted)
            self._expect(case, laid.is_intact(), "changed memory around the tensor")
            self._expect(case, self.group.rank == src or laid.autograd_knows(), "unseen by autograd")

        self._later(returned, compare)

    def all_gather(
        self,
        dtype: torch.dtype,
        shape: Shape,
        dim: int = 0,
        layout: str = "contiguous",
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`sizes`: for each rank its size along `dim`, in place of the one in `shape`."""
        shapes = self._shapes(shape, dim, sizes)
        case = self._case("all_gather", dtype, shapes, dim, layout)
        parts = [self._of(rank, dtype, shape) for rank, shape in enumerate(shapes)]
        wanted = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim)
        laid = self._lay(parts[self.group.rank], layout)
        returned = self.group.all_gather(laid.tensor, dim, async_op=self._asynchronous)

        def compare(value: Tensor) -> None:
            self._copied(case, value, wanted, laid.tensor)
            self._unchanged(case, laid, parts[self.group.rank])

        self._later(returned, compare)

    def gather(
        self,
        dtype: torch.dtype,
        shape: Shape,
        dst: int = 0,
        layout: str = "contiguous",
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`sizes`: for each rank its size along dimension 0, in place of the one in `shape`."""
        shapes = self._shapes(shape, 0, sizes)
        case = self._case("gather", dtype, shapes, dst, layout)
        parts = [self._of(rank, dtype, shape) for rank, shape in enumerate(shapes)]
        own = Laid(parts[self.group.rank], layout).tensor
        returned = self.group.gather(own, dst, async_op=self._asynchronous)

        def compare(value: Any) -> None:
            if self.group.rank != dst:
                self._expect(case, value is None, f"returned {value!r} on a rank that is not dst")
                return
            self._expect(case, len(value) == self.group.size, f"returned {len(value)} tensors")
            for got, wanted in zip(value, parts, strict=True):
                self._copied(case, got, wanted, own)

        self._later(returned, compare)

    def scatter(self, dtype: torch.dtype, shape: Shape, src: int = 0, layout: str = "contiguous") -> None:
        case = self._case("scatter", dtype, shape, src, layout)
        whole = self._of(src, dtype, shape)
        own = Laid(whole, layout).tensor if self.group.rank == src else None
        wanted = whole.tensor_split(self.group.size)[self.group.rank]
        returned = self.group.scatter(own, src, async_op=self._asynchronous)
        self._later(returned, lambda value: self._copied(case, value, wanted, own))

    def all_to_all(self, kinds: Sequence[tuple[torch.dtype, Shape]], layout: str = "contiguous") -> None:
        """Rank i sends `kinds[(i + j) % len(kinds)]` to rank j."""
        case = self._case("all_to_all", kinds, layout)
        size, rank = self.group.size, self.group.rank

        def part(source: int, target: int) -> Tensor:
            dtype, shape = kinds[(source + target) % len(kinds)]
            return self._of(source * size + target, dtype, shape)

        sent = [part(rank, target) for target in range(size)]
        wanted = [part(source, rank) for source in range(size)]
        laid = [
            Laid(tensor, layout if allows(tensor.dtype, tensor.shape, layout) else "contiguous") for tensor in sent
        ]
        returned = self.group.all_to_all([item.tensor for item in laid], async_op=self._asynchronous)

        def compare(value: list[Tensor]) -> None:
            self._expect(case, len(value) == size, f"returned {len(value)} tensors")
            for source, got in enumerate(value):
                self._copied(case, got, wanted[source], laid[source].tensor)

        self._later(returned, compare)

    def barrier(self) -> None:
        case = self._case("barrier")
        returned = self.group.barrier(async_op=self._asynchronous)
        self._later(returned, lambda value: self._expect(case, value is None, f"returned {value!r}"))

    # ---- messages -----------------------------------------------------------------------------------------

    def ring(self, dtype: torch.dtype, shape: Shape, layout: str = "contiguous", tag: int = 0) -> None:
        """Send to the next rank, receive from the one before."""
        case = self._case("ring", dtype, shape, layout, tag)
        rank, size = self.group.rank, self.group.size
        tag = 0 if self.group.backend.name == "nccl" else tag  # NCCL has no tags
        before, after = (rank - 1) % size, (rank + 1) % size
        laid = Laid(torch.zeros(shape, device=self.group.backend.place).to(dtype), layout)
        wanted = self._of(before, dtype, shape)
        sending = self.group.isend(Laid(self._own(dtype, shape), layout).tensor, after, tag)
        if self._asynchronous:
            receiving = self.group.irecv(laid.tensor, before, tag)
        else:
            self.group.recv(laid.tensor, before, tag)
            receiving = None

        def compare(value: Any) -> None:
            sending.wait()
            self._equal(case, laid.tensor, wanted)
            self._expect(case, laid.is_intact(), "changed memory around the tensor")
            self._expect(case, laid.autograd_knows(), "unseen by autograd")

        self._later(receiving, compare)

    # ---- all of them --------------------------------------------------------------------------------------

    def every_operation(self, dtype: torch.dtype, shape: Shape, layout: str = "contiguous") -> None:
        """Run each operation once, with the last rank as root; `shape` has at least one dimension."""
        root = self.group.size - 1
        self.all_reduce(dtype, shape, layout=layout)
        self.reduce(dtype, shape, dst=root, layout=layout)
        self.broadcast(dtype, shape, root, layout)
        self.all_gather(dtype, shape, len(shape) - 1, layout)
        self.reduce_scatter(dtype, shape, dim=len(shape) - 1, layout=layout)
        self.gather(dtype, shape, root, layout)
        self.scatter(dtype, shape, root, layout)
        self.all_to_all([(dtype, shape)], layout)
        self.ring(dtype, shape, layout)

    def finish(self) -> None:
        """Wait for what is under way; raise if anything was wrong."""
        self.settle()
        shown = [*self.problems[:_SHOWN], *(["..."] if len(self.problems) > _SHOWN else [])]
        assert not self.problems, f"{len(self.problems)} problems:\n" + "\n".join(shown)

    def settle(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._settle_oldest()

    # ---- steps --------------------------------------------------------------------------------------------

    def _lay(self, source: Tensor, layout: str) -> Watched:
        """Put into memory what this rank gives to an operation that all ranks call with a tensor."""
        return Laid(source, layout)

    def _case(self, operation: str, *options: object) -> str:
        """Name the case; the values of the next one are different."""
        self._seed += 1
        return f"{operation}{options} {self._label}"

    def _of(self, rank: int, dtype: torch.dtype, shape: Shape) -> Tensor:
        """What a rank of the group contributes; numbers from the group's size on are further values of its."""
        owner = self.group.ranks[rank % self.group.size] + 100 * (rank // self.group.size)
        return values(dtype, tuple(shape), owner, self._seed).to(self.group.backend.place)

    def _own(self, dtype: torch.dtype, shape: Shape) -> Tensor:
        return self._of(self.group.rank, dtype, shape)

    def _reduced(self, dtype: torch.dtype, shape: Shape, op: ReduceOp) -> Expected:
        by_steps = self.group.backend.name == "nccl"
        return reduced(dtype, tuple(shape), self.group.ranks, self._seed, op, rounds_each_step=by_steps)

    def _shapes(self, shape: Shape, dim: int, sizes: Sequence[int] | None) -> list[Shape]:
        if sizes is None:
            return [shape] * self.group.size
        return [(*shape[:dim], sizes[rank % len(sizes)], *shape[dim + 1 :]) for rank in range(self.group.size)]

    def _later(self, returned: Any, compare: Callable[[Any], None]) -> None:
        """Compare now, or when the operation is complete."""
        if not self._asynchronous:
            compare(returned)
            return
        self._under_way.append((returned, compare))
        if len(self._under_way) > self.most_under_way:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        work, compare = self._under_way.pop(0)
        compare(work.result())

    def _expect(self, case: str, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(f"{case}: {problem}")

    def _written(self, case: str, laid: Watched, value: Any, expected: Expected) -> None:
        self._expect(case, value is None, f"returned {value!r}")
        self._close(case, laid.tensor, laid.tensor.dtype, expected)
        self._expect(case, laid.is_intact(), "changed memory around the tensor")
        self._expect(case, laid.autograd_knows(), "unseen by autograd")

    def _unchanged(self, case: str, laid: Watched, own: Tensor) -> None:
        self._expect(case, same_bits(laid.tensor, own), "changed what it was given")
        self._expect(case, laid.is_intact(), "changed memory around the tensor")

    def _copied(self, case: str, got: Tensor, wanted: Tensor, source: Tensor | None) -> None:
        self._equal(case, got, wanted)
        self._is_new(case, got, source)

    def _close(self, case: str, got: Tensor, dtype: torch.dtype, expected: Expected) -> None:
        difference = expected.difference(got) if got.dtype == dtype else f"dtype {got.dtype}"
        self._expect(case, difference is None, str(difference))

    def _equal(self, case: str, got: Tensor, wanted: Tensor) -> None:
        if not same_bits(got, wanted):
            self.problems.append(f"{case}: got {got.dtype} {tuple(got.shape)} {got}, expected {wanted}")

    def _is_new(self, case: str, got: Tensor, source: Tensor | None) -> None:
        shared = source is not None and got.numel() and got.data_ptr() == source.data_ptr()
        self._expect(case, not shared, "returned the memory of its input")
        self._expect(case, got.is_contiguous(), "not contiguous")
