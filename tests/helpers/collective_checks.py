"""Runs the collectives of one group on known values and compares the results with numpy.

    checks = CollectiveChecks(group, asynchronous=True)
    checks.all_reduce(torch.float32, (3, 5), ReduceOp.SUM, "transposed")
    checks.all_gather(...)                       up to two operations are under way
    checks.finish()                              AssertionError, naming each case that was wrong

Problems are collected rather than raised, so that all ranks go through the same operations to the end.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp, Work
from helpers.numpy_reference import Expected, Shape, identity, reduced, same_bits, values

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "negated", "conjugated")
WITH_SYMMETRIC = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
"""Operations that have ways of their own for symmetric tensors."""
EDGE_BYTES = 128
"""What fits into the first message of a collective beside the description of the call."""
_SHOWN = 10


def complete(work: Work | None) -> None:
    """Wait for an operation, if it is asynchronous."""
    if work is not None:
        work.wait()


def check_usable(group: ProcessGroup) -> None:
    """Check that a group can be used, as after an error; collective."""
    checks = CollectiveChecks(group)
    checks.every_operation(torch.float32, (6, 2))
    checks.finish()


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


def laid(source: Tensor, layout: str) -> Watched:
    """Lay a copy of a tensor out in memory in some way."""
    if layout == "transposed":
        backwards = tuple(reversed(range(source.dim())))
        whole = source.permute(backwards).clone(memory_format=torch.contiguous_format)
        return Watched(whole.permute(backwards), [])
    if layout == "strided":
        *rest, last = source.shape
        memory = torch.ones(*rest, 2 * last + 1, device=source.device).to(source.dtype)
        return Watched(memory[..., 1::2].copy_(source), [memory[..., ::2]])
    if layout == "offset":
        memory = torch.ones(source.numel() + 4, device=source.device).to(source.dtype)
        return Watched(memory[3:-1].view(source.shape).copy_(source), [memory[:3], memory[-1:]])
    if layout == "negated":
        return Watched(torch.complex(torch.zeros_like(source), -source).conj().imag, [])
    return Watched(source.conj().resolve_conj().conj() if layout == "conjugated" else source.clone(), [])


class CollectiveChecks:
    """Runs collectives of a group and compares.

    Args:
        group: The calls are collective over it.
        asynchronous: Start operations and wait for them later.
        seed: Of the values.
        label: Named with each problem.
        put: Copies a tensor to where it shall lie (see `placements.Places`), in place of the layouts; three of them
            are in use at a time. The values are then the same in all cases of one dtype and shape.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        asynchronous: bool = False,
        seed: int = 0,
        label: object = "",
        put: Callable[[Tensor], Watched] | None = None,
    ) -> None:
        self.group = group
        self.problems: list[str] = []
        self._asynchronous = asynchronous
        self._label = str(label)
        self._put = put
        self._seed = 1000 * seed
        self._under_way: list[Callable[[], None]] = []

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(
        self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM, layout: str = "contiguous"
    ) -> None:
        case = self._case("all_reduce", dtype, shape, op, layout)
        given = self._lay(self._own(dtype, shape), layout)
        self._start(
            case, partial(self.group.all_reduce, given.tensor, op), [given], self._reduced(dtype, shape, op)
        )

    def reduce(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        dst: int = 0,
        layout: str = "contiguous",
    ) -> None:
        case = self._case("reduce", dtype, shape, op, dst, layout)
        given = self._lay(self._own(dtype, shape), layout)
        written = self._reduced(dtype, shape, op) if self.group.rank == dst else None
        self._start(case, partial(self.group.reduce, given.tensor, dst, op), [given], written)

    def reduce_scatter(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        dim: int = 0,
        layout: str = "contiguous",
    ) -> None:
        case = self._case("reduce_scatter", dtype, shape, op, dim, layout)
        given = self._lay(self._own(dtype, shape), layout)
        part = self._reduced(dtype, shape, op).slice(self.group.size, dim, self.group.rank)
        self._start(case, partial(self.group.reduce_scatter, given.tensor, op, dim), [given], returned=part)

    def scan(
        self,
        dtype: torch.dtype,
        shape: Shape,
        op: ReduceOp = ReduceOp.SUM,
        layout: str = "contiguous",
        tag: int = 0,
    ) -> None:
        """`tag` chooses among inclusive and exclusive, and the two directions."""
        op = op if op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX) else ReduceOp.SUM
        exclusive, reverse = bool(tag % 2), tag // 2 % 2 == 1
        case = self._case("scan", dtype, shape, op, exclusive, reverse, layout)
        given = self._lay(self._own(dtype, shape), layout)
        rank, ranks = self.group.rank, self.group.ranks
        owners = ranks[rank + exclusive :] if reverse else ranks[: rank + 1 - exclusive]
        place = self.group.backend.place
        written = (
            reduced(dtype, tuple(shape), tuple(owners), self._seed, op)
            if owners
            else identity(dtype, shape, op).to(place)
        )
        start = partial(self.group.backend.scan, given.tensor, op, exclusive=exclusive, reverse=reverse)
        self._start(case, start, [given], written)

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, dtype: torch.dtype, shape: Shape, src: int = 0, layout: str = "contiguous") -> None:
        case = self._case("broadcast", dtype, shape, src, layout)
        given = self._lay(self._own(dtype, shape), layout)
        written = None if self.group.rank == src else self._of(src, dtype, shape)
        self._start(case, partial(self.group.broadcast, given.tensor, src), [given], written)

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
        joined = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim)
        given = self._lay(parts[self.group.rank], layout)
        self._start(case, partial(self.group.all_gather, given.tensor, dim), [given], returned=joined)

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
        given = laid(parts[self.group.rank], layout)
        gathered = parts if self.group.rank == dst else None
        self._start(case, partial(self.group.gather, given.tensor, dst), [given], returned=gathered)

    def scatter(self, dtype: torch.dtype, shape: Shape, src: int = 0, layout: str = "contiguous") -> None:
        case = self._case("scatter", dtype, shape, src, layout)
        whole = self._of(src, dtype, shape)
        given = [laid(whole, layout)] if self.group.rank == src else []
        part = whole.tensor_split(self.group.size)[self.group.rank]
        self._start(
            case, partial(self.group.scatter, given[0].tensor if given else None, src), given, returned=part
        )

    def all_to_all(self, kinds: Sequence[tuple[torch.dtype, Shape]], layout: str = "contiguous") -> None:
        """Rank i sends `kinds[(i + j) % len(kinds)]` to rank j."""
        case = self._case("all_to_all", kinds, layout)
        size, rank = self.group.size, self.group.rank

        def part(source: int, target: int) -> Tensor:
            dtype, shape = kinds[(source + target) % len(kinds)]
            return self._of(source * size + target, dtype, shape)

        received = [part(source, rank) for source in range(size)]
        sent = [part(rank, target) for target in range(size)]
        given = [laid(each, layout if allows(each.dtype, each.shape, layout) else "contiguous") for each in sent]
        self._start(case, partial(self.group.all_to_all, [each.tensor for each in given]), given, returned=received)

    def barrier(self) -> None:
        self._start(self._case("barrier"), self.group.barrier, [])

    # ---- messages -----------------------------------------------------------------------------------------

    def ring(self, dtype: torch.dtype, shape: Shape, layout: str = "contiguous", tag: int = 0) -> None:
        """Send to the next rank, receive from the one before."""
        case = self._case("ring", dtype, shape, layout, tag)
        rank, size = self.group.rank, self.group.size
        tag = 0 if self.group.backend.name == "nccl" else tag  # NCCL has no tags
        before, after = (rank - 1) % size, (rank + 1) % size
        given = laid(torch.zeros(shape, device=self.group.backend.place).to(dtype), layout)
        sending = self.group.isend(laid(self._own(dtype, shape), layout).tensor, after, tag)
        receive = self.group.irecv if self._asynchronous else self.group.recv
        self._start(
            case,
            lambda async_op: receive(given.tensor, before, tag),
            [given],
            self._of(before, dtype, shape),
            returned=...,
        )
        self._start(case, lambda async_op: sending if async_op else sending.wait(), [])

    # ---- all of them --------------------------------------------------------------------------------------

    def run(self, operation: str, dtype: torch.dtype, shape: Shape, **settings: Any) -> None:
        """Run an operation by its name; it takes those of the settings that it has."""
        settings["src"] = settings["dst"] = settings.pop("root")
        method = getattr(self, operation)
        taken = inspect.signature(method).parameters
        method(dtype, shape, **{name: value for name, value in settings.items() if name in taken})

    def every_operation(self, dtype: torch.dtype, shape: Shape, layout: str = "contiguous") -> None:
        """Run each operation once, with the last rank as root; `shape` has at least one dimension."""
        for operation in (*WITH_SYMMETRIC, "scan", "gather", "scatter", "ring"):
            self.run(operation, dtype, shape, root=self.group.size - 1, dim=len(shape) - 1, layout=layout)
        self.all_to_all([(dtype, shape)], layout)

    def every_symmetric_operation(
        self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM, which: int = 0
    ) -> None:
        """Run once each operation that has ways of its own for symmetric tensors.

        `which` chooses the root and the dimension.
        """
        root, dim = which % self.group.size, which % max(1, len(shape))
        for operation in WITH_SYMMETRIC[: 5 if shape else 4]:
            self.run(operation, dtype, shape, op=op, root=root, dim=dim)

    def finish(self) -> None:
        """Wait for what is under way; raise if anything was wrong."""
        self.settle()
        shown = [*self.problems[:_SHOWN], *(["..."] if len(self.problems) > _SHOWN else [])]
        assert not self.problems, f"{len(self.problems)} problems:\n" + "\n".join(shown)

    def settle(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._under_way.pop(0)()

    # ---- steps --------------------------------------------------------------------------------------------

    def _lay(self, source: Tensor, layout: str) -> Watched:
        """Put into memory what this rank gives to an operation that all ranks call with a tensor."""
        return laid(source, layout) if self._put is None else self._put(source)

    def _case(self, operation: str, *options: object) -> str:
        """Name the case; the values of the next one may be different."""
        self._seed += self._put is None
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

    def _start(
        self,
        case: str,
        operation: Callable[..., Any],
        given: Sequence[Watched],
        written: Expected | Tensor | None = None,
        returned: Any = None,
    ) -> None:
        """Run an operation and compare, now or when it is complete.

        Args:
            case: Names it.
            operation: Takes `async_op`.
            given: The tensors that it is called with.
            written: What it writes into them; None: nothing.
            returned: What it returns; `...`: does not matter.
        """
        before = [each.tensor.clone() for each in given]
        work = operation(async_op=self._asynchronous)

        def compare() -> None:
            self._compare_result(case, work.result() if self._asynchronous else work, returned, given)
            for each, unchanged in zip(given, before, strict=True):
                self._agree(case, each.tensor, unchanged if written is None else written)
                self._expect(case, each.is_intact(), "changed memory around the tensor")
                self._expect(case, written is None or each.autograd_knows(), "unseen by autograd")

        self._under_way.append(compare)
        if len(self._under_way) > (2 if self._asynchronous else 0):
            self._under_way.pop(0)()

    def _compare_result(self, case: str, got: Any, wanted: Any, given: Sequence[Watched]) -> None:
        if isinstance(wanted, list):
            self._expect(case, len(got) == len(wanted), f"returned {len(got)} tensors")
            for one, other in zip(got, wanted, strict=False):
                self._compare_result(case, one, other, given)
        elif wanted is None or wanted is ...:
            self._expect(case, got is None or wanted is ..., f"returned {got!r}")
        else:
            self._agree(case, got, wanted)
            shared = any(got.numel() and got.data_ptr() == each.tensor.data_ptr() for each in given)
            self._expect(case, not shared, "returned the memory of its input")
            self._expect(case, got.is_contiguous(), "not contiguous")

    def _agree(self, case: str, got: Tensor, wanted: Expected | Tensor) -> None:
        if isinstance(wanted, Expected):
            problem = wanted.difference(got)
        else:
            problem = None if same_bits(got, wanted) else f"got {got.dtype} {tuple(got.shape)} {got}, not {wanted}"
        self._expect(case, problem is None, str(problem))

    def _expect(self, case: str, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(f"{case}: {problem}")
