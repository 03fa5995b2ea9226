"""Memory of windows: backward keeps a tensor and its edges, in place of the padded copy with both.

x [.., rows, ..]     the layer before keeps it anyway
before, after        rows that were fetched from other ranks, and zeros beyond the ends
padded               made for the call, freed behind it, made again in backward

Between nodes there is no padded copy: outputs that need own rows alone are computed while the edges are on their
way, then those at both ends; see `autograd.begin_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


class _Ahead(NamedTuple):
    """Outputs of own rows alone, which are computed before the others.

    Attributes:
        dim: The dimension along which rows are on their way.
        start: The first own row that the outputs need.
        parts: The own rows of these outputs, then those of the outputs before, and of the ones behind.
        at: How many edges are before the own rows.
        wait: Waits for the edges and returns them.
    """

    dim: int
    start: int
    parts: list[Tensor]
    at: int
    wait: Callable[[], Tensor]


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
        self._ahead: _Ahead | None = None

    def fetch(self, plan: RowPlan, group: ProcessGroup, dim: int, value: float) -> None:
        """Fetch rows of other ranks along a dimension; collective."""
        self.tensor = fetch_rows(self.tensor, plan, group, dim, value)
        start, stop, at = next(((run.start, run.stop, run.at) for run in plan.own(group.rank)), (0, 0, 0))
        rows = self.tensor.detach()
        ends = (0, at), (at + stop - start, rows.shape[dim])
        before, after = (rows.narrow(dim, low, high - low).clone() for low, high in ends)
        self._edges.append(_Edges(dim, start, stop, before, after))

    def begin(self, plan: RowPlan, group: ProcessGroup, dim: int, value: float, window: Window) -> bool:
        """Begin to fetch rows along a dimension, the last one, if most outputs need none of them; collective."""
        runs, step, extent = plan.own(group.rank), window.stride, window.extent
        if len(runs) != 1 or extent < step:
            return False
        ((_, own, end, at),) = runs
        outputs = (plan.rows(group.rank) - extent) // step + 1
        first, stop = -(-at // step), (at + end - own - extent) // step + 1
        if 2 * (stop - first) <= outputs:
            return False
        shift = own - at
        before = own, max(shift + (first - 1) * step + extent, own)
        behind = min(shift + stop * step, end), end
        slices = (shift + first * step, shift + (stop - 1) * step + extent), before, behind
        parts, wait = begin_rows(self.tensor, plan.edges, group, dim, slices, value)
        self._ahead = _Ahead(dim, slices[0][0], parts, at, wait)
        return True

    def computed(self, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return outputs, which a function computes of rows; collective if rows are on their way."""
        if self._ahead is None:
            with self._saved_in_parts():
                return compute(self.tensor)
        dim, start, (inner, *ends), at, wait = self._ahead
        with self._saved_in_parts(dim, start, inner.shape[dim]):
            parts = [compute(inner)]
        before, behind = wait().tensor_split([at], dim)
        if before.shape[dim]:
            parts.insert(0, compute(torch.cat([before, ends[0]], dim)))
        if behind.shape[dim]:
            parts.append(compute(torch.cat([ends[1], behind], dim)))
        return torch.cat(parts, dim)

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
