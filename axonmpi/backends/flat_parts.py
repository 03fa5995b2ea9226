"""`FlatParts`: a list of tensors as one flat tensor, copied only if they do not lie end to end.

    [t0, 3, t1]     | t0 .......... | 0 0 0 | t1 .... |         an integer n stands for n zeros

A range is copied when it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .buffers import as_bytes, flat_elements


class FlatParts:
    """Some tensors of one dtype, end to end.

    Args:
        parts: Tensors of any shape and strides; an integer stands for so many zeros.
        dtype: Their dtype.

    Attributes:
        numel: Elements in all.
        dtype: Their dtype.
    """

    def __init__(self, parts: Sequence[Tensor | int], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._parts = list(parts)
        self._lines: list[np.ndarray | None] | None = None
        sizes = [part if isinstance(part, int) else part.numel() for part in parts]
        self._starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        self.numel: int = self._starts[-1]

    def read(self, start: int, stop: int, target: np.ndarray) -> None:
        """Copy the bytes of elements `start` to `stop` to the beginning of `target`; local."""
        if self._lines is None:
            self._lines = [
                None if isinstance(part, int) else as_bytes(flat_elements(part)).numpy() for part in self._parts
            ]
        itemsize = self.dtype.itemsize
        index = bisect_right(self._starts, start) - 1
        at = 0
        while start < stop:
            end = min(stop, self._starts[index + 1])
            nbytes = (end - start) * itemsize
            line, first = self._lines[index], (start - self._starts[index]) * itemsize
            target[at : at + nbytes] = 0 if line is None else line[first : first + nbytes]
            at, start, index = at + nbytes, end, index + 1

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return [part for part in self._parts if isinstance(part, Tensor)]

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return a view of [stop - start] elements, None if they are of several tensors or zeros."""
        index = bisect_right(self._starts, start) - 1
        part = self._parts[index] if stop <= self.numel and start < stop else 0
        if isinstance(part, int) or stop > self._starts[index + 1]:
            return None
        if not part.is_contiguous() or part.is_neg() or part.is_conj():
            return None
        return part.view(-1)[start - self._starts[index] : stop - self._starts[index]]

    def line(self) -> Tensor:
        """Return all [numel] elements, to be read only: the tensor's own memory if there is only one; local."""
        whole = self.view(0, self.numel)
        return self.flat() if whole is None else whole

    def flat(self, dtype: torch.dtype | None = None, place: torch.device | None = None) -> Tensor:
        """Return [numel] all of them on a device, by default the CPU, copied and converted; local."""
        result = torch.empty(self.numel, dtype=dtype or self.dtype, device=place or "cpu")
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            if isinstance(part, int):
                result[start:stop].zero_()
            else:
                result[start:stop].view(part.shape).copy_(part)
        return result
