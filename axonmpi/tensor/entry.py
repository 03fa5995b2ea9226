"""One tensor that has entered a region: its gradient while the ranks' parts are summed.

Several layers may compute with an entered tensor: queries, keys and values. Each adds its part of the gradient as
soon as it has it, and the last one starts the sum over the ranks, which goes on while gradients of weights are
computed:

    backward     values ─ add ─┐
                 keys   ─ add ─┤
                 queries ─ add ─┴─ start ┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈ finish
                                         the weight of queries

With sequence parallelism the sum is a reduce-scatter. The whole input, which nobody has kept, is then gathered once
more for the gradients of weights, for all layers together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..groups.world import ProcessGroup
from ..matmul import product
from ..types import ReduceOp, Work
from ..utils.torch_internals import backward_number

__all__ = ["Entered", "Entry"]

_ATTRIBUTE = "_axonmpi_entered"
_NO_BACKWARD = -1


@dataclass
class Entered:
    """A tensor that layers with divided outputs compute with.

    Attributes:
        tensor: The whole one.
        entry: What sums its gradient; None where there is nothing to sum.
        local: This rank's slice, if it was gathered along the sequence.
    """

    tensor: Tensor
    entry: Entry | None = None
    local: Tensor | None = None

    def mark(self) -> None:
        """Let the layers know that get the tensor."""
        setattr(self.tensor, _ATTRIBUTE, (self.entry, self.local))

    @classmethod
    def of(cls, tensor: Tensor) -> Entered:
        """Return what is known about a tensor: nothing, unless it is a marked one itself."""
        return cls(tensor, *getattr(tensor, _ATTRIBUTE, ()))


class Entry:
    """Sums the gradient of an entered tensor over the ranks.

    Args:
        group: The ranks.
        shape: Of the entered tensor.
        dim: Along which it was gathered; None if it was not.

    Attributes:
        group: As given.
        dim: As given.
        gradients: How many layers will add to the gradient, if backward reaches all of them.
        weights: How many layers need the whole values in backward, likewise.
    """

    def __init__(self, group: ProcessGroup, shape: torch.Size, dim: int | None) -> None:
        self.dim = dim
        self.gradients = 0
        self.weights = 0
        self.group = group
        self._shape = shape
        self._overlaps = group.backend.overlaps
        self._begin(_NO_BACKWARD)
        self._drop()

    def _begin(self, backward: int) -> None:
        self._backward = backward
        self._added = 0
        self._total: Tensor | None = None
        self._under_way: _Sum | None = None

    def _drop(self) -> None:
        self._taken = 0
        self._whole: Tensor | Work | None = None

    def add(self, grad: Tensor, weight: Tensor) -> None:
        """Add a layer's part of the gradient; the last one starts the sum, which is collective.

        Args:
            grad: [N, out] of the layer's outputs.
            weight: [out, in] of the layer.
        """
        backward = backward_number()
        if self._backward != backward:  # one that has failed may have left its parts
            self._begin(backward)
        part = product(grad, weight)
        self._total = part if self._total is None else self._total.add_(part)
        self._added += 1
        if self._added == self.gradients and self._overlaps:
            self._under_way = _Sum(self.group, self._total.view(self._shape), self.dim, async_op=True)

    def finish(self, rest: Tensor | None) -> Tensor | None:
        """Return the sum over the ranks, or this rank's slice of it where the tensor was gathered; collective.

        Args:
            rest: [shape] the gradient as far as it was not added here, but came from others than layers.
        """
        total = None if self._total is None else self._total.view(self._shape)
        under_way = self._under_way
        self._begin(_NO_BACKWARD)
        self._drop()
        if under_way is not None:
            result = under_way.wait()
            return result if rest is None else result + self._sum(_own(rest))
        if total is None:
            return None if rest is None else self._sum(_own(rest))
        return self._sum(total if rest is None else total + rest)

    def _sum(self, parts: Tensor) -> Tensor:
        return _Sum(self.group, parts, self.dim, async_op=False).wait()

    def fetch(self, local: Tensor) -> None:
        """Begin to gather the whole values again, unless somebody has; collective.

        Args:
            local: This rank's slice.
        """
        if self._whole is None:
            assert self.dim is not None
            self._whole = self.group.all_gather(local.detach(), self.dim, async_op=self._overlaps)

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole values; they are dropped when all layers have had them.

        Args:
            local: This rank's slice.
        """
        self.fetch(local)
        if isinstance(self._whole, Work):
            self._whole = self._whole.result()
        whole: Any = self._whole
        self._taken += 1
        if self._taken >= self.weights:
            self._drop()
        tensor: Tensor = whole
        return tensor


class _Sum:
    """A sum over the ranks, perhaps still under way; `parts` is overwritten or, to be scattered, read."""

    def __init__(self, group: ProcessGroup, parts: Tensor, dim: int | None, *, async_op: bool) -> None:
        self._value: Tensor | None = None
        self._work: Any = None
        if dim is None:
            self._value = parts
            self._work = group.all_reduce(parts, ReduceOp.SUM, async_op)
        elif async_op:
            self._work = group.reduce_scatter(parts, ReduceOp.SUM, dim, async_op=True)
        else:
            self._value = group.reduce_scatter(parts, ReduceOp.SUM, dim)

    def wait(self) -> Tensor:
        """Return the sum, or this rank's slice."""
        if self._work is not None:
            result = self._work.result()
            self._value = result if self._value is None else self._value
        assert self._value is not None
        return self._value


def _own(tensor: Tensor) -> Tensor:
    """Return a copy that may be written into."""
    return tensor.clone(memory_format=torch.contiguous_format)
