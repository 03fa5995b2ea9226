"""Memory of windows: backward keeps a tensor and its edges, in place of the padded copy with both.

x [.., rows, ..]     the layer before keeps it anyway
before, after        rows that were fetched from other ranks, and zeros beyond the ends
padded               made for the call, freed behind it, made again in backward

A convolution is a sum, so along one dimension it needs no padded copy: it is computed of the own rows, which torch
pads with zeros, and those of the edges are added to the outputs at both ends. Between nodes the edges are on their
way meanwhile; see `autograd.begin_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad

from ..autograd import begin_rows, fetch_rows
from ..groups.process_group import ProcessGroup
from ..utils.rows import RowPlan
from .window_arithmetic import Window


class _Edges(NamedTuple):
    """Rows around some rows of a tensor.

    Attributes:
        dim: The dimension along which they lie.
        start: The first of the tensor's rows.
        stop: The end of them.
        before: The rows before.
        after: The rows behind.
    """

    dim: int
    start: int
    stop: int
    before: Tensor
    after: Tensor


class _Apart(NamedTuple):
    """Own rows for a convolution, and edges that are not beside them.

    Attributes:
        dim: The dimension along which they lie.
        start: The first own row that is needed.
        rows: The own rows.
        before: How many edges are before the own rows, on other ranks or beyond the ends.
        behind: How many are behind.
        outputs: The number of outputs.
        window: The convolution's window.
        of_others: Whether other ranks have rows before, and behind.
        wait: Waits for the edges and returns them.
    """

    dim: int
    start: int
    rows: Tensor
    before: int
    behind: int
    outputs: int
    window: Window
    of_others: tuple[bool, bool]
    wait: Callable[[], Tensor]


class Convolve(Protocol):
    """A convolution with its stride, dilation and groups."""

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        """Return the outputs."""


class Padded:
    """A tensor with its edges along several dimensions, one after the other.

    Args:
        tensor: The tensor, without edges.

    Attributes:
        tensor: With the edges so far.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._own, self._version = tensor.detach(), None if tensor.is_inference() else tensor._version
        self._edges: list[_Edges] = []
        self._apart: _Apart | None = None

    def fetch(self, plan: RowPlan, group: ProcessGroup, dim: int, value: float) -> None:
        """Fetch rows of other ranks along a dimension; collective."""
        start, stop, at = next(((run.start, run.stop, run.at) for run in plan.own(group.rank)), (0, 0, 0))
        if stop - start == plan.rows(group.rank) == plan.sizes[group.rank]:  # the own part, without a copy
            self.tensor, wait = begin_rows(self.tensor, plan.edges, group, dim, start, stop)
            wait()
            return
        self.tensor = fetch_rows(self.tensor, plan, group, dim, value)
        rows = self.tensor.detach()
        ends = (0, at), (at + stop - start, rows.shape[dim])
        before, after = (rows.narrow(dim, low, high - low).clone() for low, high in ends)
        self._edges.append(_Edges(dim, start, stop, before, after))

    def begin(self, plan: RowPlan, group: ProcessGroup, dim: int, window: Window, *, travels: bool) -> bool:
        """Begin to fetch a convolution's rows along a dimension, the last one; collective.

        Args:
            plan: The plan.
            group: The ranks.
            dim: The dimension.
            window: The window.
            travels: Whether the rows travel during computation.

        Returns:
            False if few outputs need own rows alone: nothing is fetched.
        """
        runs, size, step = plan.own(group.rank), plan.rows(group.rank), window.stride
        if len(runs) != 1:
            return False
        ((_, start, stop, before),) = runs
        behind, outputs = size - before - (stop - start), (size - window.extent) // step + 1
        if 2 * (-(-before // step) - (-behind // step)) > outputs:
            return False
        edges = plan.edges
        at = [run.at for run in edges.foreign(group.rank)]
        of_others = min(at, default=before) < before, max(at, default=-1) >= before
        rows, wait = begin_rows(self.tensor, edges, group, dim, start, stop, async_op=travels)
        self._apart = _Apart(dim, start, rows, before, behind, outputs, window, of_others, wait)
        return True

    def computed(self, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return outputs, which a function computes of the tensor with its edges."""
        with self._saved_in_parts():
            return compute(self.tensor)

    def convolved(self, convolve: Convolve, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        """Return a convolution of the tensor with its edges; collective if these are on their way."""
        if self._apart is None:
            return self.computed(lambda rows: convolve(rows, weight, bias, padding))
        apart, self._apart = self._apart, None
        dim, step, outputs = apart.dim, apart.window.stride, apart.outputs
        # As torch pads both ends alike, there may be more outputs than needed at both.
        more = max(-((apart.before - apart.behind) // step), 0)
        sizes = list(padding)
        sizes[dim - apart.rows.dim()] = apart.before + more * step
        with self._saved_in_parts(dim, apart.start, apart.rows.shape[dim]):
            result = convolve(apart.rows, weight, bias, sizes)
        sizes[dim - apart.rows.dim()] = 0
        starts, sums = [], []
        for is_behind, edges in enumerate(apart.wait().tensor_split([apart.before], dim)):
            if apart.of_others[is_behind]:
                rows, taps = _of_edges(edges, weight, dim, apart.window, outputs, is_behind=bool(is_behind))
                sums.append(convolve(rows, taps, None, sizes))
                starts.append(more + (outputs - sums[-1].shape[dim] if is_behind else 0))
        if sums:
            result = _EdgesAdded.apply(result, dim, starts, *sums)  # type: ignore[no-untyped-call]
        return result if result.shape[dim] == outputs else result.narrow(dim, more, outputs)

    def pad(self, dim: int, before: int, after: int, value: float) -> None:
        """Add rows of a constant at both ends of a dimension; local."""
        own = self.tensor.detach()
        shapes = ([*own.shape[:dim], size, *own.shape[dim + 1 :]] for size in (before, after))
        ends = [own.new_full(shape, value) for shape in shapes]
        self._edges.append(_Edges(dim, 0, own.shape[dim], *ends))
        self.tensor = torch.cat([ends[0], self.tensor, ends[1]], dim)

    @contextmanager
    def _saved_in_parts(self, *narrowed: int) -> Iterator[None]:
        """Keep the tensor with its edges in parts, where a function in this context saves it for backward.

        Args:
            narrowed: Dimension, first row and number of the rows that the function gets; without them, all.
        """
        if not self._edges or not self.tensor.requires_grad:
            yield
            return
        given = self.tensor.narrow(*narrowed) if narrowed else self.tensor
        address, shape = given.data_ptr(), given.shape

        def again() -> Tensor:
            return self._again().narrow(*narrowed) if narrowed else self._again()

        def pack(saved: Tensor) -> Any:
            return again if saved.data_ptr() == address and saved.shape == shape else saved

        def unpack(kept: Any) -> Tensor:
            tensor: Tensor = kept() if callable(kept) else kept
            return tensor

        with saved_tensors_hooks(pack, unpack):
            yield
        self.tensor = self._own  # the padded copy is freed with the caller's last reference

    def _again(self) -> Tensor:
        if self._own._version != self._version:
            raise RuntimeError(
                "a tensor that a convolution or pool needs for its gradient was changed in place; "
                "clone it, or use the function that does not work in place"
            )
        padded = self._own
        for dim, start, stop, before, after in self._edges:
            padded = torch.cat([before, padded.narrow(dim, start, stop - start), after], dim)
        return padded


def _of_edges(
    edges: Tensor, weight: Tensor, dim: int, window: Window, outputs: int, *, is_behind: bool
) -> tuple[Tensor, Tensor]:
    """Return edges, with zeros for own rows, and the slice of the weight that meets them, for one end's outputs."""
    count, at = edges.shape[dim], dim - edges.dim()
    touched = min(-(-count // window.stride), outputs)
    taps = min(-(-count // window.dilation), window.kernel)
    own = (touched - 1) * window.stride + (taps - 1) * window.dilation + 1 - count
    ends = [own, 0] if is_behind else [0, own]  # negative: further edges, which meet no output
    rows = edges if not own else pad(edges, [0, 0] * (-1 - at) + ends)
    return rows, weight.narrow(at, window.kernel - taps if is_behind else 0, taps)


class _EdgesAdded(Function):
    """A tensor with others added to its rows, in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, starts: Sequence[int], *others: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.dim, ctx.rows = dim, [(start, each.shape[dim]) for start, each in zip(starts, others, strict=True)]
        for (start, rows), other in zip(ctx.rows, others, strict=True):
            tensor.narrow(dim, start, rows).add_(other)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, *(grads[0].narrow(ctx.dim, *rows) for rows in ctx.rows)
